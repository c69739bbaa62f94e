"""A step that writes fingerprints of what it computes, for ``torchtrain.compare``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.fingerprints.record import Fingerprints, modules_of
from torchtrain.initialization import full_name
from torchtrain.log import BestEffort
from torchtrain.loss import TokenLoss
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.steps.train_step import TrainStep

StepFunction = Callable[[int, Batch], tuple[TokenLoss, Tensor]]


class FingerprintedStep(TrainStep):
    """The same step, which also writes fingerprints, below the run's ``folder``."""

    def __init__(self, config: JobConfig, folder: Path, global_batch_size: int, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.folder = folder / "fingerprints"
        self.best_effort = BestEffort("fingerprints")
        self.parameters = {full_name(n): p for part in self.model.parts for n, p in part.named_parameters()}
        training, mesh = config.training, self.model.mesh
        sequence = local_sequence(torch.arange(training.seq_len), mesh.context, dim=0)
        shape, dtype = self.model.parts[0].config, training.mixed_precision_param
        self.fingerprints = Fingerprints(shape, mesh, dtype, global_batch_size, sequence)

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        with self.fingerprints.watching({part: modules_of(part) for part in self.model.parts}):
            loss, grad_norm = super().__call__(step, batch)
        if self.model.has_loss:
            self.fingerprints.add_loss(loss.total)
        found = self.fingerprints.collect(batch)
        with self.best_effort:
            if found is not None:
                found.save(self.folder / f"step-{step}")
        return loss, grad_norm

    def _forward_backward(self, batch: Batch, global_tokens: Tensor) -> TokenLoss:
        self.fingerprints.begin(batch.tokens, self.parameters)
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


def make_step(config: JobConfig, folder: Path, global_batch_size: int, *args: Any, **options: Any) -> StepFunction:
    """A ``TrainStep``; in the steps that ``[debug]`` names a ``FingerprintedStep``."""
    steps, plain = config.debug.fingerprint_steps, TrainStep(*args, **options)
    if not steps:
        return plain
    fingerprinted = FingerprintedStep(config, folder, global_batch_size, *args, **options)
    return lambda step, batch: (fingerprinted if step in steps else plain)(step, batch)
