"""Simulate training steps of one rank: the trainer's mesh, model, optimizer and step, on fake tensors."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, replace
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

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh, ParallelDims, local
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.metrics.hooks import Hooks
from torchtrain.models.spec import DecoderConfig
from torchtrain.optimizers.ema import EMA
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms import microbatches
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model, initialize_buffers
from torchtrain.parallelisms.pipeline_llama import Pipeline
from torchtrain.plugins.planner.compiled import simulated_inductor
from torchtrain.plugins.planner.instrument import RecorderHook, instrument
from torchtrain.plugins.planner.operations import tensors_in
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.recorder import Action, StepRecorder
from torchtrain.plugins.planner.representative_ranks import pipeline_actions
from torchtrain.plugins.planner.torch_internals import (
    SINCE_2_15,
    FakeStore,
    FakeTensorMode,
    TorchDispatchMode,
    _PipelineSchedule,
    _scoped_library,
)
from torchtrain.torch_internals import forget_meshes
from torchtrain.trainer import TrainStep

aten = torch.ops.aten
STEPS = 2  # the first step creates the optimizer states, the second begins with them


@dataclass(frozen=True)
class RankRecord:
    """Record of one rank in ``STEPS`` simulated steps."""

    rank: int
    parameter_bytes: int
    recorder: StepRecorder
    pipeline_actions: Mapping[int, Sequence[Action]]
    """Actions of each rank of its pipeline in one run of the schedule; empty without pipeline parallelism."""
    omitted_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by category that its pipeline would keep for microbatches that are not simulated (``kept_bytes``)."""


def representative_ranks(degrees: ParallelDims) -> list[int]:
    """Return the first global rank of each pipeline rank. Other ranks of a stage run the same operations.

    They do not need more memory either, because where a dimension is sharded unevenly, the first rank has the most.
    """
    ranks = degrees.replicate * degrees.shard * degrees.context * degrees.tensor
    return [stage * ranks for stage in range(degrees.pipeline)]


def axis_by_group(mesh: Mesh) -> dict[str, str]:
    """Return the name of the mesh axis by process group name."""
    groups = {
        "stage" if mesh.degrees.pipeline > 1 else "all": mesh.stage.get_group(),
        "loss": mesh.loss.get_group(),
        "batch": mesh.batch.get_group(),
        "shard": mesh.fsdp.get_group(mesh.fsdp.ndim - 1),
        **{name: mesh.world[name].get_group() for name in ("pipeline", "replicate", "context", "tensor")},
    }
    return {group.group_name: name for name, group in groups.items()}


@contextmanager
def simulated_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Context manager in which this process is ``rank`` of a fake process group of ``world_size`` ranks."""
    init, unique_id = DeviceMesh.__init__, uuid4().int

    def unique_init(mesh: Any, *args: Any, **options: Any) -> None:
        init(mesh, *args, **options)
        mesh._thread_id = unique_id

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        # DTensor caches results by mesh. This mesh must not equal that of an earlier simulation, whose process groups
        # are destroyed; the thread id is part of a mesh's hash.
        with patch.object(DeviceMesh, "__init__", unique_init):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


class FakeAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocate fake tensors of ``mode`` on a simulated CUDA device, and wherever meta tensors are moved to the CPU.

    The model is built in this mode. Other tensors, such as those of the device mesh, remain real.
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
    """Context manager in which RMSNorm is one operation, as on a GPU. CPUs have no fused kernel and decompose it."""
    with _scoped_library("aten", "IMPL") as kernels:
        # The registered kernel is never called, since fake tensors only compute the shape of the result.
        kernels.impl("_fused_rms_norm", lambda *_: None, "CPU")
        yield


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Context manager in which fake CPU tensors use the operations that a GPU would use."""

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        # Repeats the key and value heads where ``attend`` does on a GPU. A mask means that a GPU uses flex_attention.
        if attn_mask is None and q.dtype is torch.float32:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]  # type: ignore[no-any-return]

    def document_mask(numbers: Tensor, _: Tensor) -> Tensor:
        return numbers.new_empty(len(numbers), 1, 1, 1, dtype=torch.bool)  # about as small as a BlockMask

    functional = torch.nn.functional
    with (
        fused_rms_norm(),
        patch.object(functional, "scaled_dot_product_attention", attention),
        patch.object(microbatches, "document_mask", document_mask),
        patch.object(Tensor, "pin_memory", lambda tensor: tensor),
    ):
        yield


