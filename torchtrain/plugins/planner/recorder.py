"""Dispatch mode that records the memory, FLOPs and collectives of training steps, also on fake tensors."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.mesh import local
from torchtrain.plugins.planner.allocator import Allocation
from torchtrain.plugins.planner.operations import (
    ALLOCATIONS,
    VIEWS,
    Operation,
    collective,
    moved_bytes,
    nbytes,
    tensors_in,
    work_of,
)
from torchtrain.plugins.planner.torch_internals import FakeTensor, FSDPParamGroup, TorchDispatchMode

aten = torch.ops.aten
CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
OFFLOADED = CATEGORIES[:3]  # on the host with CPU offload
Sizes = tuple[int, ...]  # live bytes by category, in the order of CATEGORIES


class Action(NamedTuple):
    """A computation or a message of a pipeline schedule."""

    name: str
    """Name of its computation type in torch.distributed.pipelining."""
    stage: int
    """Index of the stage among the stages of this rank."""
    microbatch: int
    peer: int = 0
    """Of a message, the pipeline rank of the peer minus that of this rank."""


class MemorySnapshot(NamedTuple):
    """Live bytes after an allocation or a free."""

    phase: str
    module: str
    sizes: Sizes
    stream: int
    """Index of the stream of the allocation or free."""
    stream_bytes: int
    """Live bytes that were allocated on that stream."""


@dataclass
class StepRecord:
    """Record of one training step."""

    operations: list[Operation] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    """For each microbatch, the index in ``operations`` at which it begins."""
    chunks: dict[int, Action] = field(default_factory=dict)
    """The computations of a pipeline, by the index in ``operations`` at which they begin."""
    received: Counter[int] = field(default_factory=Counter)
    """Number of received messages by the global rank of the peer."""
    timeline: list[MemorySnapshot] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    @property
    def peak(self) -> Sizes:
        """Live bytes by category at the moment with the most live bytes."""
        return max((moment.sizes for moment in self.timeline), key=sum)

    @property
    def live_at_end(self) -> dict[str, int]:
        """Live bytes by category at the end of the step."""
        return dict(zip(CATEGORIES, self.timeline[-1].sizes, strict=True))


@dataclass
class _Storage:
    """A live storage. Its size and category can change."""

    ref: weakref.ref[torch.UntypedStorage]
    category: str
    bytes: int = 0
    stream: int = 0
    """Index of the stream that it was allocated on."""


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operations, collectives and storages of training steps inside this mode.

    Args:
        device_type: only tensors of this device type are recorded.
        offloaded: whether parameters, gradients and optimizer states are on the host; they then count as 0 bytes.
    """

    def __init__(self, device_type: str, *, offloaded: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.offloaded = offloaded
        self.axes: Mapping[str, str] = {}
        """Name of the mesh axis by process group name."""
        self.live_bytes: Counter[str] = Counter()  # by category
        self.streams: dict[int, int] = {}  # index of each stream, in the order of first use
        self.stream_bytes: Counter[int] = Counter()
        """Live bytes by the stream that they were allocated on."""
        self.storages: dict[int, _Storage] = {}
        self.steps: list[StepRecord] = []
        self.record = StepRecord()
        # Attributes that callers set while they know more than the operations show; see ``labeled``.
        self.category = ""  # of new storages; "" derives it from the phase
        self.phase_override = ""  # "" derives the phase from autograd's state
        self.module = ""
        self.paused = False
        self.fsdp = False
        self.fused_with_matmul = False

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that compiled code and higher-order operators dispatch their operations to this mode."""
        return True

    @property
    def phase(self) -> str:
        """forward, loss, backward, recompute (of activation checkpointing) or update."""
        if self.phase_override:
            return self.phase_override
        if torch._C._current_autograd_node() is None:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    @contextmanager
    def labeled(self, **values: Any) -> Iterator[None]:
        """Context manager that sets attributes of this recorder to ``values``, and restores them."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    # Memory

    @torch.no_grad()  # otherwise autograd would keep what ``local`` returns
    def categorize(self, tensors: Any, category: str) -> None:
        """Move existing ``tensors`` to ``category``, and start tracking those that are not tracked yet."""
        for tensor in map(local, tensors_in(tensors)):
            self._track(tensor, category)
            entry = self.storages.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.category != category:
                if self.offloaded and category in OFFLOADED:
                    self._resize(entry, 0)
                self.live_bytes[entry.category] -= entry.bytes
                self.live_bytes[category] += entry.bytes
                entry.category = category
                self._snapshot(entry.stream)

    def _track(self, tensor: Tensor, category: str = "") -> None:
        """Track the storage of ``tensor`` until it is freed. By default, its category follows from the phase."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages or tensor.device.type != self.device_type:
            return
        by_phase = {"forward": "activations", "loss": "activations", "update": "optimizer"}
        category = category or self.category or by_phase.get(self.phase, "temporary")
        entry = _Storage(weakref.ref(storage, lambda _: self._freed(key, entry)), category)
        self.storages[key] = entry
        on_host = self.offloaded and (category in OFFLOADED or self.phase_override == "update")
        self._resize(entry, 0 if on_host else storage.nbytes())

    def _freed(self, key: int, entry: _Storage) -> None:
        if self.storages.get(key) is entry:
            del self.storages[key]
        self._resize(entry, 0)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record that ``storage`` is resized to ``size`` bytes, as FSDP does to free unsharded parameters."""
        if entry := self.storages.get(storage._cdata):
            self._resize(entry, size)

    def _resize(self, entry: _Storage, size: int) -> None:
        """Set the size of ``entry`` in bytes; 0 frees it."""
        if entry.bytes:
            self.record.allocations.append(Allocation(id(entry), 0, entry.stream))
            self.stream_bytes[entry.stream] -= entry.bytes
        if size:
            stream = torch.get_device_module(self.device_type).current_stream()
            entry.stream = self.streams.setdefault(id(stream), len(self.streams))
            self.record.allocations.append(Allocation(id(entry), size, entry.stream))
            self.stream_bytes[entry.stream] += size
        self.live_bytes[entry.category] += size - entry.bytes
        entry.bytes = size
        self._snapshot(entry.stream)

    def _snapshot(self, stream: int) -> None:
        sizes = tuple(self.live_bytes[category] for category in CATEGORIES)
        self.record.timeline.append(MemorySnapshot(self.phase, self.module, sizes, stream, self.stream_bytes[stream]))

    def record_operation(self, name: str, **values: Any) -> None:
        """Record an operation in the current phase and module; ``values`` are further fields of ``Operation``."""
        self.record.operations.append(Operation(name, self.phase, self.module, **values))

    def record_host_copy(self, name: str, group: FSDPParamGroup) -> None:
        """Record the copies of this rank's float32 shards of ``group`` between host and device."""
        size = sum(parameter._sharded_param_data.nbytes for parameter in group.fsdp_params)
        with self.labeled(module=group._module_fqn or ""):
            self.record_operation(name, bytes=size, axis="host", fsdp=True)

    def end_step(self) -> None:
        """Append the record of this step to ``steps``, and begin a new one."""
        self.steps.append(self.record)
        self.record = StepRecord()
        self._snapshot(0)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # a fast path: more than half of all calls are this one
        if self.paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if any(
            hasattr(t, "__torch_dispatch__") and t.__name__ not in ("FakeTensor", "Parameter", "Tensor") for t in types
        ):
            return NotImplemented  # DTensor and other subclasses dispatch again with their inner tensors
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.0 if args[0].dtype.is_floating_point else 0
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # for example run_and_save_rng_state(op, *args)
            inner = next((i for i, a in enumerate(args) if isinstance(a, torch._ops.OpOverload)), None)
            if inner is not None:
                self._record(args[inner], args[inner + 1 :], kwargs, out)
            elif str(func).startswith("flex_attention"):
                self._record_compute(func, str(func), args, kwargs, nbytes((args[:3], self._track_all(out))))
        else:
            self._record(func, args, kwargs, out)
        return out

    def record_fused_kernel(self, result: Any, moved: int) -> None:
        """Record that a fused kernel writes ``result``, and if it is the last, the ``moved`` bytes of the kernel."""
        self._track_all(result)
        if moved:
            self.record_operation("fused", bytes=moved)

    def _track_all(self, result: Any) -> list[Tensor]:
        outputs = tensors_in(result)
        for tensor in outputs:
            self._track(tensor)
        return outputs

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = self._track_all(out)
        found = collective(func, args, out)
        if found is not None:
            name, group, size = found
            ranks = tuple(dist.get_process_group_ranks(group))
            peer = ranks[args[2]] if name in ("send", "recv") else None
            if name == "recv" and peer is not None:
                self.record.received[peer] += 1
            axis = self.axes.get(group.group_name, "all")
            fused = self.fused_with_matmul
            self.record_operation(
                name, bytes=size, axis=axis, ranks=ranks, peer=peer, fsdp=self.fsdp, fused_with_matmul=fused
            )
            return
        if func.is_view or func.overloadpacket in VIEWS or func.namespace not in ("aten", "fsdp"):
            return
        if func._opname not in ALLOCATIONS:
            self._record_compute(func, func._opname, args, kwargs, moved_bytes(func, args, kwargs, outputs))

    def _record_compute(self, func: Any, name: str, args: Any, kwargs: Any, moved: int) -> None:
        inputs = tensors_in((args, kwargs))
        dtype = inputs[0].dtype if inputs else torch.float32
        self.record_operation(name, dtype=dtype, bytes=moved, **work_of(func, name, args, kwargs))
