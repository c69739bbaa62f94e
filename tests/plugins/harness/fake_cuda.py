"""A process in which torch has a CUDA device that computes nothing, for fake tensors with ``device="cuda"``.

The C++ file of the same name registers the device, so that autograd runs on such tensors. This module replaces the
functions of ``torch.cuda`` that would call the driver. Both change the whole process, and the C++ library must be
loaded before torch is imported. Therefore ``Worker`` starts a separate process.
"""

import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("g++")
CAPABILITY = (9, 0)
OWN_KERNELS = ("silu_backward", "_fused_rms_norm")


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def compile_library(folder: Path) -> Path:
    """Compile the C++ file, and copy the library into ``folder``.

    It is compiled once in a test session, in which each pytest-xdist worker has a folder, with one for each module.
    """
    assert COMPILER is not None, "needs g++"
    session = folder.parent.parent if "PYTEST_XDIST_WORKER" in os.environ else folder.parent
    compiled, torch = session / "fake_cuda.so", torch_folder()
    flags = ["-shared", "-fPIC", "-O0", "-w", "-std=c++20", f"-I{torch / 'include'}"]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    with FileLock(f"{compiled}.lock"):
        if not compiled.exists():
            subprocess.run([COMPILER, *flags, "-o", compiled, SOURCE, *links], check=True)
    return Path(shutil.copy(compiled, folder))


class Worker:
    """A process with a fake GPU. It runs the functions that it is given one after the other."""

    def __init__(self, folder: Path, initializer: Callable[..., None] | None = None, *args: Any):
        """``folder``: where the compiled library is written; ``initializer``: called with it and ``args``."""
        arguments = (compile_library(folder), *args)
        spawn = multiprocessing.get_context("spawn")
        self.process = ProcessPoolExecutor(1, spawn, initializer or install, arguments)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``function``, which must be picklable, in the worker. An exception is raised here as AssertionError."""
        result, error = self.process.submit(_call, function, args, options).result()
        if error:
            raise AssertionError(error)
        return result

    def close(self) -> None:
        self.process.shutdown()


def _call(function: Callable[..., Any], args: Any, options: Any) -> tuple[Any, str]:
    try:
        return function(*args, **options), ""
    except Exception as error:  # many exceptions cannot be pickled
        stack = "".join(traceback.format_tb(error.__traceback__)[-6:])
        return None, f"{type(error).__name__}: {str(error)[:1000]}\n{stack}"


def install(library: Path) -> None:
    """Give this process, which must not have imported torch yet, a fake GPU."""
    libraries = torch_folder() / "lib"
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    own = ctypes.CDLL(str(library))
    import torch
    import torch._functorch.config

    own.register_device()
    RUNTIME.connect(own)
    torch.set_num_threads(1)
    for name, value in torch_cuda_functions().items():
        setattr(torch.cuda, name, value)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]
    # A compiled block with activation checkpointing saves the random state: as a tensor, since there are no generators.
    torch._functorch.config.graphsafe_rng_functionalization = False
    # Without a CUDA kernel for these operators, autograd would decompose them.
    kernels = torch.library.Library("aten", "IMPL")
    for name in OWN_KERNELS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            kernels.impl(name, _never, "CUDA")
    globals().update(_kernels=kernels)


@contextmanager
def cudnn() -> Iterator[None]:
    """Within this context, the GPU has cuDNN, whose attention kernel torch prefers."""
    RUNTIME.library.set_cudnn(True)
    try:
        yield
    finally:
        RUNTIME.library.set_cudnn(False)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("operators on fake tensors compute shapes only; no kernel may be called")


class Observer:
    """Its methods are called when the process uses streams and events; see ``observed``. These do nothing.

    A stream has a name, such as "stream 3 of cuda:1". The methods are called in the thread that uses the stream.
    """

    def recorded(self, event: int, stream: str) -> None:
        """``event`` was recorded on ``stream``."""

    def waits(self, stream: str, event: int) -> None:
        """``stream`` will wait for ``event``."""

    def synchronized(self, event: int) -> None:
        """This thread has waited for ``event``."""

    def used_current_device(self, what: str) -> None:
        """``what`` refers to the current device of this thread."""


class Runtime:
    """The CUDA runtime of this process: devices and streams of its threads, which the C++ library stores."""

    def __init__(self) -> None:
        self.library: Any = None  # set by ``install``
        self.observer = Observer()
        self.streams: dict[tuple[int, int], Stream] = {}  # by device and number
        self.numbers = count(1)
        self._callbacks: tuple[Any, ...] = ()  # ctypes requires that they are kept

    def connect(self, library: ctypes.CDLL) -> None:
        """Let ``library`` store the state of threads, and report autograd's events to the observer."""
        library.get_stream.restype = ctypes.c_int64
        library.get_stream.argtypes = [ctypes.c_int]
        library.set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._callbacks = (
            callback(lambda event, device, stream: self.observer.recorded(event, stream_name(device, stream))),
            callback(lambda event, device, stream: self.observer.waits(stream_name(device, stream), event)),
        )
        library.set_callbacks(*self._callbacks)
        self.library = library

    def current_device(self) -> int:
        """The device of this thread: 0 until it is set."""
        device: int = self.library.get_device()
        return device

    def index(self, device: Any, what: str) -> int:
        """The index of ``device``: of any of torch's ways to name one, or None for the current one of this thread."""
        if isinstance(device, str):
            _, _, number = device.partition(":")
            device = int(number) if number else None
        elif device is not None and not isinstance(device, int):
            device = device.index
        if device is None:
            self.observer.used_current_device(what)
            return self.current_device()
        return int(device)

    def stream(self, device: int, number: int) -> "Stream":
        """The only object of a stream. Number 0 is the default stream of the device."""
        if (device, number) not in self.streams:
            self.streams[device, number] = Stream(device, number=number)
        return self.streams[device, number]

    def current_stream(self, device: Any = None) -> "Stream":
        index = self.index(device, "current_stream")
        return self.stream(index, self.library.get_stream(index))

    @contextmanager
    def entered(self, stream: "Stream | None") -> Iterator[None]:
        """``torch.cuda.stream``, which also changes the current device."""
        if stream is None:
            yield
            return
        library, device, index = self.library, self.current_device(), stream.device.index
        before = library.get_stream(index)
        library.set_device(index)
        library.set_stream(index, stream.number)
        try:
            yield
        finally:
            library.set_stream(index, before)
            library.set_device(device)

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams of a device."""
        index = self.index(device, "synchronize")
        for stream in [self.stream(index, 0), *list(self.streams.values())]:
            if stream.device.index == index:
                stream.synchronize()


RUNTIME = Runtime()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Context manager in which methods of ``observer`` are called for all threads; new streams count from 1."""
    RUNTIME.observer, before = observer, RUNTIME.observer
    RUNTIME.numbers = count(1)
    try:
        yield
    finally:
        RUNTIME.observer = before


