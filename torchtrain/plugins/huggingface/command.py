"""Convert weights between formats: ``python -m torchtrain.convert outputs/debug_model my_model_hf``.

One process reads and writes one tensor or file at a time, so the model does not have to fit in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torchtrain.cli import command
from torchtrain.config.command_options import POSITIONAL, parse_command
from torchtrain.config.registry import import_modules
from torchtrain.config.section import Count, check_values


@dataclass(frozen=True)
class ConvertOptions:
    source: Annotated[str, POSITIONAL]
    """A run's folder (uses its newest checkpoint), a step-N folder in it, a URL of these, a Hugging Face folder, or a
    folder with Meta's original files (params.json and consolidated.*.pth)."""
    target: Annotated[str, POSITIONAL]
    """Folder to write, or a URL such as s3://bucket/model. It must not exist."""
    to: Literal["hf", "torchtrain"] = "hf"
    """hf: a folder that transformers can load. torchtrain: a checkpoint with only weights, to start runs from."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """dtype of the weights written."""
    weights: Literal["trained", "ema"] = "trained"
    """ema: the averaged weights that a run with ema.enable saves."""
    average: Count = 1
    """Average the weights of this number of newest checkpoints of a run."""
    tokenizer_path: str = ""
    """The model's tokenizer, a file or folder, or a URL. Default: that of the checkpoint's config or in the source."""
    import_: tuple[str, ...] = ()
    """Python modules to import first, which register the model of the checkpoint (docs/adding-a-model.md)."""

    def __post_init__(self) -> None:
        check_values(self, "--")


@command
def main(argv: Sequence[str]) -> int:
    """Convert the weights, and return the exit code of the process."""
    options = parse_command(ConvertOptions, "convert", __doc__, argv)
    import_modules(options.import_, "--import")
    # Imported here, so that --help does not import torch.
    from torchtrain.plugins.huggingface.conversion import convert

    convert(
        options.source,
        options.target,
        options.to,
        options.dtype,
        options.tokenizer_path,
        options.weights,
        options.average,
    )
    return 0
