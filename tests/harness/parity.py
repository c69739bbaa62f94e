"""Train a tiny model with the same config and seed on different layouts, and compare the runs."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtrain import trainer as trainer_module
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import JobConfig, TrainingConfig, section_of
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.loss import TokenLoss
from torchtrain.models.parameters import full_name
from torchtrain.optimizers.ema import EMA
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import LRSchedulerConfig, OptimizerConfig
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.trainer import TrainStep, initialize

TINY = TransformerConfig(32, 4, 4, 2, 64, 100, max_seq_len=16)
GLOBAL_BATCH = 8
STEPS = 3  # the third step follows an update with nonzero moments


@dataclasses.dataclass(frozen=True)
class Curve:
    """The results of one rank: global loss and gradient norm by step, and its full parameters at the start and end."""

    losses: list[float]
    grad_norms: list[float]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    moments: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """The optimizer's state at the end; only for exact sums."""
    z_losses: list[float] = dataclasses.field(default_factory=list)
    averaged_loss: float = 0.0
    """The loss of the last batch with the averaged weights."""
    averages: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def config_of(**changes: dict[str, Any]) -> JobConfig:
    """A float32 config for ``TINY``, with ``changes`` by section."""
    config = JobConfig(
        training=TrainingConfig(
            local_batch_size=2, seq_len=TINY.max_seq_len, mixed_precision_param="float32", steps=10, seed=5
        ),
        optimizer=OptimizerConfig(lr=3e-3),
        lr_scheduler=LRSchedulerConfig(warmup_steps=3),
        checkpoint=CheckpointConfig(enable=False),
    )
    return with_options(config, **changes)


def with_options(config: JobConfig, **changes: dict[str, Any]) -> JobConfig:
    """``config`` with ``changes`` by section, those of plugins included."""
    sections, plugins = {}, dict(config.plugins)
    for name, values in changes.items():
        if name in CONFIG_SECTIONS:
            plugins[name] = replace(section_of(config, CONFIG_SECTIONS[name]), **values)
        else:
            sections[name] = replace(getattr(config, name), **values)
    return replace(config, **sections, plugins=plugins)


def full_weights(parts: Sequence[Transformer]) -> dict[str, Tensor]:
    """The full parameters of ``parts``, gathered from all ranks that hold shards of them."""

    def full(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    return {full_name(name): full(parameter) for part in parts for name, parameter in part.named_parameters()}


def global_batch(step: int, vocab_size: int, seq_len: int) -> Tensor:
    """Tokens (GLOBAL_BATCH, seq_len + 1), the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocab_size, (GLOBAL_BATCH, seq_len + 1), generator=generator)


def build(config: JobConfig, shape: TransformerConfig = TINY) -> ParallelModel:
    """Build and initialize this rank's part of the model, as the trainer does."""
    device = torch.device("cpu")
    config, dims = resolve_layout(config, shape, dist.get_world_size())
    model = build_cpu_model(shape, Mesh(device, dims), device, config)
    initialize(model.model_parts, config.training.seed, device)
    return model


def train(
    config: JobConfig,
    shape: TransformerConfig = TINY,
    steps: int = STEPS,
    document_start: int | None = None,
    batch: Callable[[int, int, int], Tensor] = global_batch,
    attach: Callable[[TrainStep], None] = lambda _: None,
) -> Curve:
    """Train on this process group. Rows have different numbers of masked labels, to detect a mean of means.

    Their sources are 0, 1, 2, 0 and so on. ``attach`` is called before the first step, to add hooks.
    """
    model = build(config, shape)
    first = full_weights(model.model_parts)
    optimizer = build_optimizer(model.model_parts, config.optimizer, model.mesh, shape)
    use_cpu_kernels(optimizer)
    if (conversion := linear_conversion(config)) is not None:
        optimizer.after_step = partial(conversion.after_change, model.model_parts, model.mesh.degrees.fsdp)
        optimizer.after_step()
    averages = EMA(model.model_parts, config.ema) if config.ema.enable else None
    train_step = TrainStep(
        model,
        Microbatches(model.mesh, model.device, config.training.local_batch_size, document_start),
        optimizer,
        LRSchedule(config.lr_scheduler, config.optimizer.lr, steps),
        default_check(config),
        max_norm=config.training.max_norm,
        wait_for_copies=lambda: None,
        ema=averages,
    )
    attach(train_step)
    degrees = model.mesh.degrees
    losses, grad_norms, z_losses = [], [], []
    for step in range(1, steps + 1):
        windows = batch(step, shape.vocab_size, config.training.seq_len)
        labels = windows[:, 1:].clone()
        for row in range(len(windows)):
            labels[row, : row + step % 3] = -100
        rows = len(windows) // degrees.batch
        start = degrees.batch_rank(dist.get_rank()) * rows
        local_rows = slice(start, start + rows)
        sources = torch.arange(len(windows))[local_rows] % 3
        loss, grad_norm = train_step(step, Batch(windows[local_rows, :-1], labels[local_rows], sources=sources))
        losses.append(global_mean(loss, model.mesh))
        grad_norms.append(grad_norm.item())
        if loss.z is not None:
            z_losses.append(global_mean(loss._replace(total=loss.z), model.mesh))
    moments = {}
    if config.training.sums == "exact":
        states = optimizer.state_dict()
        moments = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in states.items()}
    last = full_weights(model.model_parts)
    averaged_loss, averaged = 0.0, {}
    if averages is not None:
        with averages.swapped_in():
            averaged = full_weights(model.model_parts)
            batch_of_rank = Batch(windows[local_rows, :-1], labels[local_rows])
            total = sum((model.forward(part) for part in train_step.microbatches(batch_of_rank)), torch.zeros(()))
            averaged_loss = global_mean(loss._replace(total=total), model.mesh)
        for name, tensor in full_weights(model.model_parts).items():
            assert torch.equal(tensor, last[name]), f"{name} differs after the averaged weights were swapped in and out"
    return Curve(losses, grad_norms, first, last, moments, z_losses, averaged_loss, averaged)


