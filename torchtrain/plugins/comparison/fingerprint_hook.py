"""Hook that writes fingerprints of the steps in ``comparison.fingerprint_steps``, for ``torchtrain.compare``."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.dataloader import Batch
from torchtrain.logging import BestEffort
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import TokenLoss
from torchtrain.models.parameters import full_name
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.comparison.fingerprint_recorder import FingerprintRecorder, recorded_modules
from torchtrain.plugins.comparison.options import ComparisonConfig


class FingerprintHook(Hook):
    """Record fingerprints in the steps ``comparison.fingerprint_steps``, and write them to
    ``<dump folder>/fingerprints/step-N``.

    Args:
        config: the resolved config, in which ``training.global_batch_size`` is not -1.
        model: the model that is trained.
    """

    def __init__(self, config: JobConfig, model: ParallelModel) -> None:
        self.steps = section_of(config, ComparisonConfig).fingerprint_steps
        self.folder = Path(config.job.dump_folder) / "fingerprints"
        self.model = model
        self.best_effort = BestEffort("fingerprints")
        self.parameters = {full_name(n): p for part in model.model_parts for n, p in part.named_parameters()}
        training = config.training
        sequence = local_sequence(torch.arange(training.seq_len), model.mesh.context, dim=0)
        self.recorder = FingerprintRecorder(
            model.model_parts[0].config,
            model.mesh,
            training.mixed_precision_param,
            training.global_batch_size,
            sequence,
        )
        self.recording = ExitStack()
        """Removes the modules' hooks at the end of a recorded step."""
        self.active = False
        self.parameters_before: dict[str, Tensor] = {}
        """Copies of the parameters before the update."""

    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.active = step in self.steps
        if self.active:
            self.recording.enter_context(
                self.recorder.recording({part: recorded_modules(part) for part in self.model.model_parts})
            )

    def before_forward_backward(self, batch: Batch) -> None:
        if self.active:
            self.recorder.begin(batch.tokens, self.parameters)

    def after_gradients(self) -> None:
        if self.active:
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.recorder.add_parameters("gradient", gradients)
            self.parameters_before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def after_update(self) -> None:
        if self.active:
            before = self.parameters_before
            updates = {name: parameter.detach() - before[name] for name, parameter in self.parameters.items()}
            self.parameters_before = {}
            self.recorder.add_parameters("update", updates)

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
        if not self.active:
            return
        self.recording.close()
        if self.model.has_loss:
            self.recorder.add_loss(loss.total)
        self.keep(step, batch)

    def keep(self, step: int, batch: Batch) -> None:
        """Keep what was recorded of ``step``. Collective."""
        fingerprints = self.recorder.collect(batch)
        with self.best_effort:
            if fingerprints is not None:
                fingerprints.save(self.folder / f"step-{step}")
