"""Generate text with a trained model: ``python -m torchtrain.generate outputs/debug_model --prompt "def "``."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

from torchtrain.cli import command, is_first_rank, reports_errors
from torchtrain.config.command_options import POSITIONAL, parse_command
from torchtrain.config.registry import import_modules
from torchtrain.config.section import Count, CountOrZero, LocalPath, at_least, check_values, require
from torchtrain.errors import ConfigError
from torchtrain.files import MISSING, json_object, with_retries, writing
from torchtrain.logging import logger

if TYPE_CHECKING:
    from torchtrain.plugins.evaluation.generation import Sampling
    from torchtrain.plugins.evaluation.trained_model import TrainedModel

NEW_TOKENS = 128  # default maximum


@dataclass(frozen=True)
class GenerateOptions:
    checkpoint: Annotated[str, POSITIONAL]
    """A run's folder (uses its newest checkpoint), one step-N folder in it, a URL of these, or a Hugging Face folder.
    """
    prompt: str | None = None
    """Text to continue; "" begins a new document."""
    prompts_file: LocalPath = ""
    """File with one prompt per line; a file named .jsonl has one object per line with the text under "prompt"."""
    output_file: LocalPath = ""
    """Write JSON lines to this file, not to the terminal: prompt, text, tokens, and why the text ended (eos or
    length)."""
    batch_size: Count = 8
    """Number of prompts from the file in one batch."""
    max_new_tokens: Count | None = None
    """Maximum number of new tokens per prompt. Default: 128, or fewer if the model's context is exhausted before."""
    temperature: Annotated[float, at_least(0)] = 0.8
    """Divides the logits before sampling; 0 always selects the most likely token."""
    top_k: CountOrZero = 0
    """Sample from this number of most likely tokens; 0: from all."""
    top_p: Annotated[float, ("lie above 0 and up to 1", lambda value: 0 < value <= 1)] = 1.0
    """Sample from the most likely tokens whose total probability is this; 1: from all."""
    seed: CountOrZero = 0
    """The same seed gives the same text."""
    weights: Literal["trained", "ema"] = "trained"
    """ema: the averaged weights that a run with ema.enable saves."""
    tokenizer_path: str = ""
    """The model's tokenizer, a file or folder, or a URL. Default: that of the run or of the Hugging Face folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device. auto: cuda if a GPU is available, otherwise cpu."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype of weights and activations. auto: bfloat16 on a GPU, float32 on the CPU."""
    import_: tuple[str, ...] = ()
    """Python modules to import first, which register the model of the checkpoint (docs/adding-a-model.md)."""

    def __post_init__(self) -> None:
        check_values(self, "--")
        has_one = (self.prompt is None) == bool(self.prompts_file)
        require(has_one, "generate needs either --prompt or --prompts_file; see --help")
        if self.output_file:
            file, given = Path(self.output_file), f"--output_file = {self.output_file!r}"
            require(not file.is_dir(), f"{given} is a folder; name a file in it")
            is_another = file.resolve() != Path(self.prompts_file).resolve()
            require(is_another, f"{given} is the file of the prompts; name another one")
            may_write = os.access(file if file.exists() else file.parent, os.W_OK)
            require(may_write, f"{given} cannot be written, or its folder does not exist; name another one")


@command
def main(argv: Sequence[str]) -> int:
    """Generate text, which rank 0 writes, and return the exit code of the process."""
    is_first = is_first_rank()
    options = parse_command(GenerateOptions, "generate", __doc__, argv, print_help=reports_errors())
    import_modules(options.import_, "--import")
    # Imported here, so that --help and rejected options do not import torch.
    from torchtrain.distributed.process_group import destroy_process_group
    from torchtrain.plugins.evaluation.generation import Sampling
    from torchtrain.plugins.evaluation.trained_model import load_model

    prompts = [options.prompt] if options.prompt is not None else read_prompts(Path(options.prompts_file))
    # Replaces lone surrogates, which JSON can contain and Python creates from bytes of an argument that are not UTF-8.
    prompts = [prompt.encode("utf-8", "replace").decode() for prompt in prompts]
    trained = load_model(options.checkpoint, options.device, options.dtype, options.tokenizer_path, options.weights)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    encoded = [encode(trained, prompt, options.max_new_tokens) for prompt in prompts]
    longest = trained.model.config.max_seq_len
    limits = [options.max_new_tokens or min(NEW_TOKENS, longest - len(tokens)) for tokens in encoded]
    streams = len(prompts) == 1 and not options.output_file
    with ExitStack() as stack:
        output: TextIO = sys.stdout
        if options.output_file or not is_first:
            path = options.output_file if is_first else os.devnull
            stack.enter_context(writing(path, "--output_file"))
            output = stack.enter_context(open(path, "w", encoding="utf-8"))

        def write(text: str) -> None:
            output.write(text)
            output.flush()

        if streams:
            write(prompts[0])
        for first in range(0, len(prompts), options.batch_size):
            batch, show = slice(first, first + options.batch_size), write if streams else None
            results = complete(trained, prompts[batch], encoded[batch], sampling, limits[batch], first, show)
            if not streams:
                write("".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results))
            if options.output_file:
                logger.info("%d of %d prompts", first + len(results), len(prompts))
    destroy_process_group()
    return 0


