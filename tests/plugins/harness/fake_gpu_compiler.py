"""Compile for a GPU without a GPU: Inductor generates kernels, Triton and ptxas compile them, and none of them runs.

``install`` extends ``fake_cuda.install``: Inductor and Triton see the properties of a real GPU. ``capture`` records the
graphs and kernels that they compile. A captured graph runs as its aten operations, on fake tensors. Use this module in
a separate process (``fake_cuda.Worker``), because most of its patches cannot be undone.
"""

import copy
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_cuda


@dataclass(frozen=True)
class Properties:
    """What ``torch.cuda.get_device_properties`` returns, as far as Inductor reads it."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int
    """Bytes of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities)."""
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int = 48 << 10
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    is_integrated: bool = False
    gcnArchName: str = ""
    pci_bus_id: int = 0
    uuid: str = "none"


DEVICES = {
    "a100-80": Properties("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 << 30, 40 << 20, 163 << 10, 164 << 10),
    "h100-80": Properties("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 << 30, 50 << 20, 227 << 10, 228 << 10),
    "b200": Properties("NVIDIA B200", 10, 0, 148, 180 << 30, 126 << 20, 227 << 10, 228 << 10),
}


# Operations of asynchronous tensor parallelism, and the collective that each contains.
FUSED_COLLECTIVES = {
    "fused_all_gather_matmul": "all_gather_into_tensor",
    "fused_all_gather_scaled_matmul": "all_gather_into_tensor",
    "fused_matmul_reduce_scatter": "reduce_scatter_tensor",
    "fused_scaled_matmul_reduce_scatter": "reduce_scatter_tensor",
}


@dataclass(frozen=True)
class Kernel:
    """A compiled Triton kernel, from its binary (``cuobjdump --dump-resource-usage``) and its PTX."""

    name: str
    config: str
    target: str
    registers: int
    """Registers per thread, of 255."""
    spilled: int
    """Bytes of local memory per thread: registers that did not fit, and arrays that are indexed at run time."""
    shared: int
    """Bytes of shared memory per block, static and dynamic."""
    float64: int
    """Operations on float64 in the PTX."""


@dataclass(frozen=True)
class Launch:
    """A launch of generated code: a fused kernel, a library call, or a collective."""

    name: str
    generated: bool
    """Whether it is a Triton kernel."""
    bytes: int
    """Bytes that it reads and writes, as Inductor counts them: each element of each tensor once."""


@dataclass
class Graph:
    """A graph that Inductor compiled: the forward or the backward of a compiled function."""

    function: str
    """The function of torchtrain in which the graph begins."""
    backward: bool
    source: str
    planned_collectives: Counter[str]
    """Number of collectives by name in the graph before Inductor's passes."""
    launches: list[Launch]
    """All launches, in order."""
    least_bytes: int
    """Bytes of the inputs and outputs of the graph, each once."""
    assumed_bytes: int
    """Bytes of the generated kernels by the planner's model (``plugins/planner/compiled.py``)."""
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def generated_bytes(self) -> int:
        """Bytes that all Triton kernels read and write."""
        return sum(launch.bytes for launch in self.launches if launch.generated)

    @property
    def name(self) -> str:
        return f"{self.function} {'backward' if self.backward else 'forward'}"

    @property
    def call(self) -> str:
        """The host's part of the generated code: what is launched, in order."""
        return self.source.split("\ndef call(")[-1].split("\nclass Runner")[-1]

    @property
    def libraries(self) -> list[str]:
        """Calls of library kernels, collectives and fused collectives, in order."""
        return re.findall(r"(?:extern_kernels\.\w+|torch\.ops\.[\w.]+)(?=\()", self.call)

    @property
    def collectives(self) -> Counter[str]:
        """Number of collectives by name in the generated code, with those that are fused with matrix products."""
        names = re.findall(r"torch\.ops\._c10d_functional\.(\w+?)_?(?:_out)?\.default\(", self.call)
        for name, collective in FUSED_COLLECTIVES.items():
            names += [collective] * len(re.findall(rf"torch\.ops\.symm_mem\.{name}\.default\(", self.call))
        return Counter(name for name in names if name != "wait_tensor")

    @property
    def host_work(self) -> list[str]:
        """Lines that compute on the host, or wait for the device."""
        return re.findall(r".*(?:\.item\(|cpp_fused|_local_scalar_dense|synchronize\(|\.tolist\(|\.cpu\().*", self.call)


@dataclass
class Capture:
    graphs: list[Graph] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    """Reasons of graph breaks."""

    @property
    def kernels(self) -> list[Kernel]:
        return [kernel for graph in self.graphs for kernel in graph.kernels]

    @property
    def spills(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.spilled]


