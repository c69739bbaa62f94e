"""Plugin: weights in Hugging Face's files, to start from, to export, and to convert (docs/using.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import EXPORTERS, WEIGHT_FORMATS
from torchtrain.config.schema import JobConfig

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.checkpoint.other_formats import Exporter

REQUIRES = ("torchtrain.plugins.object_storage",)  # the target of a conversion may be in a bucket

WEIGHT_FORMATS.add("huggingface", "torchtrain.plugins.huggingface.weights:HUGGING_FACE_FOLDER")


@EXPORTERS.register("huggingface")
def exporter(config: JobConfig) -> "Exporter | None":
    """The export at the end of a run, if ``checkpoint.last_save_in_hf``."""
    if not config.checkpoint.last_save_in_hf:
        return None
    from torchtrain.plugins.huggingface.export import HuggingFaceExporter

    return HuggingFaceExporter()