def assume_static_shapes(_: _PipelineSchedule, stages: Any, *__: Any) -> None:
    """Replacement of ``_warmup_p2p``, where ranks vote on whether shapes are static: fake messages cannot be read."""
    from torchtrain.plugins.planner.torch_internals import InferenceMode  # since torch 2.13

    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def simulate(
    config: JobConfig,
    model_config: DecoderConfig,
    degrees: ParallelDims,
    rank: int,
    *,
    gpu: bool = True,
    max_microbatches: int | None = None,
    pipeline_microbatches: int | None = None,
    device: torch.device | None = None,
) -> RankRecord:
    """Simulate ``STEPS`` training steps of ``rank`` on fake tensors.

    Args:
        gpu: whether to simulate a run on GPUs, otherwise on CPUs.
        max_microbatches: maximum number of microbatches per step (with a pipeline, of runs of its schedule).
        pipeline_microbatches: number of microbatches of ``RankRecord.pipeline_actions``; by default that of ``config``.
        device: device of the fake tensors. The default, CPU, represents the GPU and works with every build of PyTorch;
            autograd on fake CUDA tensors needs a CUDA device.
    """
    device = device or torch.device("cpu")
    gpus_per_node = section_of(config, EstimateConfig).gpus_per_node
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the model is built from real tensors on the meta device
    recorder = StepRecorder(device.type, offloaded=config.training.enable_cpu_offload)
    with (
        simulated_process_group(rank, prod(astuple(degrees))),
        patch.object(_PipelineSchedule, "_warmup_p2p", assume_static_shapes, create=True),  # since torch 2.13
        # Adam without the fused kernel reads the number of steps on the host, and fake tensors have no values.
        patch.object(adam, "_get_value", lambda value: 1 if isinstance(value, Tensor) else value),
        simulated_inductor(recorder),
        gpu_kernels() if gpu and device.type == "cpu" else nullcontext(),
        patch.dict(os.environ, LOCAL_WORLD_SIZE=str(gpus_per_node)),  # as torchrun sets it
    ):
        with FakeAllocations(mode):
            mesh = Mesh(device, degrees)
            recorder.axes = axis_by_group(mesh)
            build_model = build_parallel_model if gpu else build_cpu_model
            model = build_model(model_config, mesh, device, config)
        mode.allow_non_fake_inputs = False
        with mode:
            initialize_buffers(model.model_parts, device)
            record = simulate_steps(config, model, recorder, max_microbatches, gpu=gpu)
        if model.pipeline is None:
            return record
        simulated = config.parallelism.pipeline_parallel_microbatches
        count = pipeline_microbatches or simulated
        return replace(
            record,
            pipeline_actions=pipeline_actions(model.pipeline, count),
            omitted_bytes={
                category: (count - simulated) * size
                for category, size in kept_bytes(model.pipeline, config.parallelism.pipeline_parallel_schedule).items()
            },
        )


def kept_bytes(pipeline: Pipeline, schedule: str) -> dict[str, int]:
    """Bytes by category that a rank's stages keep for each microbatch until the end of a run of ``schedule``.

    Until 2.14, PyTorch allocates the buffers in which it receives activations and gradients of all microbatches before
    the first. Since then it keeps the inputs of losses (of 1F1B). A split backward also leaves the gradient of an input
    at that input. If it is of another stage of this rank, it takes the place of the buffer.
    """
    stages, hidden, own_rank = pipeline.pipeline_stages, pipeline.hidden.nbytes, pipeline.mesh.get_local_rank()
    if SINCE_2_15:
        return {"activations": hidden * sum(stage.is_last and not stage.is_first for stage in stages)}
    buffers = sum((not stage.is_first) + (not stage.is_last) for stage in stages)
    gradients = 0
    if "ZeroBubble" in schedule:
        gradients = sum(not stage.is_first for stage in stages)
        buffers -= sum(pipeline.rank_of.get(stage.stage_index + 1) == own_rank for stage in stages)
    return {"activations": buffers * hidden, "temporary": gradients * hidden}


class UnreadCheck(StepCheck):
    """A ``StepCheck`` that does not read its results, since fake tensors have no values."""

    def wait(self) -> None:
        pass


def simulate_steps(
    config: JobConfig,
    model: ParallelModel,
    recorder: StepRecorder,
    max_microbatches: int | None = None,
    new_tokens: Callable[..., Tensor] = torch.empty,
    *,
    gpu: bool = True,
) -> RankRecord:
    """Run ``STEPS`` training steps of ``model``, on real or fake tensors, while recording to ``recorder``.

    Args:
        max_microbatches: as for ``simulate``.
        gpu: as for ``simulate``.
        new_tokens: creates the batch, called as ``torch.empty`` with the shape (rows, seq_len).
    """
    mesh, device, local_batch = model.mesh, model.device, config.training.local_batch_size
    rows = config.training.global_batch_size // mesh.degrees.batch
    if max_microbatches is not None:
        rows = min(rows, max_microbatches * local_batch)
    parameters = [local(parameter) for part in model.model_parts for parameter in part.parameters()]
    optimizer = build_optimizer(model.model_parts, config.optimizer, mesh)
    if not gpu:
        use_cpu_kernels(optimizer)
    if (conversion := linear_conversion(config)) is not None:
        optimizer.after_step = partial(conversion.after_change, model.model_parts, mesh.degrees.fsdp)
        optimizer.after_step()
    # An offloaded EMA only uses memory and time of the host.
    ema = EMA(model.model_parts, config.ema) if config.ema.enable and not config.ema.offload else None
    # A real StopRequest would install signal handlers in this process.
    stop = cast(StopRequest, SimpleNamespace(pending=False))
    train_step = TrainStep(
        model,
        Microbatches(mesh, device, local_batch, 0 if config.data.document_mask else None),
        optimizer,
        LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps),
        UnreadCheck(NonFiniteGuard(config.faults, lambda *_: None), SpikeDetector(config.faults, device), stop),
        max_norm=config.training.max_norm,
        wait_for_copies=lambda: None,
        ema=ema,
        hooks=Hooks(RecorderHook(recorder)),
    )
    recorder.categorize(parameters, "parameters")
    if ema is not None:
        recorder.categorize([local(average) for average in ema.averages.values()], "optimizer")
    recorder.categorize([buffer for part in model.model_parts for buffer in part.buffers()], "temporary")
    with instrument(recorder):
        for step in range(1, STEPS + 1):
            tokens = new_tokens(rows, config.training.seq_len, dtype=torch.int64)
            train_step(step, Batch(tokens, tokens.clone()))
            del tokens
            recorder.categorize([local(value) for value in optimizer.state_dict().values()], "optimizer")
            recorder.end_step()
    return RankRecord(dist.get_rank(), sum(parameter.nbytes for parameter in parameters), recorder, {})
