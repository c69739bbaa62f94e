"""Plugin: name a rank that computes wrong (docs/recheck.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, STEP_HOOKS

if TYPE_CHECKING:  # imports PyTorch, like the module of the hook
    from torchtrain.trainer import Trainer

CONFIG_SECTIONS.add("recheck", "torchtrain.plugins.recheck.options:RecheckConfig")


@STEP_HOOKS.register("recheck")
def recheck(trainer: "Trainer") -> None:
    """A check every ``recheck.interval`` steps."""
    from torchtrain.config.schema import option_of_plugin, section_of
    from torchtrain.plugins.recheck.options import RecheckConfig

    options = section_of(trainer.config, RecheckConfig)
    if not options.interval or trainer.parallel_dims.batch == 1:  # of replicas, which compare their states
        return
    from torchtrain.plugins.recheck.recheck import Recheck

    hook = Recheck(
        options,
        trainer.train_step,
        trainer.gloo_group,
        trainer.metrics.record_event,
        skipped_steps=option_of_plugin(trainer.config, "comparison.fingerprint_steps") or (),
    )
    # Before all other hooks, so that none of them has begun to observe the step when a microbatch is repeated.
    trainer.train_step.hooks.all.insert(0, hook)
