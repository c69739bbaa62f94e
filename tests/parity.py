"""Runs of a tiny model that tests compare: the same config and seed on different layouts, through the real joinery."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtrain.build import initialize
from torchtrain.config.schema import JobConfig, LRScheduler, Optimizer, Training
from torchtrain.datasets.loader import Batch
from torchtrain.distributed.mesh import Mesh, resolve_degrees
from torchtrain.faults.stopping import StopRequest
from torchtrain.faults.update_guard import UpdateGuard
from torchtrain.initialization import full_name
from torchtrain.loss import OutputLoss, TokenLoss
from torchtrain.lr_schedule import LRSchedule
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.optimizer import build_optimizer
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain.parallelisms.pipeline_llama import Pipeline, build_stages
from torchtrain.train_step import TrainStep

TINY = TransformerConfig(32, 4, 4, 2, 64, 100, max_seq_len=16)
GLOBAL_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one rank saw: loss and gradient norm of all by step, and its parameters, in full, at start and end."""

    losses: list[float]
    grad_norms: list[float]
    first: dict[str, Tensor]
    last: dict[str, Tensor]


def config_of(**changes: dict[str, Any]) -> JobConfig:
    """A float32 config for ``TINY``; ``changes`` by section."""
    config = JobConfig(
        training=Training(
            local_batch_size=2, seq_len=TINY.max_seq_len, mixed_precision_param="float32", steps=10, seed=5
        ),
        optimizer=Optimizer(lr=3e-3),
        lr_scheduler=LRScheduler(warmup_steps=3),
    )
    sections = {name: replace(getattr(config, name), **values) for name, values in changes.items()}
    return replace(config, **sections)


def full_weights(parts: Sequence[Transformer]) -> dict[str, Tensor]:
    """The parameters of ``parts``, each put together from all ranks that hold some of it."""

    def full(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    return {full_name(name): full(parameter) for part in parts for name, parameter in part.named_parameters()}


def global_batch(step: int, vocab_size: int, seq_len: int) -> Tensor:
    """Tokens (GLOBAL_BATCH, seq_len + 1), the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocab_size, (GLOBAL_BATCH, seq_len + 1), generator=generator)


def build(config: JobConfig, model_config: TransformerConfig = TINY) -> tuple[dict[int, Transformer], Mesh]:
    """This rank's stages (without a pipeline, one), parallelized and initialized as the joinery does it."""
    mesh = Mesh(torch.device("cpu"), resolve_degrees(config.parallelism, dist.get_world_size()))
    stages = build_stages(model_config, mesh, config.parallelism)
    for stage in stages.values():
        parallelize_llama(
            stage,
            mesh,
            training=config.training,
            parallelism=config.parallelism,
            activation_checkpoint=config.activation_checkpoint,
            compile=config.compile,
            float8=config.float8,
        )
        stage.to_empty(device="cpu")
    initialize(list(stages.values()), config.training.seed, torch.device("cpu"))
    return stages, mesh


def train(
    config: JobConfig, model_config: TransformerConfig = TINY, steps: int = 10, document_start: int | None = None
) -> Curve:
    """Train on this process group. Rows have different numbers of masked labels, so that a mean of means would show."""
    device = torch.device("cpu")
    stages, mesh = build(config, model_config)
    degrees, parts = mesh.degrees, list(stages.values())
    loss_of = OutputLoss(config.training.loss_chunk_tokens, compile=config.compile.enable)
    pipeline = None
    if degrees.pipeline > 1:
        pipeline = Pipeline(stages, mesh, device, loss_of, training=config.training, parallelism=config.parallelism)
    first = full_weights(parts)
    optimizer = build_optimizer(parts, config.optimizer)
    schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, steps)
    guard = admit_all(config, device)
    train_step = TrainStep(
        parts,
        pipeline,
        optimizer,
        schedule,
        mesh,
        loss_of,
        config.training,
        device,
        guard,
        lambda: None,
        document_start,
    )
    rows = GLOBAL_BATCH // degrees.batch
    start = degrees.batch_rank(dist.get_rank()) * rows
    losses, grad_norms = [], []
    for step in range(1, steps + 1):
        windows = global_batch(step, model_config.vocab_size, config.training.seq_len)
        labels = windows[:, 1:].clone()
        for row in range(GLOBAL_BATCH):
            labels[row, : row + step % 3] = -100
        mine = slice(start, start + rows)
        loss, grad_norm = train_step(step, Batch(windows[mine, :-1], labels[mine]))
        losses.append(global_mean(loss, mesh))
        grad_norms.append(grad_norm.item())
    return Curve(losses, grad_norms, first, full_weights(parts))


class NoStop:
    """In place of a StopRequest, which takes over the signals of its process and opens sockets."""

    pending = False


def admit_all(config: JobConfig, device: torch.device) -> UpdateGuard:
    """The guard of a run in which nothing goes wrong."""
    return UpdateGuard(config.faults, cast(StopRequest, NoStop()), device, lambda *_: None)


def global_mean(loss: TokenLoss, mesh: Mesh) -> float:
    sums = torch.stack((loss.total.double(), loss.tokens.double()))
    dist.all_reduce(sums, group=mesh.loss.get_group())
    return (sums[0] / sums[1]).item()


def assert_same_run(curves: list[Curve], reference: Curve, rel: float = 1e-5) -> None:
    """All ranks started from bitwise the same weights as ``reference`` and went the same way, to rounding."""
    assert set().union(*(curve.first for curve in curves)) == reference.first.keys()
    for curve in curves:
        for name, weights in curve.first.items():
            assert torch.equal(weights, reference.first[name]), name
        # All ranks act on the same numbers, to the bit: one that clips otherwise is on another path.
        assert (curve.losses, curve.grad_norms) == (curves[0].losses, curves[0].grad_norms)
        torch.testing.assert_close(curve.losses, reference.losses, rtol=rel, atol=0)
        torch.testing.assert_close(curve.grad_norms, reference.grad_norms, rtol=rel, atol=0)
