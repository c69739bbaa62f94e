"""Evaluate a checkpoint with EleutherAI's lm-evaluation-harness: its command line, with the model ``torchtrain``.

    python -m torchtrain.evaluate --model_args checkpoint=outputs/debug_model --tasks hellaswag

The default is ``--model torchtrain``. The model's arguments are checkpoint, dtype, tokenizer_path and weights, as for
torchtrain.generate. With torchrun, the model is sharded over the ranks.
"""

import argparse
import logging
import sys
import traceback
from collections.abc import Iterable, Sequence
from itertools import chain
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from torchtrain.cli import command, is_first_rank, run_and_exit
from torchtrain.config.registry import import_modules
from torchtrain.config.schema import require_local
from torchtrain.distributed.process_group import destroy_process_group
from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.files import require_folder
from torchtrain.inference.generation import Sampling, generate
from torchtrain.inference.trained_model import load_model

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    sys.stderr.write(f"error: evaluation needs lm-evaluation-harness: pip install 'torchtrain[eval]' ({error})\n")
    sys.exit(ConfigError.exit_code)

# Modules of the harness that raise errors about its options.
HARNESS_OPTIONS = ("lm_eval.config", "lm_eval._cli", "lm_eval.api.registry", "lm_eval.api.model", "lm_eval.evaluator")


