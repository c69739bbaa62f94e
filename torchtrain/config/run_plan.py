"""How a run is divided into stages, each of which is trained with a plain config.

A run is one stage, unless a plugin divides it: it registers a subclass of ``RunPlan`` in ``config.registry.RUN_PLANS``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torchtrain.config.parse import to_toml
from torchtrain.config.registry import RUN_PLANS
from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens

ResolveOne = Callable[[JobConfig], tuple[JobConfig, Any]]
"""Resolves the config of one stage, apart from the others; also returns the config of its model."""


class RunPlan:
    """A run of one stage, which is the whole run.

    Args:
        config: the config of the run as it is given, for ``resolve`` and ``train``; or the resolved config of a stage,
            from which all other methods know the whole run.
    """

    has_stages: ClassVar[bool] = False
    """Whether a run is divided, so that messages name its stages."""
    way_to_continue: ClassVar[str] = "raise training.steps"
    """How a user continues a run that is complete."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config

    @classmethod
    def divides(cls, config: JobConfig) -> bool:  # noqa: ARG003
        """Whether ``config`` asks for this plan."""
        return False

    def resolve(self, resolve_one: ResolveOne) -> Sequence[JobConfig]:
        """The resolved config of each stage. ``training.steps`` is its last step, from the beginning of the run.

        Raises:
            ConfigError: the options of any stage are invalid; one message for all stages.
        """
        return [resolve_one(self.config)[0]]

    def train(self, build: Callable[..., Any]) -> int:
        """Train all stages that are not finished; returns the exit code of the process.

        ``build`` makes the trainer of a stage. See ``Trainer`` for its arguments.
        """
        return int(build(self.config).train())

    @cached_property
    def stages(self) -> Sequence[JobConfig]:
        """The resolved config of each stage."""
        return [self.config]

    @property
    def number(self) -> int:
        """The number of the stage with ``config``, from 0."""
        return [stage.job.stage for stage in self.stages].index(self.config.job.stage)

    @property
    def is_last(self) -> bool:
        """Whether the run ends with the stage with ``config``."""
        return self.number == len(self.stages) - 1

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return self.stages[-1].training.steps

    @property
    def longest_seq_len(self) -> int:
        """The largest ``training.seq_len`` of all stages."""
        return max(stage.training.seq_len for stage in self.stages)

    def first_step(self, number: int) -> int:
        """The first step of the stage ``number``."""
        return self.stages[number - 1].training.steps + 1 if number else 1

    def tokens_of(self, number: int) -> int:
        """The tokens that are trained on in the stage ``number``."""
        training = self.stages[number].training
        return (training.steps + 1 - self.first_step(number)) * training.global_batch_size * training.seq_len

    def tokens_after(self, step: int) -> int:
        """The tokens that the run has been trained on after ``step``, which may be beyond its end."""
        tokens, before = 0, 0
        for stage in self.stages:
            training = stage.training
            last = step if stage is self.stages[-1] else training.steps
            tokens += max(0, min(step, last) - before) * training.global_batch_size * training.seq_len
            before = training.steps
        return tokens

    def banner(self) -> list[tuple[str, str]]:
        """Label and text of the line about the stage with ``config``, if there are several."""
        if not self.has_stages:
            return []
        steps = f"steps {self.first_step(self.number):,} to {self.config.training.steps:,}"
        place = f"{self.config.job.stage} ({self.number + 1} of {len(self.stages)})"
        return [("stage", f"{place}: {steps}, {format_tokens(self.tokens_of(self.number))} tokens")]

    def table(self) -> list[tuple[str, ...]]:
        """A row for each stage, below the names of the columns; empty if there is one stage."""
        return []

    def config_of_saved_stage(self, saved_toml: str, step: int, allow_changes: Iterable[str]) -> str:  # noqa: ARG002
        """What the config in the checkpoint of ``step`` is compared with: the config of its stage in this run, as TOML.

        Args:
            saved_toml: the resolved config in the checkpoint.
            step: its step.
            allow_changes: options that may change the run.

        Raises:
            CheckpointError: the saved stage, or one before it, is another one in this run.
            OtherStageError: the stage with ``config`` cannot continue from ``step``.
        """
        return to_toml(self.config)


class OtherStageError(Exception):
    """The checkpoint of ``step`` belongs to another stage of the run than the config."""

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step} is of another stage of the run")
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
