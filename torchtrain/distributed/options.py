"""Options of communication: [comm]."""

from dataclasses import dataclass
from typing import Annotated

from torchtrain.config.section import Section, at_least

# PyTorch stores timeouts as 64-bit nanoseconds, which overflow after 292 years.
Timeout = Annotated[int, at_least(1), ("be at most 1000000000", lambda value: value <= 10**9)]


@dataclass(frozen=True)
class CommConfig(Section, name="comm"):
    """Timeouts of communication."""

    init_timeout_seconds: Timeout = 300
    """Timeout for communication operations, during initialization and the first train step, in seconds."""
    train_timeout_seconds: Timeout = 100
    """Time limit for each step after the first, in seconds; at least three times the duration of the first step.
    After it, each rank writes its stack traces to hangs/ in the dump folder; a few seconds later pending collectives
    time out."""