def triton_version_problem() -> str:
    """Why kernels cannot be compiled here, or "": torch works with one minor version of Triton."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    if torch.version.cuda is not None and not torch.cuda.is_available():
        return "torch for CUDA needs the driver, also for a simulated GPU: take a CPU build"
    own, minor = version("torch"), lambda text: ".".join(text.split(".")[:2])
    wanted = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7"}.get(minor(own))
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "needs triton: pip install -e '.[dev]' -c constraints.txt, on Linux and x86-64"
    return "" if minor(found) == wanted else f"triton {found} is not the version of torch {own}"


def install(library: Path, name: str = "h100-80") -> None:
    """Give this process, which must not have imported torch yet, a fake GPU of ``DEVICES`` to compile for."""
    properties = DEVICES[name]
    fake_cuda.CAPABILITY = (properties.major, properties.minor)
    # Triton's cache is kept between compilations, for kernels that are the same in several configs.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(library.parent / "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    fake_cuda.install(library)
    import torch
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config
    import torch._inductor.config as inductor
    from torch._subclasses.fake_tensor import FakeTensorMode

    # A cached graph would not be captured.
    inductor.fx_graph_cache = False
    inductor.autotune_local_cache = False
    torch._functorch.config.enable_autograd_cache = False
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "get_device_properties": lambda device=None: properties,  # noqa: ARG005
        "get_device_name": lambda device=None: properties.name,  # noqa: ARG005
        "is_bf16_supported": lambda including_emulation=True: True,  # noqa: ARG005
        "_exchange_device": lambda device: 0,  # noqa: ARG005
        "_maybe_exchange_device": lambda device: 0,  # noqa: ARG005
        "memory_allocated": lambda device=None: 0,  # noqa: ARG005
        "mem_get_info": lambda device=None: (properties.total_memory,) * 2,  # noqa: ARG005
    }
    for attribute, value in values.items():
        setattr(torch.cuda, attribute, value)
    # The interface has copied the functions of torch.cuda.
    for attribute in ("current_device", "set_device", "device_count", "stream", "current_stream", "synchronize"):
        setattr(interfaces.CudaInterface, attribute, staticmethod(getattr(torch.cuda, attribute)))
    for attribute in ("get_device_properties", "is_bf16_supported", "memory_allocated"):
        setattr(interfaces.CudaInterface, attribute, staticmethod(getattr(torch.cuda, attribute)))
    for attribute in ("get_raw_stream", "exchange_device", "maybe_exchange_device"):
        setattr(interfaces.CudaInterface, attribute, staticmethod(lambda device: 0))  # noqa: ARG005
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined] # noqa: ARG005
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]
    torch.version.cuda = torch.version.cuda or "13.0"
    # Pattern matching creates small tensors on the device, which must stay fake.
    FakeTensorMode.avoid_device_init = property(lambda mode: True)  # type: ignore[method-assign, assignment] # noqa: ARG005
    fold_constants_on_cpu()
    set_triton_driver(properties)


def fold_constants_on_cpu() -> None:
    """Inductor computes constants on the device of the graph."""
    import torch
    from torch._inductor.fx_passes import joint_graph
    from torch.utils._python_dispatch import TorchDispatchMode

    def on_cpu(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*map(on_cpu, args), **{key: on_cpu(value) for key, value in (kwargs or {}).items()})

    deduce = joint_graph.UniformValueConstantFolder._deduce_value

    def deduce_on_cpu(folder: Any, node: Any) -> Any:
        with OnCpu():
            return deduce(folder, node)

    joint_graph.UniformValueConstantFolder._deduce_value = deduce_on_cpu


def set_triton_driver(properties: Properties) -> None:
    """Let Triton compile for the GPU, with a driver that loads nothing."""
    import torch
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utilities:
        def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002
            return {
                "max_shared_mem": properties.shared_memory_per_block_optin,
                "multiprocessor_count": properties.multi_processor_count,
                "max_num_regs": properties.regs_per_multiprocessor,
                "warpSize": properties.warp_size,
            }

    class Driver:
        utils = Utilities()

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 10 * properties.major + properties.minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any = None) -> int:  # noqa: ARG002
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def is_active(self) -> bool:
            return True

    driver.set_active(Driver())
    driver._default = Driver()
    triton_helpers.set_driver_to_gpu = lambda: None
    heuristics: Any = triton_heuristics
    heuristics.CachingAutotuner._dynamic_scale_rblock = lambda tuner: None  # noqa: ARG005
    heuristics.StaticTritonCompileResult.can_statically_launch = staticmethod(lambda *_, **__: None)


def compiled_kernel(name: str, config: Any, binary: Any) -> Kernel:
    import triton

    ptx = binary.asm["ptx"]
    found = resources(binary.asm["cubin"], Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    return Kernel(
        name=name,
        config=" ".join(f"{key}={value}" for key, value in config.kwargs.items())
        + f" warps={config.num_warps} stages={config.num_stages}",
        target=re.findall(r"\.target (\w+)", ptx)[0],
        registers=found["REG"],
        spilled=found.get("LOCAL", 0) + found.get("STACK", 0),
        shared=max(binary.metadata.shared, found.get("SHARED", 0)),
        float64=len(re.findall(r"\.f64\b", ptx)),
    )


@cache
def resources(cubin: bytes, cuobjdump: Path) -> dict[str, int]:
    file = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "kernel.cubin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(cubin)
    text = subprocess.run([cuobjdump, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def launch_of(node: Any) -> Launch:
    """Describe a node of Inductor's schedule, after code was generated for it."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    generated = not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode)
    return Launch(node.get_name(), generated, node.get_read_write_buffers_sizes())


