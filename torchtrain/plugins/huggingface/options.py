"""The section [huggingface]."""

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.schema import JobConfig, Section, require


@dataclass(frozen=True)
class HuggingFaceConfig(Section, name="huggingface"):
    """Export of the weights in Hugging Face's format."""

    changes_run = False

    export: bool = False
    """At the end of the run, also export the weights to hf/ in the dump folder, in Hugging Face's format."""
    export_weights: Literal["trained", "ema"] = "trained"
    """Weights to export. ema: the averaged ones (ema.enable)."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """dtype of the exported weights."""

    def check(self, config: JobConfig) -> None:
        require(
            config.ema.enable or self.export_weights == "trained",
            f"huggingface.export_weights = {self.export_weights!r} needs averaged weights: set ema.enable = true",
        )
