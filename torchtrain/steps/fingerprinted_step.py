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
        with self.fingerprints.watching({part: modules_of(part) for part in self.model.parts}):
            loss, grad_norm = super().__call__(step, batch)
        if self.model.has_loss:
            self.fingerprints.add_loss(loss.total)
        self.fingerprints.write(step, batch)
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


def make_step(
    config: JobConfig, folder: Path, global_batch_size: int, model: ParallelModel, *args: Any, **options: Any
) -> StepFunction:
    """A ``TrainStep``; in the steps that ``[debug]`` names it writes fingerprints into ``folder``."""
    steps, plain = config.debug.fingerprint_steps, TrainStep(model, *args, **options)
    if not steps:
        return plain
    fingerprints = Fingerprints(
        folder / "fingerprints",
        model.parts[0].config,
        model.mesh,
        config.training.mixed_precision_param,
        global_batch_size,
        local_sequence(torch.arange(config.training.seq_len), model.mesh.context, dim=0),
    )
    fingerprinted = FingerprintedStep(fingerprints, model, *args, **options)
    return lambda step, batch: (fingerprinted if step in steps else plain)(step, batch)
