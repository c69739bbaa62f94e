"""Simulate training steps of a config on a fake GPU and report on them; runs inside ``fake_cuda.Worker``."""

import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.config
from collective_order import calls_of, difference, disagreements
from parity import with_options

from torchtrain.config.parse import from_file
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.models.model_config import build_model_config
from torchtrain.plugins.planner import simulation
from torchtrain.plugins.planner.hardware import GPUS
from torchtrain.plugins.planner.operations import MATMULS, VIEWS, collective, tensors_in
from torchtrain.plugins.planner.recorder import CATEGORIES, StepRecorder
from torchtrain.plugins.planner.request import resolve_and_check
from torchtrain.plugins.planner.simulation import representative_ranks, simulate
from torchtrain.trainer import TrainStep

# Expected operations on the host: batches are made and labels counted there, and the guard's result is copied there.
HOST_WORK = {
    *("empty in forward", "clone in forward", "ne in forward", "sum in forward", "_to_copy in forward"),
    "_to_copy in update",
    "zeros in forward",  # the random state that the first run of a pipeline restores
}


PARAMETER = object()  # the dtype of training.mixed_precision_param
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SENT: dict[tuple[Any, ...], Any] = {
    # Weights and their gradients.
    ("shard", "allgather_base", 1): PARAMETER,
    ("shard", "reduce_scatter_base", 1): torch.float32,
    ("replicate", "allreduce", 1): torch.float32,
    ("tensor", "allreduce", 1): torch.float32,  # of norms
    ("pipeline", "send", 2): torch.float32,  # of tied embeddings
    ("pipeline", "recv", 2): torch.float32,
    # Activations, of three dimensions, and keys and values of attention, of five.
    ("tensor", "all_gather_into_tensor", 3): PARAMETER,
    ("tensor", "reduce_scatter_tensor", 3): PARAMETER,
    ("tensor", "all_reduce", 3): PARAMETER,
    ("context", "all_gather_into_tensor", 5): PARAMETER,
    ("context", "reduce_scatter_tensor", 5): PARAMETER,
    ("pipeline", "send", 3): PARAMETER,
    ("pipeline", "recv", 3): PARAMETER,
    # Sums and maxima of the softmax over a sharded vocabulary.
    ("tensor", "all_reduce", 1): torch.float32,
    ("tensor", "all_reduce", 2): torch.float32,
    # On any axis: the matrices of Muon, counts of tokens, losses and the squares of the gradient norm.
    ("alltoall_base", 1): torch.bfloat16,
    ("allreduce", 0): (torch.int64, torch.float64),
    ("allreduce", 1): torch.float64,
}
"""The dtype of each collective of a step by axis, operation and dimensions of what is sent."""
if torch.__version__ < "2.12":  # in which stages exchange their numbers once
    SENT |= {("pipeline", "send", 0): torch.float32, ("pipeline", "recv", 1): torch.float32}


