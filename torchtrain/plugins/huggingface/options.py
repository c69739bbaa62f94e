"""The section [huggingface]."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig
from torchtrain.config.section import Section, require
from torchtrain.errors import ConfigError
from torchtrain.files import require_folder

if TYPE_CHECKING:  # imports PyTorch
    import torch

    from torchtrain.resolve import ResolvedRun


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

    def next_commands(self, config: JobConfig, path: str) -> Sequence[str]:
        from torchtrain.models.llama.model import Transformer  # imports PyTorch

        model = MODELS[config.model.name]
        if model.hf is None and model.model_class is not Transformer:  # it has no format of Hugging Face's
            return []
        target = shlex.quote(config.job.dump_folder.rstrip("/") + "_hf")
        return [f"python -m torchtrain.convert {path} {target}"]

    def check_run(self, run: "ResolvedRun", device: "torch.device") -> None:  # noqa: ARG002
        if not self.export:
            return
        from torchtrain.plugins.huggingface.safetensors_folder import require_exportable  # imports PyTorch

        folder = Path(run.config.job.dump_folder) / "hf"
        if folder.is_symlink():
            raise ConfigError(
                f"{folder} is a link, and huggingface.export writes a folder of that name: remove or rename "
                "the link, or name another job.dump_folder"
            )
        if folder.exists():
            require_folder(folder, f"{folder}, in whose place huggingface.export writes the export,")
        require_exportable(run.model_config, self.export_dtype)
