"""Plugin: norms by layer, attention logits, losses by source, and slow ranks (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS

if TYPE_CHECKING:  # imports PyTorch, like the modules of the hooks
    from torchtrain.metrics.hooks import Hook
    from torchtrain.plugins.diagnostics.options import DiagnosticsConfig
    from torchtrain.trainer import Trainer

CONFIG_SECTIONS.add("diagnostics", "torchtrain.plugins.diagnostics.options:DiagnosticsConfig")


def _options(trainer: "Trainer") -> "DiagnosticsConfig":
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.diagnostics.options import DiagnosticsConfig

    return section_of(trainer.config, DiagnosticsConfig)


@HOOKS.register("loss_by_source")
def loss_by_source_hook(trainer: "Trainer") -> "Hook | None":
    """Losses by source, if ``diagnostics.enable_loss_by_source``; they are part of each written line."""
    if not _options(trainer).enable_loss_by_source:
        return None
    from torchtrain.plugins.diagnostics.loss_by_source import LossBySource, source_labels

    return LossBySource(
        source_labels(trainer.config.data),
        trainer.model.loss,
        trainer.mesh.loss.get_group(),
        trainer.device,
        trainer.mesh.replicas,
    )


@HOOKS.register("norms")
def norms_by_layer(trainer: "Trainer") -> "Hook | None":
    """Norms every ``diagnostics.norms_freq`` steps; the report of a bad step then names the first unusual layer."""
    norms_freq = _options(trainer).norms_freq
    if not norms_freq:
        return None
    from torchtrain.plugins.diagnostics.norms import NormsByLayer

    hook = NormsByLayer(
        trainer.model,
        norms_freq,
        trainer.metrics.record_values,
        trainer.gloo_group,
        is_compiled=trainer.config.compile.enable,
    )
    trainer.guard.explanations.append(lambda _: hook.recorded.describe_first_outlier())
    return hook


@HOOKS.register("stragglers")
def slow_ranks(trainer: "Trainer") -> "Hook | None":
    """Slow ranks, every ``diagnostics.straggler_freq`` steps."""
    options = _options(trainer)
    if not options.straggler_freq or trainer.gloo_group.size() == 1:
        return None
    from torchtrain.plugins.diagnostics.stragglers import StragglerWatch

    return StragglerWatch(
        options,
        trainer.device,
        trainer.gloo_group,
        trainer.metrics.record_event,
        waited_seconds=lambda: trainer.dataloader.wait_seconds,
    )
