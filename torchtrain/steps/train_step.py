"""One optimizer step: forward and backward over this rank's rows, clipping, update."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchtrain.datasets.loader import Batch
from torchtrain.distributed.process_group import all_reduce
from torchtrain.faults.update_guard import UpdateGuard
from torchtrain.log import logger
from torchtrain.loss import IGNORE_INDEX, TokenLoss, exact_nats
from torchtrain.lr_schedule import LRSchedule
from torchtrain.optimizers.averages import Averages
from torchtrain.optimizers.clipping import clip_grad_norm
from torchtrain.optimizers.groups import update
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel


class TrainStep:
    """Call it with the step's number, from 1, and this rank's rows of the global batch."""

    def __init__(
        self,
        model: ParallelModel,
        microbatches: Microbatches,
        optimizer: torch.optim.Optimizer,
        schedule: LRSchedule,
        guard: UpdateGuard,
        *,
        max_norm: float,
        before_update: Callable[[], None],
        averages: Averages | None = None,
    ):
        """``max_norm``: of the gradient, which is scaled down to it; ``before_update``: called before the update."""
        self.model = model
        self.microbatches = microbatches
        self.optimizer = optimizer
        self.schedule = schedule
        self.guard = guard
        self.max_norm = max_norm
        self.before_update = before_update
        self.averages = averages

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        """The loss that this rank has computed and the norm of the gradient before clipping, left on the device."""
        device = self.model.device
        # The denominator is that of the whole global batch, known before the first backward: so a token weighs the same
        # whatever rank and microbatch it is in, and gradients need only be summed.
        global_tokens = (batch.labels != IGNORE_INDEX).sum().to(device, non_blocking=True)
        all_reduce(global_tokens, group=self.model.mesh.batch.get_group())
        loss = self._forward_backward(batch, global_tokens)
        while not self.model.finish_gradients():
            logger.info("step %d is repeated: its gradients are larger than exact sums were prepared for", step)
            self.optimizer.zero_grad()
            loss = self._forward_backward(batch, global_tokens)
        return loss, self._update(step, loss)

    def _forward_backward(self, batch: Batch, global_tokens: Tensor) -> TokenLoss:
        count = len(batch.tokens) // self.microbatches.local_batch_size
        self.model.begin_gradients(len(batch.tokens))
        losses = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.model.device)
        for i, microbatch in enumerate(self.microbatches(batch)):
            tokens += (microbatch.labels != IGNORE_INDEX).sum()
            losses += exact_nats(self.model.forward_backward(microbatch, global_tokens, is_last=i == count - 1))
        z_loss = losses[1] if self.model.loss.z_weight else None
        return TokenLoss(losses[0], tokens * self.model.has_loss, z_loss)

    def _update(self, step: int, loss: TokenLoss) -> Tensor:
        """Clip the gradient and apply it, unless it is bad; returns its norm before clipping."""
        copies = self._share_tied_gradient()
        grad_norm = clip_grad_norm(self.model.parts, self.max_norm, copies, exact=self.model.sums is not None)
        refused = self.guard.judge(step, loss, grad_norm)
        self.schedule.apply(self.optimizer, step)
        self.before_update()
        update(self.optimizer, refused)
        if self.averages is not None:
            self.averages.update(step, refused)
        self.optimizer.zero_grad()
        return grad_norm

    def _share_tied_gradient(self) -> Sequence[nn.Parameter]:
        """Make gradients complete; returns parameters that another pipeline stage holds, too."""
        if self.model.pipeline is None:
            return ()
        self.model.pipeline.share_tied_gradient()
        return self.model.pipeline.copies
