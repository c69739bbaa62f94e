"""Learning rate schedule: a function of the step only, without state to save or restore."""

import math

from torchtrain.config.schema import LRSchedulerConfig
from torchtrain.optimizers.container import OptimizerContainer


class LRSchedule:
    """Linear warm-up, a stable phase, and a decay to a floor (WSD, https://arxiv.org/abs/2404.06395).

    ``rate(step)`` is the rate of optimizer step ``step``, counted from 1. The decay reaches ``min_lr_factor * peak``
    one step after the last of the schedule, as torchtitan's does: else, with a floor of 0, the last would do nothing.
    """

    def __init__(self, config: LRSchedulerConfig, peak: float, training_steps: int):
        self.peak = peak
        self.shape = config.decay_type
        self.floor = config.min_lr_factor
        self.total = training_steps if config.total_steps is None else config.total_steps
        self.warmup = min(config.warmup_steps, self.total)
        after_warmup = self.total - self.warmup
        decay = after_warmup if config.decay_ratio is None else round(self.total * config.decay_ratio)
        self.decay = min(decay, after_warmup)

    def rate(self, step: int) -> float:
        if step <= self.warmup:
            return self.peak * step / self.warmup
        left = max(0, self.total + 1 - step)
        if self.shape == "constant" or left >= self.decay:
            return self.peak
        done = 1 - left / self.decay
        remaining = {
            "linear": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "sqrt": 1 - math.sqrt(done),
        }[self.shape]
        return self.peak * (self.floor + (1 - self.floor) * remaining)

    def apply(self, optimizer: OptimizerContainer, step: int) -> None:
        """Set the rate of ``step`` in ``optimizer``, times each group's ``lr_factor``."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
