"""Evaluate a checkpoint with EleutherAI's lm-evaluation-harness: its command line, with the model ``torchtrain``.

    python -m torchtrain.evaluate --model_args checkpoint=outputs/debug_model --tasks hellaswag

The default is ``--model torchtrain``. The model's arguments are checkpoint, dtype, tokenizer_path and weights, as for
torchtrain.generate. With torchrun, the model is sharded over the ranks.
"""

import argparse
import logging
import shutil
import sys
import traceback
from collections.abc import Collection, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from torchtrain.cli import command
from torchtrain.config.help import wrapped_description
from torchtrain.config.registry import import_modules
from torchtrain.config.section import require_local
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.process_group import destroy_process_group
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.files import require_folder
from torchtrain.optional_packages import install_command
from torchtrain.plugins.evaluation.generation import Sampling, generate
from torchtrain.plugins.evaluation.trained_model import load_model

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.loggers import EvaluationTracker

    from torchtrain.plugins.evaluation.harness import (
        HarnessBase,
        StoppedTexts,
        infinite_perplexities,
        task_data_error,
    )
except ImportError as error:
    sys.stderr.write(f"error: evaluation needs lm-evaluation-harness: {install_command('eval')} ({error})\n")
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
    if {"-h", "--help"} & set(argv):  # the harness's own help follows
        sys.stdout.write("\n".join(wrapped_description(__doc__ or "", shutil.get_terminal_size().columns)) + "\n")
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
        with infinite_perplexities():
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
        raise task_data_error(error, "--tasks") from None
    if dist.is_initialized():
        destroy_process_group()
    messages = [record.getMessage() for record in log_records.buffer]
    for i, message in enumerate(messages):
        if message.startswith("Could not save"):  # the harness only logs this, and then the error
            raise TorchtrainError(f"{': '.join(messages[i : i + 2])}; free space, or name another --output_path")
    return 0


@register_model("torchtrain")
class HarnessModel(HarnessBase):
    """A checkpoint as a model of the harness.

    The model is sharded over the ranks of torchrun, while every rank processes all requests. The harness finds by
    LOCAL_RANK the rank that writes the results.
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
    def text_tokenizer(self) -> Tokenizer:
        return self.trained.tokenizer

    @property
    def eos_ids(self) -> Collection[int]:
        return self.trained.eos_ids

    @property
    def added_ids(self) -> tuple[list[int], list[int]]:
        return self.trained.added_ids

    @torch.no_grad()
    def _scores(self, rows: Sequence[Sequence[int]], counts: Sequence[int]) -> list[tuple[float, bool]]:
        # No token attends to the padding on the right.
        tokens = pad_sequence([torch.tensor(row[:-1] or [0]) for row in rows], batch_first=True)
        logits = self.trained.model(tokens.to(self.trained.device))
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        results = []
        for row, count, row_logits in zip(rows, counts, logits, strict=True):
            end = len(row) - 1
            scores = row_logits[end - count : end].float().log_softmax(dim=-1)
            wanted = torch.tensor(row[len(row) - count :], dtype=torch.int64, device=scores.device)
            likelihood = scores.gather(1, wanted[:, None]).sum().item()
            results.append((likelihood, bool((scores.argmax(dim=-1) == wanted).all())))
        return results

    def _generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        max_new_tokens: int,
        first_prompt: int,
        texts: StoppedTexts,
    ) -> None:
        steps = generate(
            self.trained.model,
            prompts,
            sampling,
            max_new_tokens=max_new_tokens,
            eos_ids=texts.eos_ids,
            first_prompt=first_prompt,
        )
        for step in steps:
            # A text that has a stop sequence is continued until all have ended; what follows is cut.
            have_ended = [token is None or texts.add(i, token) for i, token in enumerate(step)]
            if all(have_ended):
                break
