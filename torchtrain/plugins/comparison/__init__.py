"""Plugin: find out why two runs differ (docs/compare.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS

if TYPE_CHECKING:  # imports PyTorch, like the module of the hook
    from torchtrain.metrics.hooks import Hook
    from torchtrain.trainer import Trainer

REQUIRES = (
    *("torchtrain.plugins.evaluation", "torchtrain.plugins.huggingface"),  # --against: transformers' model
    "torchtrain.plugins.object_storage",  # metrics of a run in a bucket
)

CONFIG_SECTIONS.add("comparison", "torchtrain.plugins.comparison.options:ComparisonConfig")


@HOOKS.register("fingerprints")
def fingerprint_hook(trainer: "Trainer") -> "Hook | None":
    """Fingerprints of the steps in ``comparison.fingerprint_steps``."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.comparison.options import ComparisonConfig

    if not section_of(trainer.config, ComparisonConfig).fingerprint_steps:
        return None
    from torchtrain.plugins.comparison.fingerprint_hook import FingerprintHook

    return FingerprintHook(trainer.config, trainer.model)