@contextmanager
def use_existing_process_group(shape: TransformerConfig) -> Iterator[None]:
    """Let a trainer use this process group as that of torchrun, and ``shape`` as the config of any model flavor."""
    ranks = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        patch.dict(os.environ, ranks),
        patch.object(trainer_module, "init_process_group"),  # already initialized by the pool
        patch("torchtrain.models.model_config.flavor_config", lambda *_: shape),
    ):
        yield


class NoStop:
    """Replaces StopRequest, which installs signal handlers and opens sockets."""

    pending = False
    agreed = False


def default_check(config: JobConfig) -> StepCheck:
    """A check that skips no update of finite numbers."""
    spikes = SpikeDetector(config.faults, torch.device("cpu"))
    return StepCheck(NonFiniteGuard(config.faults, lambda *_: None), spikes, cast(StopRequest, NoStop()))


def global_mean(loss: TokenLoss, mesh: Mesh) -> float:
    sums = torch.stack((loss.total.double(), loss.tokens.double()))
    dist.all_reduce(sums, group=mesh.loss.get_group())
    return (sums[0] / sums[1]).item()


def assert_same_run(curves: list[Curve], reference: Curve, rel: float = 1e-5) -> None:
    """Assert that all ranks start with weights bitwise equal to the reference's, and have its losses and norms."""
    assert set().union(*(curve.first for curve in curves)) == reference.first.keys()
    for curve in curves:
        for name, weights in curve.first.items():
            assert torch.equal(weights, reference.first[name]), name
        # All ranks must have bitwise equal numbers: a rank that clips differently trains another model.
        assert (curve.losses, curve.grad_norms) == (curves[0].losses, curves[0].grad_norms)
        torch.testing.assert_close(curve.losses, reference.losses, rtol=rel, atol=0)
        torch.testing.assert_close(curve.grad_norms, reference.grad_norms, rtol=rel, atol=0)


def gradients_of_a_step(config: JobConfig, shape: TransformerConfig = TINY) -> dict[str, Tensor]:
    """The full gradients of this rank's layers in the first step of ``train``."""
    gradients: dict[str, Tensor] = {}

    def record(train_step: TrainStep) -> None:
        update = train_step.optimizer.step

        def record_and_update(*args: Any) -> None:
            for part in train_step.model.model_parts:
                for name, parameter in part.named_parameters():
                    gradients[full_name(name)] = cast(DTensor, parameter.grad).full_tensor().clone()
            update(*args)

        train_step.optimizer.step = record_and_update  # type: ignore[method-assign]

    train(config, shape, steps=1, attach=record)
    return gradients