@command
def main(argv: Sequence[str]) -> int:
    """Run the harness, and return the exit code of the process."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_path", "-o", default="")
    parser.add_argument("--model", "-M")
    parser.add_argument("--config", "-C")
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--import", dest="modules", nargs="+", default=[])
    imported, argv = own.parse_known_args(argv)
    import_modules(imported.modules, "--import")
    sys.argv[1:] = argv  # the harness reads its options from sys.argv
    given, others = parser.parse_known_args(argv)
    is_run = bool(argv) and argv[0] not in ("ls", "validate") and not {"-h", "--help"} & set(others)
    if is_run and not given.model and not given.config:
        sys.argv += ["--model", "torchtrain"]
    if path := given.output_path:
        require_local(path, "--output_path")
        folder = Path(path).parent if path.endswith(".json") else Path(path)
        require_folder(folder, f"--output_path = {path!r}")
    log_records = BufferingHandler(sys.maxsize)
    tracker = logging.getLogger(EvaluationTracker.__module__)
    tracker.setLevel(logging.INFO)  # independent of the verbosity that the user chooses
    tracker.addHandler(log_records)
    try:
        cli_evaluate()
    except (ValueError, TypeError, NotImplementedError, FileNotFoundError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not frame.f_globals["__name__"].startswith(HARNESS_OPTIONS):
            raise
        remedy = "`lm-eval ls tasks` lists all" if "Tasks not found" in str(error) else "see --help"
        raise ConfigError(
            f"{error}; {remedy}. A checkpoint is evaluated by --model torchtrain (the default) --model_args "
            "checkpoint=FOLDER --tasks TASK"
        ) from None
    except ConnectionError as error:  # to the Hugging Face hub
        raise StorageError(
            f"a task's data cannot be fetched: {error}. Connect this machine to the network, or fetch them on another "
            "machine into a folder that HF_HOME names on both"
        ) from None
    if dist.is_initialized():
        destroy_process_group()
    messages = [record.getMessage() for record in log_records.buffer]
    for i, message in enumerate(messages):
        if message.startswith("Could not save"):  # the harness only logs this, and then the error
            raise TorchtrainError(f"{': '.join(messages[i : i + 2])}; free space, or name another --output_path")
    return 0


@register_model("torchtrain")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A checkpoint as a model of the harness. Texts are tokenized as by its Hugging Face model.

    The model is sharded over the ranks of torchrun, while every rank processes all requests. Therefore each is rank 0
    of 1 to the harness, which finds by LOCAL_RANK the rank that writes the results.
    """

    def __init__(
        self,
        checkpoint: str = "",
        dtype: str = "auto",
        tokenizer_path: str = "",
        weights: str = "trained",
        device: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,  # noqa: ARG002
        **unknown: Any,
    ):
        """Device and batch sizes come from the harness's own options of these names; "auto" is 8.

        Raises:
            ConfigError: ``checkpoint`` is missing, or an argument is unknown.
        """
        super().__init__()
        if unknown or not checkpoint:
            raise ConfigError(
                f"--model_args has {', '.join(unknown) or 'no checkpoint=FOLDER'}; torchtrain takes checkpoint, dtype, "
                "tokenizer_path and weights"
            )
        require_local(tokenizer_path, "tokenizer_path in --model_args")
        if str(batch_size).startswith("auto"):
            batch_size = 8
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"--batch_size = {batch_size!r} must be auto or an integer of at least 1")
        # The harness's default is cuda, and its own models fall back to the available device.
        device = "cpu" if device == "cpu" else "auto"
        self.trained = load_model(checkpoint, device, dtype, tokenizer_path, weights)
        self.batch_size = int(batch_size)

    @property
    def max_length(self) -> int:
        return int(self.trained.model.config.max_seq_len)

    @property
    def eot_token_id(self) -> int | None:
        return self.trained.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """First token of a text without context: bos, or eos if there is none."""
        for token in (self.trained.tokenizer.bos_id, self.eot_token_id):
            if token is not None:
                return token
        raise ConfigError(
            "the task has texts without a context, and the tokenizer has neither a BOS nor an EOS token to begin them "
            "with: take a task with contexts, or set another tokenizer by tokenizer_path in --model_args"
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokenizer = self.trained.tokenizer
        if add_special_tokens is False:
            return tokenizer.encode(string)
        begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if add_special_tokens is None and begin is not None:
            spelled = tokenizer.decode([begin])
            if spelled and string.startswith(spelled):  # as in the harness's own model, no second one is added
                return [begin, *tokenizer.encode(string.removeprefix(spelled))]
        return self.trained.encode_prompt(string)

    def _batches(self, requests: Collator, disable: bool) -> Iterable[Any]:
        total = -(-len(requests) // self.batch_size)
        # None shows a progress bar only on a terminal; in a file it would be one long line.
        quiet = disable or not is_first_rank() or None
        return tqdm(requests.get_batched(n=self.batch_size), total=total, disable=quiet)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        if (longest := max((len(continuation) for _, _, continuation in requests), default=0)) > self.max_length:
            raise ConfigError(
                f"the task scores answers of {longest} tokens, and the context of the model has "
                f"{self.max_length}: take a task with shorter answers, or train with a longer training.seq_len"
            )
        # Longest first, so that a lack of memory is found immediately, and the rows of a batch have similar lengths.
        collator = Collator(requests, sort_fn=lambda request: -len(request[1]) - len(request[2]))
        results: list[tuple[float, bool]] = []
        for batch in self._batches(collator, disable_tqdm):
            rows = [torch.tensor((context + wanted)[-self.max_length - 1 :]) for _, context, wanted in batch]
            # No token attends to the padding on the right.
            tokens = pad_sequence([row[:-1] for row in rows], batch_first=True)
            logits = self.trained.model(tokens.to(self.trained.device))
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            for (texts, _, continuation), row, row_logits in zip(batch, rows, logits, strict=True):
                begin, end = len(row) - 1 - len(continuation), len(row) - 1
                scores = row_logits[begin:end].float().log_softmax(dim=-1)
                wanted = row[begin + 1 :].to(scores.device)
                likelihood = scores.gather(1, wanted[:, None]).sum().item()
                results.append((likelihood, bool((scores.argmax(dim=-1) == wanted).all())))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return collator.get_original(results)  # type: ignore[no-any-return]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows_of = []
        for request in requests:
            tokens, begin = self.tok_encode(request.args[0]), self.prefix_token_id
            windows = get_rolling_token_windows(tokens, begin, max_seq_len=self.max_length, context_len=1)
            windows_of.append([(None, *make_disjoint_window(window)) for window in windows])
        results = iter(self._loglikelihood_tokens([*chain(*windows_of)], disable_tqdm=disable_tqdm))
        return [sum(next(results)[0] for _ in windows) for windows in windows_of]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        collator = Collator(
            [request.args for request in requests],
            sort_fn=lambda arguments: (-len(self.tok_encode(arguments[0])), arguments[0]),
            group_by="gen_kwargs",
            group_fn=lambda arguments: arguments[1],
        )
        texts: list[str] = []
        for batch in self._batches(collator, disable_tqdm):
            options = normalize_gen_kwargs(batch[0][1])
            found = self._complete([context for context, _ in batch], options, len(texts))
            for (context, arguments), text in zip(batch, found, strict=True):
                self.cache_hook.add_partial("generate_until", (context, arguments), text)
            texts += found
        return collator.get_original(texts)  # type: ignore[no-any-return]

    def _complete(self, contexts: list[str], options: dict[str, Any], first: int) -> list[str]:
        tokenizer = self.trained.tokenizer
        stops = handle_stop_sequences(options.get("until"), eos=None)
        most = min(options["max_gen_toks"], self.max_length - 1)
        encoded = (self.tok_encode(context) or [self.prefix_token_id] for context in contexts)
        prompts = [tokens[-(self.max_length - most) :] for tokens in encoded]
        sampling = Sampling(
            options.get("temperature", 0.0),
            max(options.get("top_k") or 0, 0),  # some tasks say -1 or null for all
            options.get("top_p") or 1.0,
            torch.initial_seed(),  # the harness's --seed
        )
        made: list[list[int]] = [[] for _ in contexts]
        texts = [""] * len(contexts)
        eos_ids = set(self.trained.eos_ids)
        if tokenizer.eos_id is not None:  # the harness adds it to those of the model
            eos_ids.add(tokenizer.eos_id)
        # A task may request several answers to one context: their indices seed different random numbers in any batch.
        steps = generate(
            self.trained.model,
            prompts,
            sampling,
            max_new_tokens=most,
            eos_ids=eos_ids,
            first_prompt=first,
        )
        for step in steps:
            for i, token in enumerate(step):
                if token is not None and token not in tokenizer.special_ids:
                    made[i].append(token)
                    texts[i] = tokenizer.decode(made[i])
            if all(
                token is None or any(stop in text for stop in stops) for token, text in zip(step, texts, strict=True)
            ):
                break
        return [postprocess_generated_text(text, stops, None) for text in texts]


if __name__ == "__main__":
    run_and_exit(main)
