"""Plugin: find out why two runs differ (docs/compare.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import STEP_HOOKS

if TYPE_CHECKING:  # imports PyTorch, like the module of the hook
    from torchtrain.metrics.step_hook import StepHook
    from torchtrain.trainer import Trainer

REQUIRES = ("torchtrain.plugins.evaluation", "torchtrain.plugins.huggingface")  # --against: transformers' model


@STEP_HOOKS.register("fingerprints")
def fingerprint_hook(trainer: "Trainer") -> "StepHook | None":
    """Fingerprints of the steps in ``debug.fingerprint_steps``."""
    if not trainer.config.debug.fingerprint_steps:
        return None
    from torchtrain.plugins.comparison.fingerprint_hook import FingerprintHook

    return FingerprintHook(trainer.config, trainer.model)
