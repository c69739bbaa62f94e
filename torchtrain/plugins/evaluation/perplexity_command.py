"""Loss and perplexity of a trained model on text files: ``python -m torchtrain.perplexity MODEL my_texts.jsonl``.

Each document is read from its beginning, in windows that overlap by one token, so that each of its tokens is predicted
once. With torchrun, the model is sharded over the ranks.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torchtrain.cli import command, is_first_rank, reports_errors
from torchtrain.config.command_options import POSITIONAL, parse_command
from torchtrain.config.registry import import_modules
from torchtrain.config.section import Count, check_values, require, require_local
from torchtrain.errors import ConfigError
from torchtrain.logging import counted
from torchtrain.progress import progress

if TYPE_CHECKING:
    from torchtrain.plugins.evaluation.trained_model import TrainedModel

SORTED_BATCHES = 32  # windows of as many batches are sorted by length, so that batches have little padding
LENGTH_MULTIPLE = 64  # of padded windows: the loss divides their length into chunks


@dataclass(frozen=True)
class PerplexityOptions:
    checkpoint: Annotated[str, POSITIONAL]
    """A run's folder (uses its newest checkpoint), one step-N folder in it, a URL of these, or a Hugging Face folder.
    """
    files: Annotated[tuple[str, ...], POSITIONAL]
    """Local files, folders of files, or patterns, as data.path takes them."""
    text_column: str = "text"
    """Field or column with the text, in formats that have several."""
    seq_len: Count | None = None
    """Number of tokens in a window. Default: the longest context that the model was trained on."""
    batch_size: Count = 8
    """Number of windows in one batch."""
    json: bool = False
    """Print JSON."""
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
        for file in self.files:
            require_local(file, "a file of perplexity")


@command
def main(argv: Sequence[str]) -> int:
    """Compute the loss, which rank 0 prints, and return the exit code of the process."""
    options = parse_command(PerplexityOptions, "perplexity", __doc__, argv, print_help=reports_errors())
    import_modules(options.import_, "--import")
    # Imported here, so that --help and rejected options do not import torch.
    from torchtrain.distributed.process_group import destroy_process_group
    from torchtrain.plugins.evaluation.trained_model import load_model

    trained = load_model(options.checkpoint, options.device, options.dtype, options.tokenizer_path, options.weights)
    found = perplexity(trained, options)
    if is_first_rank():
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}  # JSON has no others
        sys.stdout.write(f"{json.dumps(finite) if options.json else as_text(found)}\n")
    destroy_process_group()
    return 0


def perplexity(trained: "TrainedModel", options: PerplexityOptions) -> dict[str, Any]:
    """The loss of ``trained`` on the files of ``options``: the mean over tokens in nats, and what follows from it."""
    from torchtrain.datasets.data_identity import shortened
    from torchtrain.datasets.data_source import text_bytes
    from torchtrain.datasets.local_files import open_text_files
    from torchtrain.metrics.validation import perplexity_of

    longest = trained.model.config.max_seq_len
    seq_len = options.seq_len or longest
    require(seq_len <= longest, f"--seq_len = {seq_len} must be at most {longest}, the longest context of the model")
    tokenizer = trained.tokenizer
    begin = [token for token in (tokenizer.bos_id, tokenizer.eos_id) if token is not None][:1]
    label = f"FILES = {shortened([repr(file) for file in options.files])}"
    text_files = open_text_files(options.files, options.text_column, label)
    total_bytes = sum(Path(file).stat().st_size for file in text_files.files)
    counts = {"documents": 0, "tokens": 0, "bytes": 0}

    def windows() -> Iterator[list[int]]:
        for text in progress(((text, text_bytes(text)) for text in text_files.texts()), "scoring", total_bytes):
            ids = begin + tokenizer.encode(text)
            counts["documents"] += 1
            counts["tokens"] += max(0, len(ids) - 1)
            counts["bytes"] += text_bytes(text)
            for first in range(0, len(ids) - 1, seq_len):
                yield ids[first : first + seq_len + 1]

    total = loss_sum(trained, windows(), options.batch_size, seq_len)
    if counts["tokens"] == 0:
        raise ConfigError(f"{' '.join(options.files)}: there are no tokens to predict; name files with text")
    loss = total / counts["tokens"]
    bits_per_byte = total / math.log(2) / counts["bytes"]
    values = {"loss": loss, "perplexity": perplexity_of(loss), "bits_per_byte": bits_per_byte}
    return {**values, **counts, "seq_len": seq_len}


def loss_sum(trained: "TrainedModel", windows: Iterable[list[int]], batch_size: int, seq_len: int) -> float:
    """The sum of the losses in nats: in each of ``windows``, of all tokens but the first."""
    import torch
    from torch.distributed.tensor.parallel import loss_parallel

    from torchtrain.labels import IGNORE_INDEX
    from torchtrain.models.loss import OutputLoss

    output_loss, total, remaining = OutputLoss(), 0.0, iter(windows)
    while group := sorted(itertools.islice(remaining, SORTED_BATCHES * batch_size), key=len):
        for first in range(0, len(group), batch_size):
            rows = group[first : first + batch_size]
            length = min(math.ceil((len(rows[-1]) - 1) / LENGTH_MULTIPLE) * LENGTH_MULTIPLE, seq_len)
            rows = [row + [IGNORE_INDEX] * (length + 1 - len(row)) for row in rows]
            padded = torch.tensor(rows, device=trained.device)
            tokens, labels = padded[:, :-1].clamp(min=0), padded[:, 1:]  # no token attends to the padding on the right
            with torch.no_grad(), loss_parallel():  # with tensor parallelism, logits are sharded along the vocabulary
                losses = trained.model(tokens, head=lambda hidden, output, own=labels: output_loss(hidden, output, own))
            total += losses[0].item()
    return total


def as_text(found: dict[str, Any]) -> str:
    return (
        f"loss {found['loss']:.4f}  perplexity {found['perplexity']:.3f}  {found['bits_per_byte']:.4f} bits per byte\n"
        f"{counted(found['documents'], 'document')}, {found['tokens']:,} tokens, {found['bytes']:,} bytes, "
        f"in windows of {found['seq_len']:,} tokens"
    )
