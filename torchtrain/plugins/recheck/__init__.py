"""Plugin: name a rank that computes wrong (docs/recheck.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS

if TYPE_CHECKING:  # imports PyTorch, like the module of the hook
    from torchtrain.metrics.hooks import Hook
    from torchtrain.trainer import Trainer

CONFIG_SECTIONS.add("recheck", "torchtrain.plugins.recheck.options:RecheckConfig")


@HOOKS.register("recheck")
def recheck_hook(trainer: "Trainer") -> "Hook | None":
    """A check every ``recheck.interval`` steps."""
    from torchtrain.config.schema import option_of_plugin, section_of
    from torchtrain.plugins.recheck.options import RecheckConfig

    options = section_of(trainer.config, RecheckConfig)
    if not options.interval or trainer.parallel_dims.batch == 1:  # of replicas, which compare their states
        return None
    from torchtrain.plugins.recheck.recheck import Recheck

    return Recheck(
        options,
        trainer.train_step,
        trainer.gloo_group,
        trainer.metrics.record_event,
        skipped_steps=option_of_plugin(trainer.config, "comparison.fingerprint_steps") or (),
    )