def read_prompts(file: Path) -> list[str]:
    """The prompts in ``file``; ConfigError names the first line that is not a prompt."""
    try:
        content = with_retries(file.read_bytes, file).decode("utf-8-sig")  # with or without a byte order mark
    except (*MISSING, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts_file {file} cannot be read: {error}") from None
    # Not splitlines, which also splits at characters such as U+2028, which JSON strings and prompts may contain.
    lines = [line for line in content.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts_file {file} contains no prompts; write one per line")
    if file.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        prompt = (json_object(line) or {}).get("prompt")
        if not isinstance(prompt, str):
            raise ConfigError(f'--prompts_file {file}: prompt {number} is not {{"prompt": "some text"}}: {line[:80]}')
        prompts.append(prompt)
    return prompts


def encode(trained: "TrainedModel", prompt: str, max_new_tokens: int | None) -> list[int]:
    """Token ids of ``prompt``; ConfigError if they and the new tokens exceed the context of the model."""
    tokens = trained.encode_prompt(prompt) or trained.tokenizer.encode(prompt, bos=True)
    longest = trained.model.config.max_seq_len
    if not tokens:
        raise ConfigError(f"the prompt {prompt!r} has no tokens, and the tokenizer has no BOS token; give some text")
    if len(tokens) + (max_new_tokens or 1) > longest:
        raise ConfigError(
            f"a prompt of {len(tokens)} tokens and --max_new_tokens = {max_new_tokens or 1} must fit into the "
            f"{longest} positions that the model was trained on: {prompt[:60]!r}; "
            + (f"try {longest - len(tokens)} or fewer" if len(tokens) < longest else "shorten the prompt")
        )
    return tokens


def complete(
    trained: "TrainedModel",
    prompts: Sequence[str],
    encoded: Sequence[list[int]],
    sampling: "Sampling",
    max_new_tokens: Sequence[int],
    first_prompt: int,
    show: Callable[[str], None] | None,
) -> list[dict[str, Any]]:
    """Complete each prompt; returns objects for the output file. ``show`` is called with new text of the first one."""
    from torchtrain.plugins.evaluation.generation import generate

    made: list[list[int]] = [[] for _ in prompts]
    shown = 0
    for step in generate(
        trained.model,
        encoded,
        sampling,
        max_new_tokens=max_new_tokens,
        eos_ids=trained.eos_ids,
        first_prompt=first_prompt,
    ):
        for tokens, token in zip(made, step, strict=True):
            if token is not None:
                tokens.append(token)
        if show is not None:
            text = text_of(trained, encoded[0], made[0])
            # An incomplete character of several bytes is decoded to U+FFFD: wait for its other bytes.
            if not text.endswith("\ufffd"):
                show(text[shown:])
                shown = len(text)
    results = []
    for prompt, before, tokens in zip(prompts, encoded, made, strict=True):
        ended_by = "eos" if tokens[-1] in trained.eos_ids else "length"
        text = text_of(trained, before, tokens)
        results.append({"prompt": prompt, "text": text, "tokens": tokens, "ended_by": ended_by})
    if show is not None:
        show(f"{results[0]['text'][shown:]}\n")
    return results


def text_of(trained: "TrainedModel", before: list[int], tokens: list[int]) -> str:
    """Text of ``tokens``, which follow the tokens ``before``, without a final EOS token."""
    known = tokens[:-1] if tokens[-1] in trained.eos_ids else tokens
    decode = trained.tokenizer.decode
    return decode(before + known)[len(decode(before)) :]
