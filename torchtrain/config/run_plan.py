"""How a run is divided into parts, each of which is trained with a plain config.

A run is one part, unless a plugin divides it: it registers a subclass of ``RunPlan`` in ``config.registry.RUN_PLANS``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torchtrain.config.parse import to_toml
from torchtrain.config.registry import RUN_PLANS
from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens

ResolveOne = Callable[[JobConfig], tuple[JobConfig, Any]]
"""Resolves the config of one part, apart from the others; also returns the config of its model."""


class RunPlan:
    """A run of one part, which is the whole run.

    Args:
        config: the config of the run as it is given, for ``resolve`` and ``train``; or the resolved config of a part,
            from which all other methods know the whole run.
    """

    part_name: ClassVar[str] = ""
    """What a part is called in messages; empty if there is only one."""
    way_to_continue: ClassVar[str] = "raise training.steps"
    """How a user continues a run that is complete."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config

    @classmethod
    def divides(cls, config: JobConfig) -> bool:  # noqa: ARG003
        """Whether ``config`` asks for this plan."""
        return False

    def resolve(self, resolve_one: ResolveOne) -> Sequence[JobConfig]:
        """The resolved config of each part. ``training.steps`` is its last step, counted from the beginning of the run.

        Raises:
            ConfigError: the options of any part are invalid; one message for all parts.
        """
        return [resolve_one(self.config)[0]]

    def train(self, build: Callable[..., Any]) -> int:
        """Train all parts that are not finished; returns the exit code of the process.

        ``build`` makes the trainer of a part. See ``Trainer`` for its arguments.
        """
        return int(build(self.config).train())

    @cached_property
    def parts(self) -> Sequence[JobConfig]:
        """The resolved config of each part."""
        return [self.config]

    @property
    def number(self) -> int:
        """The number of the part with ``config``, from 0."""
        return [part.job.stage for part in self.parts].index(self.config.job.stage)

    @property
    def is_last(self) -> bool:
        """Whether the run ends with the part with ``config``."""
        return self.number == len(self.parts) - 1

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return self.parts[-1].training.steps

    @property
    def longest_seq_len(self) -> int:
        """The largest ``training.seq_len`` of all parts."""
        return max(part.training.seq_len for part in self.parts)

    def first_step(self, number: int) -> int:
        """The first step of the part ``number``."""
        return self.parts[number - 1].training.steps + 1 if number else 1

    def tokens_of(self, number: int) -> int:
        """The tokens that are trained on in the part ``number``."""
        training = self.parts[number].training
        return (training.steps + 1 - self.first_step(number)) * training.global_batch_size * training.seq_len

    def tokens_after(self, step: int) -> int:
        """The tokens that the run has been trained on after ``step``, which may be beyond its end."""
        tokens, before = 0, 0
        for part in self.parts:
            training = part.training
            last = step if part is self.parts[-1] else training.steps
            tokens += max(0, min(step, last) - before) * training.global_batch_size * training.seq_len
            before = training.steps
        return tokens

    def banner(self) -> list[tuple[str, str]]:
        """Label and text of the line about the part with ``config``, if there are several."""
        if not self.part_name:
            return []
        steps = f"steps {self.first_step(self.number):,} to {self.config.training.steps:,}"
        place = f"{self.config.job.stage} ({self.number + 1} of {len(self.parts)})"
        return [(self.part_name, f"{place}: {steps}, {format_tokens(self.tokens_of(self.number))} tokens")]

    def table(self) -> list[tuple[str, ...]]:
        """A row for each part, below the names of the columns; empty if there is one part."""
        return []

    def config_of_saved_part(self, saved_toml: str, step: int, allow_changes: Iterable[str]) -> str:  # noqa: ARG002
        """The config with which that of the checkpoint of ``step`` is compared: of the same part of this run, as TOML.

        Args:
            saved_toml: the resolved config in the checkpoint.
            step: its step.
            allow_changes: options that may change the run.

        Raises:
            CheckpointError: the saved part, or one before it, is another one in this run.
            OtherPartError: the part with ``config`` cannot continue from ``step``.
        """
        return to_toml(self.config)


class OtherPartError(Exception):
    """The checkpoint of ``step`` belongs to another part of the run than the config."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} is of another part of the run")
        self.step = step
        self.damaged: Mapping[int, str] = {}
        """Errors of the damaged checkpoints that were tried before, by step."""


def plan_of(config: JobConfig) -> RunPlan:
    """The plan of the run with ``config``. Raises ConfigError if no plugin is installed that divides it."""
    for option, is_set in (
        ("stages", config.stages),
        ("training.global_batch_size_schedule", config.training.global_batch_size_schedule),
    ):
        if is_set:
            RUN_PLANS.check("stages", option)
    plans = (RUN_PLANS[name] for name in RUN_PLANS)
    return next((plan for plan in plans if plan.divides(config)), RunPlan)(config)
