"""One optimizer step: forward and backward over this rank's rows, clipping, update."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from torchtrain.config.schema import Training
from torchtrain.datasets.loader import Batch
from torchtrain.distributed.mesh import Mesh
from torchtrain.faults.update_guard import UpdateGuard
from torchtrain.loss import IGNORE_INDEX, OutputLoss, TokenLoss
from torchtrain.lr_schedule import LRSchedule
from torchtrain.models.llama import Transformer
from torchtrain.optimizer import clip_grad_norm, update
from torchtrain.parallelisms.microbatches import Microbatch, Microbatches
from torchtrain.parallelisms.pipeline_llama import Pipeline


class TrainStep:
    """Call it with the step's number, from 1, and this rank's rows of the global batch."""

    def __init__(
        self,
        parts: Sequence[Transformer],
        pipeline: Pipeline | None,
        optimizer: torch.optim.Optimizer,
        schedule: LRSchedule,
        mesh: Mesh,
        loss: OutputLoss,
        training: Training,
        device: torch.device,
        guard: UpdateGuard,
        before_update: Callable[[], None],
        document_start: int | None = None,
    ):
        """``before_update`` is called when parameters are about to change; ``document_start`` as in Microbatches."""
        self.guard = guard
        self.before_update = before_update
        self.parts = parts
        self.pipeline = pipeline
        self.optimizer = optimizer
        self.schedule = schedule
        self.mesh = mesh
        self.loss = loss
        self.training = training
        self.device = device
        self.microbatches = Microbatches(mesh, device, training.local_batch_size, document_start)

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        """The loss that this rank has computed and the norm of the gradient before clipping, left on the device."""
        # The denominator is that of the whole global batch, known before the first backward: so a token weighs the same
        # whatever rank and microbatch it is in, and gradients need only be summed.
        global_tokens = (batch.labels != IGNORE_INDEX).sum().to(self.device, non_blocking=True)
        dist.all_reduce(global_tokens, group=self.mesh.batch.get_group())
        count = len(batch.tokens) // self.training.local_batch_size
        total = torch.zeros((), device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        with loss_parallel():  # for logits that tensor parallelism splits along the vocabulary
            for i, microbatch in enumerate(self.microbatches(batch)):
                tokens += (microbatch.labels != IGNORE_INDEX).sum()
                total += self._forward_backward(microbatch, global_tokens, is_last=i == count - 1)
        loss = TokenLoss(total, tokens * (self.pipeline is None or self.pipeline.has_loss))
        return loss, self._update(step, loss)

    def _forward_backward(self, microbatch: Microbatch, global_tokens: Tensor, is_last: bool) -> Tensor:
        """Add to the gradient; returns the sum of the losses that this rank has computed."""
        tokens, labels, positions, mask = microbatch
        if self.pipeline is not None:
            return self.pipeline.forward_backward(tokens, labels, positions, mask, global_tokens)
        (model,) = self.parts
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(is_last)
        loss: Tensor = model(tokens, positions, mask, head=partial(self.loss, labels=labels))
        torch.autograd.backward(loss / global_tokens)
        return loss.detach()

    def _update(self, step: int, loss: TokenLoss) -> Tensor:
        """Clip the gradient and apply it, unless it is bad; returns its norm before clipping."""
        copies: Sequence[nn.Parameter] = ()
        if self.pipeline is not None:
            self.pipeline.share_tied_gradient()
            copies = self.pipeline.copies
        grad_norm = clip_grad_norm(self.parts, self.training.max_norm, copies)
        refused = self.guard.judge(step, loss, grad_norm)
        self.schedule.apply(self.optimizer, step)
        self.before_update()
        update(self.optimizer, refused)
        self.optimizer.zero_grad()
        return grad_norm
