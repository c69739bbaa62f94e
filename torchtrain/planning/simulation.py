"""A run without devices: the trainer's own mesh, model, optimizer and train step, on tensors that hold no data."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import adam

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.devices import planned_for_gpu
from torchtrain.distributed.mesh import Mesh, ParallelDims, local
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.optimizers.ema import EMA
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms import microbatches
from torchtrain.parallelisms.float8 import compute_scales, gathers_float8
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model, initialize_buffers
from torchtrain.parallelisms.pipeline_schedule import resolve_microbatches
from torchtrain.parallelisms.validate import resolve_global_batch_size
from torchtrain.planning.compiled import compiling_for
from torchtrain.planning.instrument import LedgerHook, following
from torchtrain.planning.ledger import Action, Ledger
from torchtrain.planning.operations import tensors_in
from torchtrain.planning.representative_ranks import orders_of
from torchtrain.torch_internals import (
    FakeStore,
    FakeTensorMode,
    TorchDispatchMode,
    _clear_sharding_prop_cache,
    _PipelineSchedule,
    _scoped_library,
)
from torchtrain.trainer import TrainStep

aten = torch.ops.aten
STEPS = 2  # the second has Adam's states from its beginning


@dataclass(frozen=True)
class RankRecord:
    """What one rank does in ``STEPS`` steps."""

    rank: int
    parameter_bytes: int
    ledger: Ledger
    orders: Mapping[int, Sequence[Action]]
    """What each rank of its pipeline does in one run."""


def representative_ranks(degrees: ParallelDims) -> list[int]:
    """The first rank of each pipeline stage: the others of a stage do the same, and hold no more."""
    ranks = degrees.replicate * degrees.shard * degrees.context * degrees.tensor
    return [stage * ranks for stage in range(degrees.pipeline)]


def axes_of(mesh: Mesh) -> dict[str, str]:
    """The name of the mesh's axis by group name."""
    groups = {
        "stage" if mesh.degrees.pipeline > 1 else "all": mesh.stage.get_group(),
        "loss": mesh.loss.get_group(),
        "batch": mesh.batch.get_group(),
        "shard": mesh.fsdp.get_group(mesh.fsdp.ndim - 1),
        **{name: mesh.world[name].get_group() for name in ("pipeline", "replicate", "context", "tensor")},
    }
    return {group.group_name: name for name, group in groups.items()}


@contextmanager
def simulated_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank`` among ``world_size`` ranks that are not there."""
    init, number = DeviceMesh.__init__, uuid4().int

    def numbered_init(mesh: Any, *args: Any, **options: Any) -> None:
        init(mesh, *args, **options)
        mesh._thread_id = number

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        # DTensor remembers results by mesh: this one must not equal that of a rehearsal before, whose groups are gone.
        with patch.object(DeviceMesh, "__init__", numbered_init):
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


class AllocatedIn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Outside of ``mode``, makes fake tensors of it where memory is allocated: for what was on the meta device, and on
    a device that is not there. All else works on real ones: the mesh of ranks.
    """

    def __init__(self, mode: FakeTensorMode):
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = torch.device(kwargs.get("device") or "meta").type
        materialized = device == "cpu" and any(tensor.is_meta for tensor in tensors_in(args))
        with self.mode if device == "cuda" or materialized else nullcontext():
            return func(*args, **kwargs)


@contextmanager
def fused_rms_norm() -> Iterator[None]:
    """Let autograd see one operation, as on a GPU. A CPU has no kernel of it, so autograd would see its parts."""
    with _scoped_library("aten", "IMPL") as kernels:
        # Not called: a fake tensor takes the shapes of an operation alone.
        kernels.impl("_fused_rms_norm", lambda *_: None, "CPU")
        yield


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """For tensors that claim to lie on a CPU, the kernels that a GPU would take."""

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        if attn_mask is None and q.dtype is torch.float32:  # as ``attend`` on a GPU; a mask stands for flex_attention
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]  # type: ignore[no-any-return]

    def document_mask(numbers: Tensor, _: Tensor) -> Tensor:
        return numbers.new_empty(len(numbers), 1, 1, 1, dtype=torch.bool)  # a BlockMask is as small

    functional = torch.nn.functional
    with (
        fused_rms_norm(),
        patch.object(functional, "scaled_dot_product_attention", attention),
        patch.object(microbatches, "document_mask", document_mask),
        patch.object(Tensor, "pin_memory", lambda tensor: tensor),
    ):
        yield


