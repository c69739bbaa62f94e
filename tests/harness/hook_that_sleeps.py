"""For ``job.import``: each step takes at least a second, so that a run has a known length on any machine."""

import time

from torchtrain.config.registry import HOOKS
from torchtrain.datasets.dataloader import Batch
from torchtrain.metrics.hooks import Hook
from torchtrain.trainer import Trainer


class HookThatSleeps(Hook):
    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        time.sleep(1)


@HOOKS.register("hook_that_sleeps")
def hook_that_sleeps(trainer: Trainer) -> Hook:  # noqa: ARG001
    return HookThatSleeps()
