"""A process in which torch has a CUDA device that computes nothing, for fake tensors with ``device="cuda"``.

The C++ file of the same name registers the device, so that autograd runs on such tensors. This module replaces the
functions of ``torch.cuda`` that would call the driver. Both change the whole process, and the C++ library must be
loaded before torch is imported. Therefore ``Worker`` starts a separate process.
"""

import ctypes
import importlib.util
import multiprocessing
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    assert COMPILER is not None, "needs g++"
    library, torch = folder / "fake_cuda.so", torch_folder()
    flags = ["-shared", "-fPIC", "-O0", "-w", "-std=c++20", f"-I{torch / 'include'}"]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([COMPILER, *flags, "-o", library, SOURCE, *links], check=True)
    return library


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
    globals().update(_kernels=kernels, _library=own)


@contextmanager
def cudnn() -> Iterator[None]:
    """Within this context, the GPU has cuDNN, whose attention kernel torch prefers."""
    library: ctypes.CDLL = globals()["_library"]
    library.set_cudnn(True)
    try:
        yield
    finally:
        library.set_cudnn(False)


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("operators on fake tensors compute shapes only; no kernel may be called")


class Stream:
    """A stream on which nothing runs."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.device, self.priority = device, priority

    def wait_stream(self, stream: "Stream") -> None: ...
    def wait_event(self, event: "Event") -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()


class Event:
    def __init__(self, *_: Any, **__: Any): ...
    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def torch_cuda_functions() -> dict[str, Any]:
    """Replacements for the attributes of ``torch.cuda`` that need a driver, by name."""
    import torch

    streams = [Stream()]

    @contextmanager
    def stream(entered: Stream | None) -> Iterator[None]:
        streams.append(entered or streams[-1])
        try:
            yield
        finally:
            streams.pop()

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: streams[-1],  # noqa: ARG005
        "default_stream": lambda device=None: streams[0],  # noqa: ARG005
        "current_device": lambda: 0,
        "set_device": lambda device: None,  # noqa: ARG005
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: None,  # noqa: ARG005
        "get_device_name": lambda device=None: "a fake GPU",  # noqa: ARG005
        "get_device_capability": lambda device=None: CAPABILITY,  # noqa: ARG005
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),  # noqa: ARG005
        "set_rng_state": lambda state, device=None: None,  # noqa: ARG005
    }
