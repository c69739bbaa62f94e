"""Writes fingerprints of the steps that ``[debug]`` names, for ``torchtrain.compare``."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from torchtrain.comparison.fingerprint_recorder import Fingerprints, modules_of
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.logging import BestEffort
from torchtrain.models.initialization import full_name
from torchtrain.models.loss import TokenLoss
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.trainer import StepHook


class FingerprintHook(StepHook):
    """Takes fingerprints of what the model computes in ``debug.fingerprint_steps`` and writes them to
    ``<dump folder>/fingerprints/step-N``.

    ``config``: the resolved one, with ``training.global_batch_size`` as a number.
    """

    def __init__(self, config: JobConfig, model: ParallelModel) -> None:
        self.steps = config.debug.fingerprint_steps
        self.folder = Path(config.job.dump_folder) / "fingerprints"
        self.model = model
        self.best_effort = BestEffort("fingerprints")
        self.parameters = {full_name(n): p for part in model.parts for n, p in part.named_parameters()}
        training = config.training
        sequence = local_sequence(torch.arange(training.seq_len), model.mesh.context, dim=0)
        self.fingerprints = Fingerprints(
            model.parts[0].config, model.mesh, training.mixed_precision_param, training.global_batch_size, sequence
        )
        self.watching = ExitStack()
        """Holds the modules' hooks during a step of ``steps``."""
        self.active = False
        self.before: dict[str, Tensor] = {}
        """The parameters before the update."""

    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.active = step in self.steps
        if self.active:
            self.watching.enter_context(
                self.fingerprints.watching({part: modules_of(part) for part in self.model.parts})
            )

    def before_forward_backward(self, batch: Batch) -> None:
        if self.active:
            self.fingerprints.begin(batch.tokens, self.parameters)

    def after_gradients(self) -> None:
        if self.active:
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.fingerprints.add_parameters("gradient", gradients)
            self.before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def after_update(self) -> None:
        if self.active:
            updates = {name: parameter.detach() - self.before[name] for name, parameter in self.parameters.items()}
            self.before = {}
            self.fingerprints.add_parameters("update", updates)

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
        if not self.active:
            return
        self.watching.close()
        if self.model.has_loss:
            self.fingerprints.add_loss(loss.total)
        found = self.fingerprints.collect(batch)
        with self.best_effort:
            if found is not None:
                found.save(self.folder / f"step-{step}")
