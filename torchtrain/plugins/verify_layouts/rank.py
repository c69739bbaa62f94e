"""What each rank does: train a few steps in float64, and record fingerprints of all tensors."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchtrain.config.schema import JobConfig
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.labels import IGNORE_INDEX
from torchtrain.metrics.hooks import Hook, Hooks
from torchtrain.models.initialization import fill_parameter
from torchtrain.models.parameters import full_name
from torchtrain.models.spec import DecoderConfig
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.comparison.fingerprint_hook import FingerprintHook
from torchtrain.plugins.comparison.fingerprints import RankPart
from torchtrain.plugins.comparison.options import ComparisonConfig
from torchtrain.plugins.verify_layouts.float64 import Float64
from torchtrain.plugins.verify_layouts.layouts import ROWS
from torchtrain.plugins.verify_layouts.plain import PlainConfig, PlainTrainStep
from torchtrain.trainer import TrainStep, initialize

DOCUMENT_START = 1  # the token, with a document mask
NOISE = 0.05
NOT_SKIPPED = torch.zeros(())  # what a ``StepCheck`` returns after a good step; float32, also in ``Float64``


@dataclass
class RankRecord:
    """What one rank has recorded."""

    steps: list[dict[str, RankPart]]
    """Of each step the parts of tensors that this rank has."""
    grad_norms: list[float]
    """Of each step, before clipping; empty for a plain model."""
    constant: frozenset[str]
    """Full names of parameters whose initial values are all equal. Only known on one rank."""


class RecordingHook(FingerprintHook):
    """Keeps the fingerprints of this rank, instead of writing those of all.

    ``activations``: whether to record activations and their gradients, too.
    """

    def __init__(self, config: JobConfig, model: ParallelModel, *, activations: bool) -> None:
        super().__init__(config, model)
        self.activations = activations
        self.recorded: list[dict[str, RankPart]] = []

    def before_step(self, step: int, batch: Batch) -> None:
        if self.activations:
            super().before_step(step, batch)
        self.active = True

    def keep(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.recorded.append(dict(self.recorder.parts))


def train_and_record(
    config: JobConfig, model_config: DecoderConfig, constant: frozenset[str] | None, activations: bool
) -> RankRecord:
    """Train ``config.training.steps`` steps on this process group, and record all tensors.

    Args:
        config: the result of ``Layout.apply``.
        constant: the names of parameters to add noise to; None on one rank, which finds them.
        activations: whether to record activations and their gradients, too: half of the time of a step.
    """
    torch.set_default_dtype(torch.float64)
    device, steps = torch.device("cpu"), config.training.steps
    config, dims = resolve_layout(config, model_config, dist.get_world_size())
    mesh = Mesh(device, dims)
    is_plain = isinstance(model_config, PlainConfig)
    if is_plain:  # all logits are there at once
        config = replace(config, training=replace(config.training, loss_chunk_tokens=0))
    with Float64():
        model = (build_parallel_model if is_plain else build_cpu_model)(model_config, mesh, device, config)
    for module in chain.from_iterable(part.modules() for part in model.model_parts):
        if isinstance(module, FSDPModule):
            widen_policy(module)
    constant = initialize_with_noise(model, config.training.seed, constant)
    recorded = tuple(range(1, steps + 1))
    watched = replace(config, plugins={**config.plugins, "comparison": ComparisonConfig(fingerprint_steps=recorded)})
    with Float64():
        hook = RecordingHook(watched, model, activations=activations)
        grad_norms = train(config, model_config, model, hook, PlainTrainStep if is_plain else TrainStep)
    return RankRecord(hook.recorded, [] if is_plain else grad_norms, constant)


def train(
    config: JobConfig,
    model_config: DecoderConfig,
    model: ParallelModel,
    hook: Hook,
    kind: type[TrainStep] = TrainStep,
) -> list[float]:
    """Train the steps of ``config``, which is resolved, and return their gradient norms."""
    mesh, device, steps = model.mesh, model.device, config.training.steps
    optimizer = build_optimizer(model.model_parts, config.optimizer, mesh, model_config)
    use_cpu_kernels(optimizer)
    train_step = kind(
        model,
        Microbatches(
            mesh, device, config.training.local_batch_size, DOCUMENT_START if config.data.document_mask else None
        ),
        optimizer,
        LRSchedule(config.lr_scheduler, config.optimizer.lr, steps),
        cast(StepCheck, lambda *_: NOT_SKIPPED),
        max_norm=config.training.max_norm,
        wait_for_copies=lambda: None,
        hooks=Hooks(hook),
    )
    rows = ROWS // mesh.degrees.batch
    first = mesh.degrees.batch_rank(dist.get_rank()) * rows
    grad_norms = []
    for step in range(1, steps + 1):
        batch = global_batch(step, model_config.vocab_size, config.training.seq_len)
        own = Batch(batch.tokens[first : first + rows], batch.labels[first : first + rows])
        grad_norms.append(train_step(step, own)[1].item())
    return grad_norms


def named_parameters(model: ParallelModel) -> dict[str, Tensor]:
    """The parameters of this rank by full name."""
    return {full_name(name): p for part in model.model_parts for name, p in part.named_parameters()}


def initialize_with_noise(model: ParallelModel, seed: int, constant: frozenset[str] | None) -> frozenset[str]:
    """Initialize ``model``, and add noise to the parameters ``constant``.

    Returns their names; None: those whose initial values are all equal, on one rank.
    """
    initialize(model.model_parts, seed, model.device)
    parameters = named_parameters(model)
    if constant is None:
        constant = frozenset(name for name, p in parameters.items() if is_constant(local(p.detach())))
    add_noise({name: parameters[name] for name in parameters.keys() & constant}, seed)
    return constant


def widen_policy(module: FSDPModule) -> None:
    """Let FSDP gather and reduce in float64, also where a function of the user names another dtype."""
    policy = fully_shard.state(module)._mp_policy  # type: ignore[attr-defined]
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        if getattr(policy, name) is not None:
            object.__setattr__(policy, name, torch.float64)  # it is frozen, and FSDP keeps it in several places


def is_constant(parameter: Tensor) -> bool:
    return bool((parameter == parameter.flatten()[0]).all())


@torch.no_grad()
def add_noise(parameters: dict[str, Any], seed: int) -> None:
    """Add noise to parameters whose initial values are all equal, the same on every layout.

    A weight of 1 hides a missing product with it, and a weight of 0 all that is multiplied by it.
    """
    for name, parameter in parameters.items():
        noise = torch.empty_like(parameter)
        fill_parameter(noise, lambda u: u.mul_(2 * NOISE).sub_(NOISE), seed, f"{name} noise")
        local(parameter.detach()).add_(local(noise))


def global_batch(step: int, vocab_size: int, seq_len: int) -> Batch:
    """All rows of a step: random tokens, the same on every rank.

    Rows have different numbers of masked labels, so that a mean of means is not the mean.
    """
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(0, vocab_size, (ROWS, seq_len + 1), generator=generator)
    for row in range(ROWS):  # documents begin at other positions in each row
        windows[row, (11 * row + 5) % seq_len] = DOCUMENT_START
    labels = windows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : min(seq_len - 1, 3 * row + step)] = IGNORE_INDEX
    return Batch(windows[:, :-1], labels)
