"""Find races between streams and threads on the fake GPU (``fake_cuda``), copies that block, and lost overlap.

``TORCH_CUDA_SANITIZER`` cannot run without a GPU, but its bookkeeping can: ``torch.cuda._sanitizer.EventHandler`` knows
which stream read or wrote what, and which streams have waited for it. ``StreamRecorder`` calls it. It also treats each
thread of the host and each process group as a stream: so it follows copies between host and device in both directions,
and collectives that nobody has waited for.
"""

import queue
import re
import sys
import threading
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch._C._distributed_c10d as c10d
from fake_cuda import RUNTIME, Observer, Stream, observed, stream_name
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.cuda._sanitizer import Access, EventHandler, UnsynchronizedAccessError
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.plugins.planner.operations import ALLOCATIONS, VIEWS, tensors_in

aten = torch.ops.aten
FACTORY = re.compile("new_.*|.*_like")  # they read no values of their arguments
READBACKS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim")
COPIES = ("copy_", "_to_copy")


@dataclass
class Asynchronous:
    """A collective, or a copy on a stream of its own."""

    name: str
    stream: str
    number: int
    phase: str
    kernels: Counter[str] = field(default_factory=Counter)
    """Kernels of the default stream that may run at the same time: neither of the two waits for the other."""


@dataclass
class StreamReport:
    """What a ``StreamRecorder`` has found. All lists are empty in a correct program, except ``asynchronous``."""

    races: list[str] = field(default_factory=list)
    """Pairs of accesses to the same memory, of which one writes, and which nothing orders."""
    blocking_copies: list[str] = field(default_factory=list)
    """Copies to the device for which the host waits, and copies that only unpinned memory makes the host wait for."""
    wrong_devices: list[str] = field(default_factory=list)
    """Uses of a device in a thread whose current device is another one."""
    deferred_frees: list[str] = field(default_factory=list)
    """Calls of ``Tensor.record_stream``, whose memory is free only when the host sees that the stream has come so far.
    The host is a step ahead of the device, so such memory grows with the speed of the host."""
    asynchronous: list[Asynchronous] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    """Number of operations by stream or thread."""

    @property
    def faults(self) -> list[str]:
        return self.races + self.blocking_copies + self.wrong_devices