class SynchronizationRecorder(StepRecorder):
    """Also records, by phase, synchronizations of the host with the device, and operations on other devices."""

    def __init__(self, device_type: str, **options: Any):
        super().__init__(device_type, **options)
        self.readbacks: list[str] = []
        self.others: Counter[str] = Counter()
        self.reductions: set[tuple[str, str, torch.dtype, int]] = set()
        self.products: set[tuple[str, str, torch.dtype]] = set()
        self.sent: set[tuple[str, str, torch.dtype, int]] = set()
        self.single_messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self.device_type:
            self.readbacks.append(f"item in {self.phase}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super()._record(func, args, kwargs, out)
        if func.overloadpacket in MATMULS or "attention" in func._opname:
            self.products.add((func._opname, self.phase, tensors_in(args)[0].dtype))
        found = collective(func, args, out)
        if found is not None:
            summands = tensors_in(args)[-1]  # after the output, where it is an argument
            call = self.axes.get(found[1].group_name, "all"), found[0], summands.dtype, summands.ndim
            self.sent.add(call)
            self.single_messages += found[0] in ("send", "recv") and not is_in_a_batch()
            if "reduce" in found[0]:
                self.reductions.add(call)
        if func.is_view or func.overloadpacket in VIEWS or func.namespace not in ("aten", "fsdp"):
            return
        name, own, inputs, outputs = func._opname, self.device_type, tensors_in((args, kwargs)), tensors_in(out)
        # Scalars are kernel arguments on any device; attention returns its random state on the host.
        away = [t.device.type not in (own, "meta") for t in outputs]
        if (away and all(away)) or any(t.ndim and t.device.type not in (own, "meta") for t in inputs):
            self.others[f"{name} in {self.phase}"] += 1
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if name in ("copy_", "_to_copy") and waits and inputs[-1].device.type == own != outputs[0].device.type:
                self.readbacks.append(f"{name} in {self.phase}")


def is_in_a_batch() -> bool:
    """Whether ``batch_isend_irecv`` is on the stack, or torch's schedule, which only sends or only receives else."""
    names = ("batch_isend_irecv", "_batch_p2p")
    return any(frame.f_code.co_name in names for frame, _ in traceback.walk_stack(None))


@dataclass(frozen=True)
class RankRecord:
    """What one rank did in its last step; ``readbacks``, ``others`` and ``reductions`` are of all steps."""

    rank: int
    peak: Mapping[str, int]  # peak bytes by category
    flops: int
    recomputed: int  # FLOPs of recomputation
    collectives: Counter[tuple[str, str, int]]  # axis, operation, bytes
    readbacks: Sequence[str]
    others: Counter[str]
    attention: set[str]  # the attention kernels
    reductions: set[tuple[str, str, torch.dtype, int]]  # axis, operation, dtype and dimensions of the summands
    products: set[tuple[str, str, torch.dtype]]  # operation, phase and dtype of matrix products and attention
    sent: set[tuple[str, str, torch.dtype, int]]  # as ``reductions``, of all collectives
    single_messages: int  # NCCL makes two ranks that both send first, and then receive, wait for each other


@dataclass(frozen=True)
class Report:
    ranks: Sequence[RankRecord]
    disagreements: Sequence[str]
    config_error: str = ""
    dtype: torch.dtype = torch.bfloat16  # training.mixed_precision_param

    @property
    def unexpected_dtypes(self) -> set[tuple[Any, ...]]:
        """Products of other dtypes than the parameters', and collectives of dtypes that ``SENT`` does not have."""
        products = set().union(*(seen.products for seen in self.ranks))
        sent = set().union(*(seen.sent for seen in self.ranks))
        found: set[tuple[Any, ...]] = {product for product in products if product[2] not in (self.dtype, *FLOAT8)}
        for axis, name, dtype, ndim in sent:
            expected = SENT.get((axis, name, ndim), SENT.get((name, ndim)))
            allowed = expected if isinstance(expected, tuple) else (self.dtype if expected is PARAMETER else expected,)
            if dtype not in (*allowed, *FLOAT8):
                found.add((axis, name, dtype, ndim))
        return found

    @property
    def host_work(self) -> set[str]:
        """Unexpected operations on the host."""
        return {name for seen in self.ranks for name in seen.others} - HOST_WORK

    @property
    def rounded_gradients(self) -> set[tuple[str, str, torch.dtype, int]]:
        """Reductions in less than float32, except those of activations of shape (bs, seq, ...)."""
        reductions = set().union(*(seen.reductions for seen in self.ranks))
        return {r for r in reductions if r[2].itemsize < 4 and not (r[0] in ("tensor", "context") and r[3] >= 3)}

    @property
    def single_messages(self) -> int:
        """Messages that are sent or received alone, not in a batch."""
        return sum(seen.single_messages for seen in self.ranks)

    @property
    def readbacks(self) -> list[str]:
        return [where for seen in self.ranks for where in seen.readbacks]


def config_of(options: Mapping[str, Any]) -> JobConfig:
    """A config from ``options``, values by "section.name", which override the file "job.config_file"."""
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in options.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    file = options.get("job.config_file")
    config = from_file(file) if file else JobConfig()
    return with_options(config, **sections)


def shipped_config(path: Path) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return the options, number of ranks and model sizes to simulate a file of ``train_configs/``.

    The number of ranks is that of "on N GPUs" or "on N or more GPUs" in its first line, otherwise 1. All layers are
    equal, and two per pipeline stage are simulated.
    """
    found = re.search(r"on (\d+) (?:or more )?GPUs", path.read_text().splitlines()[0])
    options: dict[str, Any] = {"job.config_file": str(path)}
    parallelism = config_of(options).parallelism
    stages, pipeline = parallelism.pipeline_parallel_layers_per_stage, parallelism.pipeline_parallel_degree
    if stages:
        options["parallelism.pipeline_parallel_layers_per_stage"] = (2,) * len(stages)
    layers = 2 * max(len(stages), 2 * pipeline) if pipeline > 1 else 2
    return options, int(found[1]) if found else 1, {"n_layers": layers}


def run(
    options: Mapping[str, Any],
    world_size: int,
    *,
    shape: Mapping[str, Any],
    device: str = "cuda",
    gpu: str = "h100-80",
    compare: bool = False,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
    allow_config_error: bool = False,
    steps: int = 2,
) -> Report:
    """Resolve and validate a config as ``train`` does, then simulate its representative ranks.

    Args:
        shape: model config fields that override those of the flavor.
        device: device of the fake tensors.
        gpu: name of the simulated GPU in ``plugins/planner/hardware.py``.
        compare: also simulate the last rank of the first stage, which differs from rank 0 in its coordinate on every
            axis, and compare all collectives of the two.
        fault: a context in which the simulation runs.
        allow_config_error: report a ConfigError instead of raising it.
        steps: the number of steps; the second begins with the optimizer states that the first creates.
    """
    try:
        config = config_of({**options, "estimate.world_size": world_size})
        model = replace(build_model_config(config.model, None, config.training.seq_len), **shape)
        config, degrees = resolve_and_check(config, model, GPUS[gpu])
    except ConfigError as error:
        if not allow_config_error:
            raise
        return Report([], [], str(error))
    last = world_size // degrees.pipeline - 1
    ranks = sorted({*representative_ranks(degrees), *([last] if compare else ())})
    with (
        fault(),
        patch.object(simulation, "StepRecorder", SynchronizationRecorder),
        patch.object(simulation, "STEPS", steps),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        records = {
            rank: simulate(
                config,
                model,
                degrees,
                rank,
                max_microbatches=2,  # further microbatches repeat the same operations
                device=torch.device(device, 0) if device == "cuda" else None,
            )
            for rank in ranks
        }
    seen = []
    for rank, record in records.items():
        step = record.recorder.steps[-1]
        collectives = Counter((o.axis, o.name, o.bytes) for o in step.operations if o.axis)
        flops = sum(o.flops for o in step.operations)
        recomputed = sum(o.flops for o in step.operations if o.phase == "recompute")
        recorder, peak = record.recorder, dict(zip(CATEGORIES, step.peak, strict=True))
        assert isinstance(recorder, SynchronizationRecorder)
        attention = {o.name for o in step.operations if "attention" in o.name}
        noted = recorder.readbacks, recorder.others, attention, recorder.reductions
        noted = *noted, recorder.products, recorder.sent, recorder.single_messages
        seen.append(RankRecord(rank, peak, flops, recomputed, collectives, *noted))
    operations = {
        rank: [o for step in record.recorder.steps for o in step.operations] for rank, record in records.items()
    }
    found = disagreements(operations)
    if compare:
        found.append(difference("rank 0", calls_of(operations[0]), f"rank {last}", calls_of(operations[last])))
    dtype: torch.dtype = getattr(torch, config.training.mixed_precision_param)
    return Report(seen, list(filter(None, found)), dtype=dtype)


def item_in_the_step() -> AbstractContextManager[Any]:
    """A fault: the host waits for the gradient norm."""
    call = TrainStep.__call__

    def waiting(step: TrainStep, *args: Any) -> Any:
        loss, norm = call(step, *args)
        assert float(norm) >= 0
        return loss, norm

    return patch.object(TrainStep, "__call__", waiting)
