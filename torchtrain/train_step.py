"""One optimizer step: forward and backward over this rank's rows, clipping, update."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.distributed.process_group import all_reduce
from torchtrain.faults.update_guard import UpdateGuard
from torchtrain.fingerprints.record import Fingerprints, Place, modules_of
from torchtrain.initialization import full_name
from torchtrain.log import logger
from torchtrain.loss import IGNORE_INDEX, TokenLoss, exact_nats
from torchtrain.lr_schedule import LRSchedule
from torchtrain.optimizers.averages import Averages
from torchtrain.optimizers.clipping import clip_grad_norm
from torchtrain.optimizers.groups import update
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel

StepFunction = Callable[[int, Batch], tuple[TokenLoss, Tensor]]


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
            logger.info("step %d is made again: exact sums were not prepared for gradients of this size", step)
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


class FingerprintedStep(TrainStep):
    """The same step, which also writes fingerprints."""

    def __init__(self, fingerprints: Fingerprints, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.fingerprints = fingerprints
        self.parameters = {full_name(n): p for part in self.model.parts for n, p in part.named_parameters()}

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        self.fingerprints.add_parameters("", self.parameters)
        with self.fingerprints.watching({part: modules_of(part) for part in self.model.parts}):
            loss, grad_norm = super().__call__(step, batch)
        if self.model.has_loss:
            self.fingerprints.add_loss(loss.total)
        self.fingerprints.write(step, batch.tokens, batch.labels)
        return loss, grad_norm

    def _forward_backward(self, batch: Batch, global_tokens: Tensor) -> TokenLoss:
        self.fingerprints.begin(batch.tokens)
        return super()._forward_backward(batch, global_tokens)

    def _update(self, step: int, loss: TokenLoss) -> Tensor:
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        grad_norm = super()._update(step, loss)
        updates = {name: parameter.detach() - before[name] for name, parameter in self.parameters.items()}
        self.fingerprints.add_parameters("update", updates)
        return grad_norm

    def _share_tied_gradient(self) -> Sequence[nn.Parameter]:
        copies = super()._share_tied_gradient()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.fingerprints.add_parameters("gradient", gradients)
        return copies


def step_maker(
    config: JobConfig, folder: Path, model: ParallelModel, global_batch_size: int
) -> Callable[..., StepFunction]:
    """Makes a ``TrainStep``; in the steps that ``[debug]`` names it writes fingerprints into ``folder``."""
    steps, training = config.debug.fingerprint_steps, config.training
    if not steps:
        return TrainStep
    mesh, rank, rows = model.mesh, dist.get_rank(), global_batch_size // model.mesh.degrees.batch
    first = mesh.degrees.batch_rank(rank) * rows
    place = Place(
        rows=range(first, first + rows),
        global_rows=global_batch_size,
        sequence=local_sequence(torch.arange(training.seq_len), mesh.context, dim=0),
        seq_len=training.seq_len,
        tensor=(mesh.tensor.get_local_rank(), mesh.tensor.size()),
        rank=rank,
        ranks=dist.get_world_size(),
    )
    dtype = training.mixed_precision_param
    fingerprints = Fingerprints(folder / "fingerprints", model.parts[0].config, place, dtype)

    def make(*args: Any, **options: Any) -> StepFunction:
        plain = TrainStep(*args, **options)
        fingerprinted = FingerprintedStep(fingerprints, *args, **options)
        return lambda step, batch: (fingerprinted if step in steps else plain)(step, batch)

    return make