class StreamRecorder(Observer):
    """Records accesses to storages by stream, and the order of streams, threads and process groups.

    A kernel is ordered after what its stream, and the thread that launches it, have waited for. A race is a pair of
    accesses to a storage that are not ordered, and of which one writes. Memory of a freed storage is used again by the
    stream that it was allocated on, as by PyTorch's caching allocator: a new storage may be any freed one.

    It records inside of ``recording``.
    """

    def __init__(self, device: int):
        """``device``: index of the device that all threads must use."""
        self.device = device
        self.report = StreamReport()
        self.phase: Callable[[], str] = lambda: ""
        """The part of the step that asynchronous operations are recorded with."""
        self.axes: Mapping[str, str] = {}
        """Names for process groups."""
        self.paused: Callable[[], bool] = lambda: False
        """Whether operations are not part of the program."""
        self.reports_blocking_copies = True
        self.handler = EventHandler()
        self.order = self.handler.syncs
        self.lock = threading.RLock()  # weak references call back within any operation
        self.numbers = count(1)
        self.storages: dict[int, int] = {}  # numbers of the live storages, by address
        self.freed: deque[tuple[int, int]] = deque()  # address and number of the storages that are gone
        self.finished: dict[Any, int] = {}  # last operation of each stream that any thread has waited for
        self.allocated_on: dict[int, str] = {}  # stream by number of the storage
        self.recorded_on: dict[int, set[str]] = defaultdict(set)  # streams of Tensor.record_stream, by number
        self.reusable: dict[str, list[Access]] = defaultdict(list)  # accesses to freed storages, by their stream
        self.shared: set[int] = set()  # numbers of the storages in CPU memory that the device has accessed
        self.pinned: list[Tensor] = []
        self.unfinished: list[Asynchronous] = []
        self.default_stream = stream_name(device, 0)
        self.kernels: list[tuple[int, str]] = []  # of the default stream: number and name
        self.works: dict[int, tuple[Any, int, Any]] = {}  # by id: the work, its event, its tensors, which NCCL keeps
        self.functional: dict[int, int] = {}  # events of functional collectives by the number of their result
        self.events = count(10**9)  # of this class; those of streams are smaller

    # The order of streams and threads

    @property
    def thread(self) -> str:
        """The name of this thread. A thread of autograd works for the one that called backward, and that waits."""
        thread = threading.current_thread()
        return "thread MainThread" if isinstance(thread, threading._DummyThread) else f"thread {thread.name}"

    @property
    def stream(self) -> str:
        """The name of this thread's current stream of the device."""
        return RUNTIME.current_stream(self.device).name

    def recorded(self, event: int, stream: str) -> None:
        with self.lock:
            self.order.record_state(event, self.after_thread(stream))

    def waits(self, stream: str, event: int) -> None:
        with self.lock:
            self.order.stream_wait_for_event(self.after_thread(stream), event)

    def synchronized(self, event: int) -> None:
        with self.lock:
            self.order.stream_wait_for_event(self.thread, event)
            for stream, number in self.order.recorded_sync_states[event].items():
                self.finished[stream] = max(self.finished.get(stream, 0), number)

    def publish(self) -> int:
        """An event for all that this thread has done and waited for. Another thread that waits for it is after it."""
        with self.lock:
            event = next(self.events)
            self.order.record_state(event, self.thread)
            return event

    def after_thread(self, stream: str) -> str:
        """``stream``, whose next work is after all that this thread has done before."""
        self.order.stream_wait_for_event(stream, self.publish())
        return stream

    def used_current_device(self, what: str) -> None:
        if RUNTIME.current_device() != self.device:
            current = f"whose current device is cuda:{RUNTIME.current_device()}"
            self.report.wrong_devices.append(f"{what} in {self.thread}, {current}")

    # Storages

    def number_of(self, tensor: Tensor) -> int:
        """The number of the tensor's storage. A storage that is new was allocated on the current stream."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self.storages.get(address)
        if number is None:
            number = self.storages[address] = next(self.numbers)
            weakref.finalize(storage, self.freed.append, (address, number)).atexit = False
            if tensor.is_cuda:
                self.allocate(number)
        return number

    def allocate(self, number: int) -> None:
        """The storage may be in memory that was freed before, which other streams may still use."""
        stream = self.allocated_on[number] = self.stream
        self.handler.tensors_accessed.ensure_tensor_exists(number)
        self.reusable[stream] = [access for access in self.reusable[stream] if not self.is_after(stream, access)]
        self.handler.tensors_accessed.accesses[number].reads += self.reusable[stream]

    def free(self, number: int) -> None:
        info = self.handler.tensors_accessed.accesses.pop(number, None)
        stream, waited = self.allocated_on.pop(number, None), self.recorded_on.pop(number, set())
        if info is None or stream is None:
            return
        for access in [*info.reads, *([info.write] if info.write is not None else [])]:
            # The allocator waits for the streams of record_stream before it uses the memory again.
            is_done = any(self.is_after(own, access) for own in (stream, *waited))
            if not is_done and access.seq_num > self.finished.get(access.stream, 0):
                self.reusable[stream].append(access)

    def bury(self) -> None:
        """Free the storages that are gone."""
        while self.freed:
            address, number = self.freed.popleft()
            if self.storages.get(address) == number:
                del self.storages[address]
            self.free(number)

    def is_after(self, stream: str, access: Access) -> bool:
        return self.order.is_ordered_after(stream, access.seq_num, access.stream)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        with self.lock:
            self.recorded_on[self.number_of(tensor)].add(stream.name)
            self.report.deferred_frees.append(caller())

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """FSDP frees and allocates the memory of gathered parameters in this way."""
        with self.lock:
            self.bury()
            number = self.storages.get(storage._cdata)
            if number in self.allocated_on and size == 0:
                self.free(number)
            elif number is not None and number not in self.allocated_on:
                self.allocate(number)

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that ``tensor``, of which the memory is new, is pinned, and was filled by this thread."""
        with self.lock:
            self.pinned.append(tensor)
            self.shared.add(self.number_of(tensor))
            self.access(self.thread, "pin_memory", [], [tensor])
            return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        for pinned in self.pinned:
            if isinstance(pinned, FakeTensor) != isinstance(tensor, FakeTensor):
                continue
            if self.number_of(pinned) == self.number_of(tensor):
                return True
            # Real memory, also by another storage: ``pinned_like`` makes many of one.
            start = 0 if isinstance(pinned, FakeTensor) else pinned.data_ptr()
            if start and start <= tensor.data_ptr() < start + pinned.untyped_storage().nbytes():
                return True
        return False

    # Accesses

    def access(self, stream: str, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> int:
        """``stream`` executes an operation. Returns its number in the order of the program."""
        written = {self.number_of(tensor) for tensor in writes}
        read = {self.number_of(tensor) for tensor in reads} - written
        names: dict[int, list[str]] = defaultdict(list)
        errors: list[Any] = self.handler._handle_kernel_launch(stream, read, written, set(), name, names)  # type: ignore[arg-type]
        self.report.operations[stream] += 1
        self.report.races += sorted({describe(error) for error in errors} - set(self.report.races))
        return self.handler.seq_num

    def host_access(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor] = ()) -> None:
        """This thread reads and writes tensors in CPU memory."""
        with self.lock:
            self.bury()
            own = [[t for t in tensors if self.number_of(t) in self.shared] for tensors in (reads, writes)]
            if any(own):
                self.access(self.thread, name, *own)

    def kernel(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """The current stream executes an operation."""
        stream = self.after_thread(self.stream)
        number = self.access(stream, name, reads, writes)
        if stream == self.default_stream:
            self.kernels.append((number, name))
            for other in self.unfinished:
                if not self.order.is_ordered_after(stream, other.number, other.stream):
                    other.kernels[name] += 1
            self.unfinished = [
                o for o in self.unfinished if not self.order.is_ordered_after(stream, o.number, o.stream)
            ]
        elif name in COPIES and any(tensor.device.type == "cpu" for tensor in reads + writes):
            self.note_asynchronous("copy", stream, number)

    def note_asynchronous(self, name: str, stream: str, number: int) -> None:
        noted = Asynchronous(name, stream, number, self.phase())
        waited_for = self.order.current_sync_states[stream].get(self.default_stream, 0)
        first = bisect_right(self.kernels, (waited_for, chr(sys.maxunicode)))
        noted.kernels.update(kernel for _, kernel in self.kernels[first:])
        self.report.asynchronous.append(noted)
        self.unfinished.append(noted)

    def collective(self, name: str, group: str, reads: list[Tensor], writes: list[Tensor]) -> int:
        """Start a collective on the stream of its group, as NCCL does; returns the event of its end."""
        stream, start, end = f"NCCL {self.axes.get(group, group)}", next(self.events), next(self.events)
        self.order.record_state(start, self.after_thread(self.stream))
        self.order.stream_wait_for_event(stream, start)
        number = self.access(stream, name, reads, writes)
        self.order.record_state(end, stream)
        self.note_asynchronous(name, stream, number)
        return end

    def finish(self, work: Any) -> None:
        """The current stream waits for a collective, as ``Work.wait`` makes it."""
        with self.lock:
            if id(work) in self.works:
                self.waits(self.stream, self.works.pop(id(work))[1])

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._opname if isinstance(func, torch._ops.OpOverload) else str(func)
        if func.namespace == "c10d":
            self.record_collective(name, args, out)
            return
        if func.namespace == "_c10d_functional" and name == "wait_tensor":
            event = self.functional.pop(self.number_of(args[0]), None)
            if event is not None:
                self.waits(self.stream, event)
            return
        reads, writes = accesses(func, args, kwargs, out)
        if func.namespace == "_c10d_functional":
            event = self.collective(name, str(args[-1]), reads, writes)
            self.functional |= {self.number_of(tensor): event for tensor in writes}
            return
        if not any(tensor.is_cuda for tensor in reads + writes):
            self.host_access(name, reads, writes)
            return
        if name in ALLOCATIONS:
            for tensor in writes:
                self.number_of(tensor)
            return
        on_host = [tensor for tensor in reads + writes if not tensor.is_cuda]
        if name in COPIES and on_host:
            self.record_transfer(name, args, kwargs, reads, writes)
            return
        self.used_current_device(name)
        self.host_access(name, [tensor for tensor in reads if not tensor.is_cuda])
        self.kernel(name, [t for t in reads if t.is_cuda], [t for t in writes if t.is_cuda])
        if name in READBACKS:
            self.wait_for_stream()

    def record_transfer(self, name: str, args: Any, kwargs: Any, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A copy between host and device, for which the host waits unless it is non_blocking and the memory pinned."""
        non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        (in_cpu_memory,) = (tensor for tensor in reads + writes if not tensor.is_cuda)
        to_device = reads[-1].device.type == "cpu"
        if name == "_to_copy" and not to_device and non_blocking and not self.is_pinned(in_cpu_memory):
            self.pinned.append(in_cpu_memory)  # as torch does
        pinned = self.is_pinned(in_cpu_memory)
        if non_blocking and pinned:
            self.shared.add(self.number_of(in_cpu_memory))
            self.kernel(name, reads, writes)
            return
        self.kernel(name, reads, writes)
        self.wait_for_stream()
        # CUDA copies up to 64 KiB from unpinned memory without a wait; scalars are always as small.
        is_scalar = to_device and non_blocking and in_cpu_memory.ndim == 0
        if self.reports_blocking_copies and (non_blocking or to_device) and not is_scalar:
            kind = "from" if to_device else "to"
            why = "unpinned memory" if non_blocking else "memory without non_blocking"
            self.report.blocking_copies.append(f"{name} {kind} {why} in {caller()}")

    def wait_for_stream(self) -> None:
        event = next(self.events)
        self.recorded(event, self.stream)
        self.synchronized(event)

    def record_collective(self, name: str, args: Any, out: Any) -> None:
        values = [value for value in args if tensors_in(value)]
        tensors = tensors_in(values)
        if not any(tensor.is_cuda for tensor in tensors):
            return  # gloo's; also barriers
        outputs, inputs = tensors_in(values[0]), tensors_in(values[1:])
        if name == "send":
            outputs, inputs = [], outputs
        reads = inputs or outputs
        group = next(
            c10d.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)
        )
        event = self.collective(name.strip("_"), group.group_name, reads, outputs)
        work = c10d.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        self.works[id(work)] = work, event, tensors


def accesses(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads and writes, by its schema."""
    if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator
        return tensors_in((args, kwargs)), tensors_in(out)
    if func.is_view or func.overloadpacket in VIEWS:
        return [], []
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    is_factory = bool(FACTORY.fullmatch(func._opname))
    positional, by_name = func._schema.arguments[: len(args)], func._schema.arguments[len(args) :]
    bound = [*zip(positional, args, strict=True), *((a, kwargs[a.name]) for a in by_name if a.name in kwargs)]
    for argument, value in bound:
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors_in(value)
        elif not is_factory:
            reads += tensors_in(value)
    results = out if len(func._schema.returns) > 1 else (out,)
    for result, value in zip(func._schema.returns, results, strict=False):
        if result.alias_info is None:
            writes += tensors_in(value)
    return reads, writes


def describe(error: UnsynchronizedAccessError) -> str:
    """One line on a race: both accesses, and where the program makes the second one."""
    first, second = error.previous_access, error.current_access
    return f"{second.operator} on {second.stream} is not ordered after {first.operator} on {first.stream}"


def caller() -> str:
    """The innermost function of the package or of a test on the stack, as module.function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("torchtrain.", "test_")):
            return f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class RecordingMode(TorchDispatchMode):
    """Reports the operations of a thread to ``recorder``."""

    def __init__(self, recorder: StreamRecorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if func.namespace == "prim" or recorder.paused():
            return func(*args, **kwargs)
        if has_subclass(types):
            return NotImplemented  # DTensor and other subclasses dispatch again with their inner tensors
        is_pinned = bool(kwargs.get("pin_memory"))
        if is_pinned:
            kwargs = {**kwargs, "pin_memory": False}
        with recorder.lock:
            recorder.bury()
        out = func(*args, **kwargs)
        with recorder.lock:
            if is_pinned:
                recorder.pin(out)
            recorder.record(func, args, kwargs, out)
        return out


class FakeDevice(FakeTensorMode):
    """A mode of fake tensors that several threads may use.

    While it computes a shape, it takes tensors for meta tensors; here this is so in the thread that computes only.
    """

    def __init__(self) -> None:
        self.of_thread = threading.local()
        super().__init__(allow_non_fake_inputs=True)

    @property
    def in_kernel_invocation(self) -> bool:
        return getattr(self.of_thread, "in_kernel_invocation", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self.of_thread.in_kernel_invocation = value


class RealHost(TorchDispatchMode):
    """Executes operations on the fake GPU with fake tensors, and all others as usual.

    Copies to the host are ones. Those with non_blocking are zeros, by which the guard finds nothing wrong in a step.
    """

    def __init__(self, mode: FakeDevice, lock: Any):
        """``lock``: of all threads, because those of a mode must leave it in the order in which they entered it."""
        super().__init__()
        self.mode = mode
        self.lock = lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if has_subclass(types):
            return NotImplemented
        on_device = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_cuda]
        to = torch.device(kwargs.get("device") or "meta").type
        if not on_device and to != "cuda":
            return func(*args, **kwargs)
        name = func._opname
        if name == "_local_scalar_dense":
            return torch.ones((), dtype=on_device[0].dtype).item()
        if name == "_to_copy" and to == "cpu":
            value = 0 if kwargs.get("non_blocking") else 1
            return torch.full(on_device[0].shape, value, dtype=kwargs.get("dtype") or on_device[0].dtype)
        if name == "_to_copy" and not args[0].is_cuda and not args[0].is_meta:
            with self.lock, self.mode:
                return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        if name == "copy_" and not args[0].is_cuda:
            return args[0].zero_()
        with self.lock, self.mode:
            return func(*args, **kwargs)


def has_subclass(types: Iterable[Any]) -> bool:
    """Whether any of ``types`` dispatches its operations itself, as DTensor does."""
    return any(hasattr(t, "__torch_dispatch__") and t not in (FakeTensor, Tensor, torch.nn.Parameter) for t in types)


@contextmanager
def recording(recorder: StreamRecorder, device: FakeDevice | None = None) -> Iterator[StreamRecorder]:
    """Context manager that records what this thread does, and the threads that it starts.

    ``device``: executes operations on the fake GPU, while CPU tensors are real; None: the caller has entered a mode.
    """

    def modes() -> ExitStack:
        stack = ExitStack()
        if device is not None:
            stack.enter_context(RealHost(device, recorder.lock))
        stack.enter_context(RecordingMode(recorder))
        return stack

    with ExitStack() as patches:
        for name, replacement in ordered_threads(recorder, modes).items():
            owner, attribute = name
            patches.enter_context(patch.object(owner, attribute, replacement))
        for name, replacement in host_accesses(recorder).items():
            patches.enter_context(patch.object(Tensor, name, replacement))
        patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resizing(recorder)))
        for kind in {c10d.Work, getattr(c10d, "FakeWork", c10d.Work)}:
            patches.enter_context(patch.object(kind, "wait", waiting(recorder, kind.wait)))
        patches.enter_context(observed(recorder))
        if device is not None:  # torch.tensor creates a tensor in CPU memory, and copies it by an operation
            patches.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
            torch._C._set_only_lift_cpu_tensors(True)
        patches.enter_context(modes())
        yield recorder


def ordered_threads(recorder: StreamRecorder, modes: Callable[[], ExitStack]) -> dict[tuple[Any, str], Any]:
    """Replacements by which a thread is ordered after those that start it, end before it, or give it something."""
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
    set_result, set_exception, result = Future.set_result, Future.set_exception, Future.result
    published: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def publish(what: Any) -> None:
        published[what] = recorder.publish()

    def receive(what: Any) -> None:
        if what in published:
            recorder.synchronized(published[what])

    def publishing(function: Callable[..., Any]) -> Callable[..., Any]:
        def published_before(own: Any, *args: Any, **options: Any) -> Any:
            publish(own)
            return function(own, *args, **options)

        return published_before

    def receiving(function: Callable[..., Any]) -> Callable[..., Any]:
        def received_after(own: Any, *args: Any, **options: Any) -> Any:
            try:
                return function(own, *args, **options)
            finally:
                receive(own)

        return received_after

    def recorded_run(thread: threading.Thread) -> None:
        receive(thread)
        try:
            with modes():
                run(thread)
        finally:
            publish(thread)

    class OrderedQueue(queue.SimpleQueue):  # type: ignore[type-arg]
        def put(self, item: Any, *args: Any, **options: Any) -> None:
            super().put((recorder.publish(), item), *args, **options)

        def get(self, *args: Any, **options: Any) -> Any:
            event, item = super().get(*args, **options)
            recorder.synchronized(event)
            return item

        def put_nowait(self, item: Any) -> None:
            self.put(item, block=False)

        def get_nowait(self) -> Any:  # thread pools call it since Python 3.12
            return self.get(block=False)

    return {
        (threading.Thread, "start"): publishing(start),
        (threading.Thread, "run"): recorded_run,
        (threading.Thread, "join"): receiving(join),
        (Future, "set_result"): publishing(set_result),
        (Future, "set_exception"): publishing(set_exception),
        (Future, "result"): receiving(result),
        (queue, "SimpleQueue"): OrderedQueue,
    }


def host_accesses(recorder: StreamRecorder) -> dict[str, Any]:
    """Replacements of the methods of ``Tensor`` that access CPU memory without an operation."""
    tolist, numpy = Tensor.tolist, Tensor.numpy

    def recorded_tolist(tensor: Tensor) -> Any:
        on_host = tensor.cpu() if tensor.is_cuda else tensor
        recorder.host_access("tolist", [on_host])
        return tolist(on_host)

    def recorded_numpy(tensor: Tensor, **options: Any) -> Any:
        recorder.host_access("numpy", [tensor])
        return numpy(tensor, **options)

    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        recorder.used_current_device("pin_memory")
        return recorder.pin(tensor.clone())

    return {
        "tolist": recorded_tolist,
        "numpy": recorded_numpy,
        "pin_memory": pin_memory,
        "is_pinned": lambda tensor, *_: recorder.is_pinned(tensor),
        "record_stream": lambda tensor, stream: recorder.record_stream(tensor, stream),
    }


def resizing(recorder: StreamRecorder) -> Callable[..., Any]:
    resize = torch.UntypedStorage.resize_

    def recorded_resize(storage: torch.UntypedStorage, size: int) -> Any:
        recorder.resize(storage, size)
        return resize(storage, size)

    return recorded_resize


def waiting(recorder: StreamRecorder, wait: Callable[..., Any]) -> Callable[..., Any]:
    def recorded_wait(work: Any, *args: Any, **options: Any) -> Any:
        recorder.finish(work)
        return wait(work, *args, **options)

    return recorded_wait
