"""Plugin: metrics in Weights & Biases, and the export as an artifact there (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import EXPORTERS, METRICS_WRITERS
from torchtrain.config.schema import JobConfig

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.checkpoint.other_formats import Exporter

REQUIRES = ("torchtrain.plugins.huggingface",)  # the export that is an artifact

METRICS_WRITERS.add("wandb", "torchtrain.plugins.wandb.writer:WeightsAndBiases")


@EXPORTERS.register("wandb")  # after that of Hugging Face, whose name comes first
def exporter(config: JobConfig) -> "Exporter | None":
    """The artifact of the export, if ``log_export`` in [metrics.options.wandb]."""
    if "wandb" not in config.metrics.writers:
        return None
    from torchtrain.plugins.wandb.writer import own_options

    if not own_options(config.metrics.options.get("wandb", {})).log_export:
        return None
    from torchtrain.plugins.wandb.artifact import ExportArtifact

    return ExportArtifact()
