"""What a step on tensors without data would hold, compute and send: one dispatch mode that sees every operation."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.planning.allocator import Allocation
from torchtrain.planning.operations import (
    ALLOCATIONS,
    VIEWS,
    Operation,
    collective,
    flops_of,
    moved_bytes,
    nbytes,
    tensors_in,
)
from torchtrain.torch_internals import FakeTensor, FSDPParamGroup, TorchDispatchMode

aten = torch.ops.aten
KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
ON_HOST = KINDS[:3]  # under CPU offload
Sizes = tuple[int, ...]  # live bytes by kind, in the order of KINDS
# What a pipeline does, as torch's schedules call it, for which stage among those of the rank, for which microbatch.
Action = tuple[str, int, int]


class Moment(NamedTuple):
    """Live bytes when they changed."""

    phase: str
    module: str
    sizes: Sizes
    stream: int
    """On which something was allocated or freed."""
    on_stream: int
    """Live bytes that were allocated on it."""


@dataclass
class StepRecord:
    """What the ledger saw in one step."""

    operations: list[Operation] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    """The number of operations before each of them."""
    chunks: dict[int, Action] = field(default_factory=dict)
    """The computations of a pipeline, by the number of operations before each of them."""
    timeline: list[Moment] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    @property
    def peak(self) -> Sizes:
        """The moment with the most live bytes."""
        return max((moment.sizes for moment in self.timeline), key=sum)

    @property
    def kept(self) -> dict[str, int]:
        """Live bytes by kind at the end of the step."""
        return dict(zip(KINDS, self.timeline[-1].sizes, strict=True))


@dataclass
class _Storage:
    """A live storage: its size and kind may change."""

    ref: weakref.ref[torch.UntypedStorage]
    kind: str
    bytes: int = 0
    stream: int = 0
    """That it was allocated on."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts everything that happens inside it on tensors of ``device_type``.

    ``offloaded``: parameters, gradients and optimizer states lie on the host, and count for nothing.
    """

    def __init__(self, device_type: str, *, offloaded: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.offloaded = offloaded
        self.axes: Mapping[str, str] = {}
        """The name of the mesh's axis by group name."""
        self.live: Counter[str] = Counter()  # bytes by kind
        self.streams: dict[int, int] = {}  # numbered as they come
        self.on_stream: Counter[int] = Counter()
        """Live bytes by the stream that they were allocated on."""
        self.storages: dict[int, _Storage] = {}
        self.steps: list[StepRecord] = []
        self.record = StepRecord()
        self.kind = ""  # of what is allocated now, if it is known
        self.part = "forward"  # outside of autograd's nodes
        self.module = ""
        self.paused = False
        self.fsdp = False

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code and higher-order operators let such a mode see through them."""
        return True

    @property
    def phase(self) -> str:
        """forward, loss, backward, recompute (of activation checkpointing) or update."""
        if self.part != "forward":
            return self.part
        if torch._C._current_autograd_node() is None:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    @contextmanager
    def marking(self, **values: Any) -> Iterator[None]:
        """What is seen inside has these ``values`` of the ledger's attributes."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    # Memory

    def adopt(self, tensors: Any, kind: str) -> None:
        """Count ``tensors``, which exist already, or from now on, as of ``kind``."""
        for tensor in tensors_in(tensors):
            self._see(tensor, kind)
            entry = self.storages.get(tensor.untyped_storage()._cdata)
            if entry is not None and entry.kind != kind:
                if self.offloaded and kind in ON_HOST:
                    self._resize(entry, 0)
                self.live[entry.kind] -= entry.bytes
                self.live[kind] += entry.bytes
                entry.kind = kind
                self._look(entry.stream)

    def _see(self, tensor: Tensor, kind: str = "") -> None:
        """Count the storage of ``tensor`` until it is freed. By default its kind follows from the phase."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages or tensor.device.type != self.device_type:
            return
        by_phase = {"forward": "activations", "loss": "activations", "update": "optimizer"}
        kind = kind or self.kind or by_phase.get(self.phase, "temporary")
        entry = _Storage(weakref.ref(storage, lambda _: self._freed(key, entry)), kind)
        self.storages[key] = entry
        on_host = self.offloaded and (kind in ON_HOST or self.part == "update")
        self._resize(entry, 0 if on_host else storage.nbytes())

    def _freed(self, key: int, entry: _Storage) -> None:
        if self.storages.get(key) is entry:
            del self.storages[key]
        self._resize(entry, 0)

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        if entry := self.storages.get(storage._cdata):
            self._resize(entry, size)

    def _resize(self, entry: _Storage, size: int) -> None:
        """From now on ``entry`` has ``size`` bytes; 0 where it is freed."""
        if entry.bytes:
            self.record.allocations.append(Allocation(id(entry), 0, entry.stream))
            self.on_stream[entry.stream] -= entry.bytes
        if size:
            stream = torch.get_device_module(self.device_type).current_stream()
            entry.stream = self.streams.setdefault(id(stream), len(self.streams))
            self.record.allocations.append(Allocation(id(entry), size, entry.stream))
            self.on_stream[entry.stream] += size
        self.live[entry.kind] += size - entry.bytes
        entry.bytes = size
        self._look(entry.stream)

    def _look(self, stream: int) -> None:
        sizes = tuple(self.live[kind] for kind in KINDS)
        self.record.timeline.append(Moment(self.phase, self.module, sizes, stream, self.on_stream[stream]))

    def issue(self, name: str, **values: Any) -> None:
        """Record an operation here and now."""
        self.record.operations.append(Operation(name, self.phase, self.module, **values))

    def crossed(self, name: str, group: FSDPParamGroup) -> None:
        """Count the copies of what this rank holds of ``group``, in float32, between the host and the device."""
        size = sum(parameter._sharded_param_data.nbytes for parameter in group.fsdp_params)
        with self.marking(module=group._module_fqn or ""):
            self.issue(name, bytes=size, axis="host", fsdp=True)

    def end_step(self) -> None:
        self.steps.append(self.record)
        self.record = StepRecord()
        self._look(0)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # more than half of what comes here asks for it
        if self.paused or func.namespace == "prim":
            return func(*args, **kwargs)
        if any(
            hasattr(t, "__torch_dispatch__") and t.__name__ not in ("FakeTensor", "Parameter", "Tensor") for t in types
        ):
            return NotImplemented  # DTensor and its like: they come again with what they hold
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.0 if args[0].dtype.is_floating_point else 0
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator):  # such as run_and_save_rng_state(operation, *arguments)
            inner = next((i for i, a in enumerate(args) if isinstance(a, torch._ops.OpOverload)), None)
            if inner is not None:
                self._note(args[inner], args[inner + 1 :], kwargs, out)
            elif str(func).startswith("flex_attention"):
                self._add(func, str(func), args, kwargs, nbytes((args[:3], self._see_all(out))))
        else:
            self._note(func, args, kwargs, out)
        return out

    def wrote(self, result: Any, read_bytes: int) -> None:
        """Count a fused kernel that has read ``read_bytes`` and written ``result``."""
        self.issue("fused", bytes=read_bytes + nbytes(self._see_all(result)))

    def _see_all(self, result: Any) -> list[Tensor]:
        outputs = tensors_in(result)
        for tensor in outputs:
            self._see(tensor)
        return outputs

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = self._see_all(out)
        found = collective(func, args, out)
        if found is not None:
            name, group, size = found
            ranks = tuple(dist.get_process_group_ranks(group))
            peer = ranks[args[2]] if name in ("send", "recv") else None
            axis = self.axes.get(group.group_name, "all")
            self.issue(name, bytes=size, axis=axis, ranks=ranks, peer=peer, fsdp=self.fsdp)
            return
        if func.is_view or func.overloadpacket in VIEWS or func.namespace not in ("aten", "fsdp"):
            return
        if func._opname not in ALLOCATIONS:
            self._add(func, func._opname, args, kwargs, moved_bytes(func, args, kwargs, outputs))

    def _add(self, func: Any, name: str, args: Any, kwargs: Any, moved: int) -> None:
        inputs = tensors_in((args, kwargs))
        dtype = inputs[0].dtype if inputs else torch.float32
        flops, share = flops_of(func, name, args)
        self.issue(name, flops=flops, dtype=dtype, bytes=moved, share=share)
