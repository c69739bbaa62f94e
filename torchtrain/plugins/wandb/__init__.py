"""Plugin: metrics in Weights & Biases, and the export as an artifact there (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import HOOKS, METRICS_WRITERS

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.metrics.hooks import Hook
    from torchtrain.trainer import Trainer

REQUIRES = ("torchtrain.plugins.huggingface",)  # the export that is an artifact

METRICS_WRITERS.add("wandb", "torchtrain.plugins.wandb.writer:WeightsAndBiases")


@HOOKS.register("wandb")  # after that of Hugging Face, whose name comes first
def artifact_hook(trainer: "Trainer") -> "Hook | None":
    """The artifact of the export, if ``log_export`` in [metrics.options.wandb]."""
    if "wandb" not in trainer.config.metrics.writers:
        return None
    from torchtrain.plugins.wandb.writer import options_of

    if not options_of(trainer.config).log_export:
        return None
    from torchtrain.plugins.wandb.artifact import ExportArtifact

    return ExportArtifact(trainer)
