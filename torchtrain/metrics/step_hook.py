"""The interface of what observes a run from outside."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.dataloader import Batch
from torchtrain.logging import BestEffort
from torchtrain.metrics.history import Run
from torchtrain.metrics.run_description import RunDescription
from torchtrain.models.loss import TokenLoss


@dataclass(frozen=True)
class RunResults:
    """What is known of a run at its end, or after a save."""

    config: JobConfig
    run: Run
    """Its lines of metrics."""
    description: RunDescription
    """That of the last part of the run, if there are several."""
    rows: Sequence[tuple[str, str]]
    """Labels and texts of time, tokens, losses, validation, and checkpoints."""
    next_commands: Sequence[str]
    """Commands that use what the run has saved."""


class StepHook:
    """Base class of hooks that observe train steps. Override methods and append an instance to ``TrainStep.hooks.all``.

    A hook must not modify what it observes. It may call collectives if all ranks have the hook.
    """

    kept_files: Sequence[str] = ()
    """Files in the dump folder of which copies are stored beside checkpoints in a bucket, on rank 0."""

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

    def after_last_step(self) -> None:
        """Called when the steps of a run, or of a part of it, have ended, also by a stop, but not by an error."""

    def results(self, results: RunResults) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        """Called on rank 0 when a run is complete. Returns labels and texts for its summary in the log."""
        return ()

    def write_kept_files(self, results: RunResults) -> None:
        """Called on rank 0 after each save in a bucket, in the thread of the save: bring ``kept_files`` up to date."""


class StepHooks(StepHook):
    """Several hooks as one: each method calls that of ``all`` in their order."""

    def __init__(self, *hooks: StepHook) -> None:
        self.all = list(hooks)

    @property
    def kept_files(self) -> Sequence[str]:  # type: ignore[override]
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

    def after_last_step(self) -> None:
        for hook in self.all:
            hook.after_last_step()

    def results(self, results: RunResults) -> Sequence[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for hook in self.all:
            with BestEffort(f"the results of {type(hook).__name__}"):
                rows += hook.results(results)
        return rows

    def write_kept_files(self, results: RunResults) -> None:
        for hook in self.all:
            hook.write_kept_files(results)
