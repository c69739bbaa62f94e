"""A step that writes fingerprints of what it computes, for ``torchtrain.compare``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.fingerprints.record import Fingerprints, Place, modules_of
from torchtrain.initialization import full_name
from torchtrain.loss import TokenLoss
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.steps.train_step import TrainStep

StepFunction = Callable[[int, Batch], tuple[TokenLoss, Tensor]]


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
