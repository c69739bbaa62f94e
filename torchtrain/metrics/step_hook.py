"""The interface of what observes train steps from outside."""

from torch import Tensor

from torchtrain.datasets.dataloader import Batch
from torchtrain.models.loss import TokenLoss


class StepHook:
    """Base class of hooks that observe train steps. Override methods and append an instance to ``TrainStep.hooks``.

    A hook must not modify what it observes. It may call collectives if all ranks have the hook.
    """

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
