"""Plugin: norms by layer, attention logits, losses by source, and slow ranks (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import STEP_HOOKS

if TYPE_CHECKING:  # imports PyTorch, like the modules of the hooks
    from torchtrain.metrics.step_hook import StepHook
    from torchtrain.trainer import Trainer


@STEP_HOOKS.register("loss_by_source")
def loss_by_source(trainer: "Trainer") -> "StepHook | None":
    """Losses by source, if ``metrics.enable_loss_by_source``; they are part of each written line."""
    if not trainer.config.metrics.enable_loss_by_source:
        return None
    from torchtrain.plugins.diagnostics.loss_by_source import LossBySource, source_labels

    group = trainer.mesh.loss.get_group()
    hook = LossBySource(source_labels(trainer.config.data), trainer.model.loss, group, trainer.device)
    trainer.metrics.step_metrics.append(hook)
    return hook


@STEP_HOOKS.register("norms")
def norms_by_layer(trainer: "Trainer") -> "StepHook | None":
    """Norms every ``metrics.norms_freq`` steps; the report of a bad step then names the first unusual layer."""
    config = trainer.config
    if not config.metrics.norms_freq:
        return None
    from torchtrain.plugins.diagnostics.norms import NormsByLayer

    hook = NormsByLayer(
        trainer.model,
        config.metrics.norms_freq,
        trainer.metrics.record_values,
        trainer.gloo_group,
        is_compiled=config.compile.enable,
    )
    trainer.guard.explanations.append(lambda _: hook.recorded.describe_first_outlier())
    return hook


@STEP_HOOKS.register("stragglers")
def slow_ranks(trainer: "Trainer") -> "StepHook | None":
    """Slow ranks, every ``metrics.straggler_freq`` steps."""
    config = trainer.config.metrics
    if not config.straggler_freq or trainer.gloo_group.size() == 1:
        return None
    from torchtrain.plugins.diagnostics.stragglers import StragglerWatch

    return StragglerWatch(
        config,
        trainer.device,
        trainer.gloo_group,
        trainer.metrics.record_event,
        waited_seconds=lambda: trainer.dataloader.wait_seconds,
    )
