"""Hooks: the interface of code that observes a run, such as the report. One class has a method for each moment."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.dataloader import Batch
from torchtrain.logging import BestEffort
from torchtrain.metrics.history import Run
from torchtrain.metrics.run_description import RunDescription
from torchtrain.models.loss import TokenLoss

Watched = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class RunResults:
    """What is known of a run at its end, or after a save."""

    config: JobConfig
    run: Run
    """Its lines of metrics."""
    description: RunDescription
    """That of the last stage of the run, if there are several."""
    rows: Sequence[tuple[str, str]]
    """Labels and texts of time, tokens, losses, validation, and checkpoints."""
    next_commands: Sequence[str]
    """Commands that use what the run has saved."""


class Hook:
    """Base class of hooks. Override the methods of the moments that matter; the others do nothing.

    ``config.registry.HOOKS`` has functions that make hooks: they get the ``Trainer`` when all else is built, keep what
    they need of it, and return a hook, or None if the config does not ask for it. The plugin's section rejects invalid
    options before (``config.section.Section``).

    A hook must not modify what it observes. All ranks have the same hooks; unless a method says "on rank 0", it is
    called on all ranks, and may call collectives.
    """

    is_first: ClassVar[bool] = False
    """Whether the hook is called before those that are not first; among others, the names in the registry decide."""
    shown_metrics: ClassVar[Mapping[str, str]] = {}
    """Those of ``metrics`` that the line of the log shows, with a format: ``{"experts/load": "load {:.2f}"}``."""
    kept_files: Sequence[str] = ()
    """Files in the dump folder that ``CheckpointStorage.output_copies`` stores, beside metrics; on rank 0."""

    # A train step.

    def before_step(self, step: int, batch: Batch) -> None:
        """Called with the number of the step, counted from 1, and this rank's rows of the global batch."""

    def before_forward_backward(self, batch: Batch) -> None:
        """Called before the first microbatch, and again if the gradient reducer asks to recompute the step."""

    def before_microbatch(self, index: int) -> None:
        """Called before forward and backward of a microbatch (under pipeline parallelism: of one schedule run)."""

    def after_backward(self) -> None:
        """Called after the last microbatch's backward, when gradients may not yet be scaled or reduced."""

    def after_gradients(self) -> None:
        """Called when ``parameter.grad`` holds the gradient of the global batch's loss, before clipping."""

    def after_update(self) -> None:
        """Called after the optimizer step, before the gradients are freed."""

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:
        """Called at the end of the step."""

    def undo(self, step: int) -> None:
        """Called after a rollback to ``step``: the later steps do not count, and their numbers come again."""

    # Metrics of the steps in an interval: those since the last line of metrics.

    def begin_interval(self) -> None:
        """Called when an interval begins: at the start, after each written line, and after a rollback."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the interval, for the line of metrics of its last step, which has the loss.

        A name such as ``experts/load`` has its group of TensorBoard before the slash. Those of rank 0 are written.
        """
        return {}

    # Validation, saves, and the end.

    def validate(self, step: int, prefix: str, watched: Watched) -> Mapping[str, Any]:  # noqa: ARG002
        """Called at each validation; computes results with the current weights of the model, which must not change.

        Args:
            prefix: how the names of the results begin, such as ``validation``.
            watched: context manager for each part of the work that takes up to seconds, such as a forward. It starts
                the timeout again, and ends the validation if the run is asked to stop.

        Returns:
            Numbers by names of their own that begin with ``prefix`` and "_"; under a name that ends in ``_samples``, a
            list of tables with ``prompt`` and ``text``. Only those of rank 0 are written. Empty, where nothing is due:
            an interval of the hook's own counts validations that there are, the last one after ``training.steps``.
        """
        return {}

    def write_kept_files(self, results: RunResults) -> None:
        """Called on rank 0 in the thread of a save, before copies are stored: bring ``kept_files`` up to date."""

    def after_last_step(self) -> None:
        """Called when the steps of a run, or of a stage of it, have ended, also by a stop, but not by an error."""

    def misses_export(self, step: int) -> bool:  # noqa: ARG002
        """Whether the weights after ``step``, the last one of the run, are still to be exported.

        All ranks must answer the same. Also asked at the start of a run that has all its steps, which ends at once if
        no hook misses an export.
        """
        return False

    def export(self, step: int) -> None:
        """Called after the last step if ``misses_export``: export the weights, in another format."""

    def results(self, results: RunResults) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        """Called on rank 0 when a run is complete. Returns labels and texts for its summary in the log."""
        return ()


class Hooks:
    """The hooks of a run, called in the order of ``all``; ``validate`` and ``export`` are called one by one."""

    def __init__(self, *hooks: Hook) -> None:
        self.all = list(hooks)

    def add(self, hooks: Sequence[Hook | None]) -> None:
        """Add ``hooks``, and those first that are to be called before the others."""
        self.all = sorted(
            [*self.all, *(hook for hook in hooks if hook is not None)], key=lambda hook: not hook.is_first
        )

    @property
    def shown_metrics(self) -> Mapping[str, str]:
        return {name: text for hook in self.all for name, text in hook.shown_metrics.items()}

    @property
    def kept_files(self) -> Sequence[str]:
        return [name for hook in self.all for name in hook.kept_files]

    def before_step(self, step: int, batch: Batch) -> None:
        for hook in self.all:
            hook.before_step(step, batch)

    def before_forward_backward(self, batch: Batch) -> None:
        for hook in self.all:
            hook.before_forward_backward(batch)

    def before_microbatch(self, index: int) -> None:
        for hook in self.all:
            hook.before_microbatch(index)

    def after_backward(self) -> None:
        for hook in self.all:
            hook.after_backward()

    def after_gradients(self) -> None:
        for hook in self.all:
            hook.after_gradients()

    def after_update(self) -> None:
        for hook in self.all:
            hook.after_update()

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:
        for hook in self.all:
            hook.after_step(step, batch, loss, grad_norm)

    def undo(self, step: int) -> None:
        for hook in self.all:
            hook.undo(step)

    def begin_interval(self) -> None:
        for hook in self.all:
            hook.begin_interval()

    def add_metrics(self, line: dict[str, Any]) -> None:
        """Add the ``metrics`` of all hooks to a line of metrics.

        Raises:
            TypeError: a hook returns a name that is in the line, or that a line of another kind has, or no number; on
                all ranks, as otherwise rank 0 would fail alone when it writes the line.
        """
        for hook in self.all:
            for name, value in hook.metrics().items():
                what = f"{type(hook).__name__}.metrics returned {name}"
                if name in line or name == "event" or name.startswith("validation_"):
                    raise TypeError(f"{what}, which has another meaning: give each number a name of its own")
                if not isinstance(value, int | float):
                    raise TypeError(f"{what}, a {type(value).__name__}: give a number")
                hook.shown_metrics.get(name, "").format(value)
                line[name] = value

    def write_kept_files(self, results: RunResults) -> None:
        for hook in self.all:
            hook.write_kept_files(results)

    def after_last_step(self) -> None:
        for hook in self.all:
            hook.after_last_step()

    def missing_exports(self, step: int) -> list[Hook]:
        """Those that miss an export."""
        return [hook for hook in self.all if hook.misses_export(step)]

    def results(self, results: RunResults) -> Sequence[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for hook in self.all:
            with BestEffort(f"the results of {type(hook).__name__}"):
                rows += hook.results(results)
        return rows