def know_shapes(_: _PipelineSchedule, stages: Any, *__: Any) -> None:
    """In place of ``_warmup_p2p``, where ranks vote on whether shapes are static: fake messages cannot be read."""
    from torchtrain.torch_internals import InferenceMode  # since torch 2.13

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def simulate(
    config: JobConfig,
    shape: TransformerConfig,
    degrees: ParallelDims,
    rank: int,
    *,
    capability: tuple[int, int] | None,
    max_microbatches: int | None = None,
    device: torch.device | None = None,
) -> RankRecord:
    """Run ``STEPS`` steps as ``rank`` would.

    Args:
        capability: of the GPU that is planned for; None for a run on CPUs.
        max_microbatches: how many microbatches of a step to run at most (with a pipeline: runs of its schedule).
        device: of the fake tensors; by default the CPU, which any torch can differentiate on, and which stands in for
            the GPU.
    """
    device = device or torch.device("cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # while the model is built, from real tensors on the meta device
    ledger = Ledger(device.type, offloaded=config.training.enable_cpu_offload)
    with (
        simulated_ranks(rank, prod(astuple(degrees))),
        patch.object(_PipelineSchedule, "_warmup_p2p", know_shapes, create=True),  # since torch 2.13
        # Without the fused kernel the host computes with the number of steps, which no fake tensor has.
        patch.object(adam, "_get_value", lambda value: 1 if isinstance(value, Tensor) else value),
        compiling_for(ledger),
        planned_for_gpu(capability) if capability else nullcontext(),
        kernels_of_a_gpu() if capability and device.type == "cpu" else nullcontext(),
        patch.dict(os.environ, LOCAL_WORLD_SIZE=str(config.estimate.gpus_per_node)),  # as torchrun would say
    ):
        with AllocatedIn(mode):
            mesh = Mesh(device, degrees)
            ledger.axes = axes_of(mesh)
            model = build_parallel_model(shape, mesh, device, config)
        mode.allow_non_fake_inputs = False
        with mode:
            initialize_buffers(model.parts, device)
            return simulate_steps(config, model, ledger, max_microbatches)


class UnreadGuard(NonFiniteGuard):
    """Its results are never read: fake tensors have no values."""

    def wait(self) -> None:
        pass


def simulate_steps(
    config: JobConfig,
    model: ParallelModel,
    ledger: Ledger,
    max_microbatches: int | None = None,
    new_tokens: Callable[..., Tensor] = torch.empty,
) -> RankRecord:
    """Train ``model``, on real tensors or fake ones, under the eyes of ``ledger``."""
    mesh, device, local_batch = model.mesh, model.device, config.training.local_batch_size
    rows = resolve_global_batch_size(config, mesh.degrees) // mesh.degrees.batch
    if max_microbatches is not None:
        rows = min(rows, max_microbatches * local_batch)
    parameters = [local(parameter) for part in model.parts for parameter in part.parameters()]
    optimizer = build_optimizer(model.parts, config.optimizer, mesh)
    if gathers_float8(config.float8, mesh.degrees.fsdp):
        optimizer.register_step_post_hook(partial(compute_scales, model.parts))
    # Offloaded averages take memory and time of the host alone.
    averages = EMA(model.parts, config.ema) if config.ema.enable and not config.ema.offload else None
    # A StopRequest would take over the signals of this process.
    stop = cast(StopRequest, SimpleNamespace(pending=False))
    train_step = TrainStep(
        model,
        Microbatches(mesh, device, local_batch, 0 if config.data.document_mask else None),
        optimizer,
        LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps),
        UnreadGuard(config.faults, stop, SpikeDetector(config.faults, device), lambda *_: None),
        max_norm=config.training.max_norm,
        before_update=lambda: None,
        ema=averages,
        hooks=[LedgerHook(ledger)],
    )
    ledger.adopt(parameters, "parameters")
    if averages is not None:
        ledger.adopt([local(average) for average in averages.averages.values()], "optimizer")
    ledger.adopt([buffer for part in model.parts for buffer in part.buffers()], "temporary")
    with following(ledger):
        for step in range(1, STEPS + 1):
            tokens = new_tokens(rows, config.training.seq_len, dtype=torch.int64)
            train_step(step, Batch(tokens, tokens.clone()))
            del tokens
            ledger.adopt([local(value) for state in optimizer.state.values() for value in state.values()], "optimizer")
            ledger.end_step()
    count = resolve_microbatches(config.parallelism, config.training) if model.pipeline is not None else 0
    size = sum(parameter.nbytes for parameter in parameters)
    return RankRecord(dist.get_rank(), size, ledger, orders_of(model.pipeline, count))
