"""Numbers of tokens in options, such as "20B" or "20x", and their conversion to steps."""

import re
from collections.abc import Callable
from dataclasses import replace

from torchtrain.config.schema import JobConfig
from torchtrain.config.section import TOKENS
from torchtrain.errors import ConfigError
from torchtrain.optimizers.options import LRSchedulerConfig

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_tokens(text: str, parameters: Callable[[], int]) -> int:
    """The number of tokens that ``text`` stands for; ``parameters`` returns the number of parameters of the model."""
    match = re.fullmatch(TOKENS, text)
    assert match is not None, text  # section.py checks options of this type
    number, unit = match.groups()
    return round(float(number) * (parameters() if unit == "x" else UNITS[unit]))


def format_tokens(tokens: float) -> str:
    """``tokens`` with three significant digits and a unit, such as 1.05M or 20B."""
    unit = max((unit for unit, size in UNITS.items() if tokens >= size), key=UNITS.__getitem__, default="")
    if unit and round(tokens / UNITS[unit], 1) >= 1000 and unit != "T":
        unit = {"K": "M", "M": "B", "B": "T"}[unit]
    return f"{tokens / UNITS[unit]:.3g}{unit}" if tokens < 10**15 else f"{tokens / UNITS['T']:.0f}T"


def tokens_to_steps(tokens: int, tokens_per_step: int) -> int:
    """The number of steps that process at least ``tokens``, and at least one."""
    return max(1, -(-tokens // tokens_per_step))


def with_decay_ratio(schedule: LRSchedulerConfig, decay: int, total: int) -> LRSchedulerConfig:
    """``schedule`` with ``decay_ratio`` in place of ``decay_tokens``, which are ``decay`` of its ``total`` steps.

    Raises:
        ConfigError: the decay is longer than the schedule.
    """
    if decay > total:
        raise ConfigError(
            f"lr_scheduler.decay_tokens = {schedule.decay_tokens!r} are {decay} steps, more than the {total} steps of "
            "the schedule; lower it"
        )
    return replace(schedule, decay_tokens="", decay_ratio=decay / total)


def resolve_tokens(config: JobConfig, parameters: Callable[[], int]) -> JobConfig:
    """Replace options in tokens by the options in steps that they stand for. The global batch size is resolved.

    ``training.tokens`` is rounded up to whole steps, the others to the nearest number of steps.

    Raises:
        ConfigError: the decay is longer than the schedule.
    """
    per_step = config.training.global_batch_size * config.training.seq_len

    def steps(tokens: str) -> int:
        return round(parse_tokens(tokens, parameters) / per_step)

    training, schedule, checkpoint, validation = (
        config.training,
        config.lr_scheduler,
        config.checkpoint,
        config.validation,
    )
    if training.tokens:
        total = tokens_to_steps(parse_tokens(training.tokens, parameters), per_step)
        training = replace(training, tokens="", steps=total)
    if schedule.total_tokens:
        total = tokens_to_steps(parse_tokens(schedule.total_tokens, parameters), per_step)
        schedule = replace(schedule, total_tokens="", total_steps=total)
    if schedule.warmup_tokens:
        schedule = replace(schedule, warmup_tokens="", warmup_steps=steps(schedule.warmup_tokens))
    if schedule.decay_tokens:
        total = schedule.total_steps or training.steps
        schedule = with_decay_ratio(schedule, steps(schedule.decay_tokens), total)
    if checkpoint.interval_tokens:
        checkpoint = replace(checkpoint, interval_tokens="", interval=max(1, steps(checkpoint.interval_tokens)))
    if validation.interval_tokens:
        validation = replace(validation, interval_tokens="", interval=max(1, steps(validation.interval_tokens)))
    return replace(config, training=training, lr_scheduler=schedule, checkpoint=checkpoint, validation=validation)