def stream_name(device: int, number: int) -> str:
    return f"{f'stream {number}' if number else 'default stream'} of cuda:{device}"


class Stream:
    """A stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **_: Any):
        import torch

        self.device = torch.device("cuda", RUNTIME.index(device, "Stream"))
        self.priority = priority
        self.number = next(RUNTIME.numbers) if number is None else number
        self.name = stream_name(self.device.index, self.number)
        RUNTIME.streams[self.device.index, self.number] = self
        # FSDP reads these since PyTorch 2.15; the last one is the number of CUDA.
        self.stream_id, self.device_index, self.device_type = self.number, self.device.index, 1

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: "Event") -> None:
        RUNTIME.observer.waits(self.name, event.number)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event. All work is done at once, so it has always happened."""

    numbers = count(1)

    def __init__(self, *_: Any, **__: Any):
        self.number = next(self.numbers)

    def record(self, stream: Stream | None = None) -> None:
        RUNTIME.observer.recorded(self.number, (stream or RUNTIME.current_stream()).name)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or RUNTIME.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        RUNTIME.observer.synchronized(self.number)

    def query(self) -> bool:
        return True


def torch_cuda_functions() -> dict[str, Any]:
    """Replacements for the attributes of ``torch.cuda`` that need a driver, by name."""
    import torch

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": RUNTIME.entered,
        "current_stream": RUNTIME.current_stream,
        "default_stream": lambda device=None: RUNTIME.stream(RUNTIME.index(device, "default_stream"), 0),
        "current_device": RUNTIME.current_device,
        "set_device": lambda device: RUNTIME.library.set_device(RUNTIME.index(device, "set_device")),
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "synchronize": RUNTIME.synchronize,
        "get_device_name": lambda device=None: "a fake GPU",  # noqa: ARG005
        "get_device_capability": lambda device=None: CAPABILITY,  # noqa: ARG005
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),  # noqa: ARG005
        "set_rng_state": lambda state, device=None: None,  # noqa: ARG005
    }
