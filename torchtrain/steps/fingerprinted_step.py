"""A step that writes fingerprints of what it computes, for ``torchtrain.compare``."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.fingerprints.record import Fingerprints, Place, modules_of
from torchtrain.initialization import full_name
from torchtrain.loss import TokenLoss
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.steps.train_step import TrainStep


class FingerprintedStep(TrainStep):
    """The same step, which also writes the fingerprints of those that ``[debug]`` names."""

    def __init__(self, fingerprints: Fingerprints, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.fingerprints = fingerprints
        self.parameters = {full_name(n): p for part in self.model.parts for n, p in part.named_parameters()}
        self.watched = False  # in this step

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        self.watched = step in self.fingerprints.steps
        if not self.watched:
            return super().__call__(step, batch)
        self.fingerprints.add_parameters("", self.parameters)
        with self.fingerprints.watching({part: modules_of(part) for part in self.model.parts}):
            loss, grad_norm = super().__call__(step, batch)
        if self.model.has_loss:
            self.fingerprints.add_loss(loss.total)
        self.fingerprints.write(step, batch.tokens, batch.labels)
        return loss, grad_norm

    def _forward_backward(self, batch: Batch, global_tokens: Tensor) -> TokenLoss:
        if self.watched:
            self.fingerprints.begin(batch.tokens)
        return super()._forward_backward(batch, global_tokens)

    def _update(self, step: int, loss: TokenLoss) -> Tensor:
        if not self.watched:
            return super()._update(step, loss)
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        grad_norm = super()._update(step, loss)
        updates = {name: parameter.detach() - before[name] for name, parameter in self.parameters.items()}
        self.fingerprints.add_parameters("update", updates)
        return grad_norm

    def _share_tied_gradient(self) -> Sequence[nn.Parameter]:
        copies = super()._share_tied_gradient()
        if self.watched:
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.fingerprints.add_parameters("gradient", gradients)
        return copies


def step_maker(
    config: JobConfig, folder: Path, model: ParallelModel, global_batch_size: int
) -> Callable[..., TrainStep]:
    """``TrainStep``; or, where ``[debug]`` asks for them, one that writes fingerprints into ``folder``."""
    steps, training = config.debug.fingerprint_steps, config.training
    if not steps:
        return TrainStep
    place = Place.of_rank(model.mesh, dist.get_rank(), global_batch_size, training.seq_len)
    ranks, dtype = dist.get_world_size(), training.mixed_precision_param
    fingerprints = Fingerprints(folder / "fingerprints", steps, model.parts[0].config, place, dtype, ranks)
    return partial(FingerprintedStep, fingerprints)
