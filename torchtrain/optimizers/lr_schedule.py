"""Learning rate schedule: a function of the step only, without state to save or restore."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchtrain.config.registry import LR_SCHEDULES
from torchtrain.config.schema import LRSchedulerConfig
from torchtrain.optimizers.container import OptimizerContainer


@dataclass(frozen=True)
class SchedulePhases:
    """Lengths of the phases of a schedule, in steps, and the minimum of the decay."""

    warmup: int
    total: int
    """Length of the whole schedule; steps are counted from 1."""
    decay: int
    """Length of the decay, at the end of the schedule."""
    min_lr_factor: float

    def progress(self, step: int) -> float:
        """Progress of the decay at ``step``: 0 before it, between 0 and 1 within it, 1 after the schedule.

        The decay reaches 1 one step after the last of the schedule, as torchtitan's does: otherwise, with a minimum of
        0, the last step would have no effect.
        """
        left = max(0, self.total + 1 - step)
        return 0.0 if left >= self.decay else 1 - left / self.decay

    def decayed(self, step: int, shape: Callable[[float], float]) -> float:
        """Factor of a decay from 1 to ``min_lr_factor``; ``shape`` maps the progress to what remains, from 1 to 0."""
        progress = self.progress(step)
        if progress == 0:
            return 1.0
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape(progress)


# Entries of ``LR_SCHEDULES``: the learning rate of a step after the warm-up, as a factor of the peak learning rate.


def constant(step: int, phases: SchedulePhases) -> float:  # noqa: ARG001
    return 1.0


def linear(step: int, phases: SchedulePhases) -> float:
    return phases.decayed(step, lambda progress: 1 - progress)


def cosine(step: int, phases: SchedulePhases) -> float:
    return phases.decayed(step, lambda progress: (1 + math.cos(math.pi * progress)) / 2)


def sqrt(step: int, phases: SchedulePhases) -> float:
    return phases.decayed(step, lambda progress: 1 - math.sqrt(progress))


class LRSchedule:
    """Linear warm-up, a stable phase, and a decay (WSD, https://arxiv.org/abs/2404.06395).

    ``rate(step)`` is the learning rate of optimizer step ``step``, counted from 1. After the warm-up it is ``peak``
    times the entry ``lr_scheduler.decay_type`` of ``LR_SCHEDULES``.
    """

    def __init__(self, config: LRSchedulerConfig, peak: float, training_steps: int):
        self.peak = peak
        self.factor: Callable[[int, SchedulePhases], float] = LR_SCHEDULES[config.decay_type]
        self.start, self.initial = config.start_step, config.initial_lr
        self.total = training_steps if config.total_steps is None else config.total_steps
        length = max(0, self.total - self.start)
        warmup = min(config.warmup_steps, length)
        after_warmup = length - warmup
        decay = after_warmup if config.decay_ratio is None else round(length * config.decay_ratio)
        self.phases = SchedulePhases(warmup, length, min(decay, after_warmup), config.min_lr_factor)

    def rate(self, step: int) -> float:
        step -= self.start
        if self.phases.warmup and step <= self.phases.warmup:
            return self.initial + (self.peak - self.initial) * step / self.phases.warmup
        return self.peak * self.factor(step, self.phases)

    def apply(self, optimizer: OptimizerContainer, step: int) -> None:
        """Set the rate of ``step`` in ``optimizer``, times each group's ``lr_factor``."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
