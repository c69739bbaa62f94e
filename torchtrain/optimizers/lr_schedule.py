"""Learning rate schedule: a function of the step only, without state to save or restore."""

import math
from abc import ABC
from dataclasses import dataclass
from typing import Any

from torchtrain.config.component import Component
from torchtrain.config.registry import LR_SCHEDULES
from torchtrain.errors import ConfigError
from torchtrain.optimizers.container import OptimizerContainer
from torchtrain.optimizers.options import LRSchedulerConfig


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
        Without a decay it is always 0.

        The decay reaches 1 one step after the last of the schedule: otherwise, with a minimum of
        0, the last step would have no effect.
        """
        left = max(0, self.total + 1 - step)
        return 0.0 if left >= self.decay else 1 - left / self.decay


class Decay(Component, ABC):
    """The learning rate after the warm-up: an entry of ``LR_SCHEDULES``, which ``lr_scheduler.decay_type`` selects.

    Args:
        options: an instance of ``Options``, from [lr_scheduler.options].
    """

    def __init__(self, phases: SchedulePhases, options: Any) -> None:
        self.phases, self.options = phases, options

    def factor(self, step: int) -> float:
        """The learning rate of ``step``, as a factor of the peak learning rate."""
        progress = self.phases.progress(step)
        if progress == 0:
            return 1.0
        minimum = self.phases.min_lr_factor
        return minimum + (1 - minimum) * self.remaining(progress)

    def remaining(self, progress: float) -> float:
        """What remains of the peak above the minimum, from 1 to 0, at a ``progress`` of the decay above 0, up to 1."""
        raise NotImplementedError


class Constant(Decay):
    def factor(self, step: int) -> float:  # noqa: ARG002
        return 1.0


class Linear(Decay):
    def remaining(self, progress: float) -> float:
        return 1 - progress


class Cosine(Decay):
    def remaining(self, progress: float) -> float:
        return (1 + math.cos(math.pi * progress)) / 2


class Sqrt(Decay):
    def remaining(self, progress: float) -> float:
        return 1 - math.sqrt(progress)


class LRSchedule:
    """Linear warm-up, a stable phase, and a decay (WSD, https://arxiv.org/abs/2404.06395).

    ``rate(step)`` is the learning rate of optimizer step ``step``, counted from 1. After the warm-up it is ``peak``
    times the factor of the entry ``lr_scheduler.decay_type`` of ``LR_SCHEDULES``.

    Raises:
        ConfigError: the entry does not have the options in [lr_scheduler.options].
    """

    def __init__(self, config: LRSchedulerConfig, peak: float, training_steps: int):
        self.peak = peak
        self.start, self.initial = config.start_step, config.initial_lr
        self.total = training_steps if config.total_steps is None else config.total_steps
        length = max(0, self.total - self.start)
        warmup = min(config.warmup_steps, length)
        after_warmup = length - warmup
        decay = after_warmup if config.decay_ratio is None else round(length * config.decay_ratio)
        self.phases = SchedulePhases(warmup, length, min(decay, after_warmup), config.min_lr_factor)
        kind: type[Decay] = LR_SCHEDULES[config.decay_type]
        if not (isinstance(kind, type) and issubclass(kind, Decay)):
            raise ConfigError(
                f"lr_scheduler.decay_type = {config.decay_type!r} is registered as {kind!r}: it must be a subclass of "
                "torchtrain.optimizers.lr_schedule.Decay (docs/adding-an-optimizer.md)"
            )
        self.decay = kind(self.phases, kind.read_options(config.options, "lr_scheduler.options"))

    def rate(self, step: int) -> float:
        step -= self.start
        if self.phases.warmup and step <= self.phases.warmup:
            return self.initial + (self.peak - self.initial) * step / self.phases.warmup
        return self.peak * self.decay.factor(step)

    def apply(self, optimizer: OptimizerContainer, step: int) -> None:
        """Set the rate of ``step`` in ``optimizer``, times each group's ``lr_factor``."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