@contextmanager
def capture(called: Callable[[str, list[Any], Any], None] = lambda *_: None) -> Iterator[Capture]:
    """Record the graphs and kernels that are compiled within this context. Graphs run as their aten operations.

    ``called`` gets the generated code, the inputs and the outputs of each call of a graph.
    """
    import torch._inductor.compile_fx as compile_fx
    from torch._dynamo.utils import counters
    from torch._inductor.fx_passes import micro_pipeline_tp
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from torchtrain.plugins.planner.compiled import boundary_bytes, fused_kernels

    captured, kernels, launches = Capture(), [], []

    def make_launchers(tuner: Any) -> None:
        name = tuner.inductor_meta.get("kernel_name") or tuner.fn.__name__
        kernels.extend(compiled_kernel(name, result.config, result.kernel) for result in tuner.compile_results)
        tuner.launchers = [lambda *_, **__: None]

    generate = GraphLowering.codegen

    def generate_and_count(graph: Any) -> Any:
        result = generate(graph)
        launches.extend(map(launch_of, graph.scheduler.nodes))
        return result

    compile_inner = compile_fx.compile_fx_inner

    def compile_and_record(module: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        operations = copy.deepcopy(module)  # Inductor's passes change the graph
        compiled = compile_inner(module, inputs, *args, **options)
        source = getattr(compiled, "source_code", None)
        if source is not None:
            backward = bool(options.get("is_backward"))
            name, planned = first_function(operations), collectives_in(operations)
            least, assumed = boundary_bytes(operations), sum(k.bytes for k in fused_kernels(operations.graph))
            captured.graphs.append(
                Graph(name, backward, source, planned, list(launches), least, assumed, list(kernels))
            )
            compiled.current_callable = boxed_interpreter(operations, partial(called, source))
        kernels.clear()
        launches.clear()
        return compiled

    with (
        patch.object(CachingAutotuner, "_make_launchers", make_launchers),
        patch.object(GraphLowering, "codegen", generate_and_count),
        # Asynchronous tensor parallelism is for NCCL, which a CPU build of torch does not have.
        patch.object(micro_pipeline_tp, "fuse_all_gather_matmul", with_nccl(micro_pipeline_tp.fuse_all_gather_matmul)),
        patch.object(
            micro_pipeline_tp, "fuse_matmul_reduce_scatter", with_nccl(micro_pipeline_tp.fuse_matmul_reduce_scatter)
        ),
        replaced_everywhere(compile_fx, "compile_fx_inner", compile_and_record),
    ):
        counters.clear()
        yield captured
        captured.breaks = list(counters["graph_break"])


def with_nccl(function: Callable[[Any], None]) -> Callable[[Any], None]:
    import torch

    def call(argument: Any) -> None:
        with patch.object(torch.distributed, "is_nccl_available", lambda: True):
            function(argument)

    return call


def collectives_in(module: Any) -> Counter[str]:
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    names = [t._opname for t in targets if getattr(t, "namespace", "") == "_c10d_functional"]
    return Counter(name.rstrip("_") for name in names if name != "wait_tensor")


def first_function(module: Any) -> str:
    """The first function of torchtrain in the stack traces of a graph, as "file.function"."""
    traces = "".join(node.meta.get("stack_trace") or "" for node in module.graph.nodes)
    found = re.search(r'torchtrain/(?:\w+/)*(\w+)\.py", line \d+, in (\w+)', traces)
    return ".".join(found.groups()) if found else "?"


def boxed_interpreter(module: Any, called: Callable[[list[Any], Any], None]) -> Callable[[list[Any]], Any]:
    import torch

    interpreter = torch.fx.Interpreter(module)

    def run(inputs: list[Any]) -> Any:
        try:
            outputs = interpreter.boxed_run(list(inputs))
            called(inputs, outputs)
            return outputs
        finally:
            interpreter.env = {}  # it would keep the results alive
            inputs.clear()

    return run


@contextmanager
def replaced_everywhere(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a function of ``module``, also where it is the default of an argument of the module's functions."""
    original = getattr(module, name)
    functions = [f for f in vars(module).values() if callable(f) and original in (getattr(f, "__defaults__", ()) or ())]
    defaults = {f: f.__defaults__ for f in functions}
    for function, before in defaults.items():
        function.__defaults__ = tuple(value if default is original else default for default in before)
    try:
        with patch.object(module, name, value):
            yield
    finally:
        for function, before in defaults.items():
            function.__defaults__ = before
