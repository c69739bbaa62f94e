"""Plugin: weights in Hugging Face's files, to start from, to export, and to convert (docs/using.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS, WEIGHT_FORMATS

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.metrics.hooks import Hook
    from torchtrain.trainer import Trainer

REQUIRES = ("torchtrain.plugins.object_storage",)  # the target of a conversion may be in a bucket

CONFIG_SECTIONS.add("huggingface", "torchtrain.plugins.huggingface.options:HuggingFaceConfig")
WEIGHT_FORMATS.add("huggingface", "torchtrain.plugins.huggingface.safetensors_folder:HUGGING_FACE_FOLDER")


@HOOKS.register("huggingface")
def export_hook(trainer: "Trainer") -> "Hook | None":
    """The export at the end of a run, if ``huggingface.export``."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.huggingface.options import HuggingFaceConfig

    if not section_of(trainer.config, HuggingFaceConfig).export:
        return None
    from torchtrain.plugins.huggingface.export import HuggingFaceExport

    return HuggingFaceExport(trainer)
