"""Run the code that Inductor generated for a GPU on CPU tensors: its Triton kernels by Triton's interpreter.

``Program`` is what ``lowered_functions.record`` returns. Use ``run`` in a separate process (``Interpreter``), because
Triton reads TRITON_INTERPRET when it is imported. Library kernels run as the CPU kernels of the same aten operation.

``correct_interpreter`` changes four things in the interpreter of Triton 3.7: it truncates float32 to bfloat16, where a
GPU rounds to the nearest even; ``tl.dot`` multiplies the bit patterns of bfloat16 as integers; so does arithmetic in
bfloat16, which generated code does not use and which is an error now; and it has no libdevice.
"""

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True)
class View:
    """A tensor of a program: part of a storage, which is numbered."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Call:
    """A call of a compiled graph. Inputs that are not tensors are themselves, outputs that are not tensors are None."""

    source: str
    inputs: Sequence[Any]
    outputs: Sequence[View | None]


@dataclass
class Program:
    """The compiled graphs that a function called, in order, and where its inputs and results are stored."""

    calls: list[Call] = field(default_factory=list)
    inputs: dict[str, View] = field(default_factory=dict)
    results: dict[str, View] = field(default_factory=dict)


@dataclass(frozen=True)
class Executed:
    results: Mapping[str, Any]
    launches: Counter[str]
    """Number of launches of each Triton kernel."""


class Interpreter:
    """A process that runs programs on the CPU."""

    def __init__(self) -> None:
        self.process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), install)

    def run(self, program: Program, tensors: Mapping[str, Any], configuration: int) -> Executed:
        return self.process.submit(run, program, tensors, configuration).result()

    def close(self) -> None:
        self.process.shutdown()


def install() -> None:
    """Prepare this process, which must not have imported triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined] # noqa: ARG005
    torch.cuda._DeviceGuard = NoGuard  # type: ignore[misc, assignment]
    torch.cuda.set_device = lambda device: None  # noqa: ARG005

    correct_interpreter()
    globals()["_kernels"] = attention_on_cpu()


class NoGuard:
    def __init__(self, device: int): ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def correct_interpreter() -> None:
    import numpy as np
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from triton.runtime import interpreter

    convert, dot, reduce = (
        interpreter._convert_float,
        interpreter.InterpreterBuilder.create_dot,
        interpreter.ReduceOps.apply_impl,
    )

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return values.astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16:
            bits = np.ascontiguousarray(values).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
        return convert(values, source, target, rounding)

    def in_float32(handle: Any) -> Any:
        if handle.get_element_ty() != tl.bfloat16:
            return handle
        values = convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(builder, in_float32(a), in_float32(b), *args)  # products of bfloat16 are exact in float32

    def without_bfloat16(method: Any) -> Any:
        def call(builder: Any, *args: Any) -> Any:
            if any(isinstance(x, interpreter.TensorHandle) and x.get_element_ty() == tl.bfloat16 for x in args):
                raise NotImplementedError("Triton's interpreter cannot compute in bfloat16")
            return method(builder, *args)

        return call

    def apply_reduction(operation: Any, values: Any) -> Any:
        """The reductions of Inductor that propagate NaN, as functions of NumPy that do: element by element is slow."""
        functions = {triton_helpers.maximum: np.max, triton_helpers.minimum: np.min}
        if operation.combine_fn in functions:
            return operation.min_max(values[0], val_reduce_op=functions[operation.combine_fn])
        return reduce(operation, values)

    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = create_dot
    for name in ("binary_op", "unary_op", "create_fma"):
        method = getattr(interpreter.InterpreterBuilder, name)
        setattr(interpreter.InterpreterBuilder, name, without_bfloat16(method))
    interpreter.ReduceOps.apply_impl = apply_reduction
    triton_helpers.libdevice = Libdevice()
    triton_helpers.set_driver_to_gpu = lambda: None
    np.seterr(all="ignore")  # masked elements may have any value


class Libdevice:
    """The functions of libdevice that generated code calls, computed by NumPy."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import numpy as np
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle, interpreter_semantic

        names = {"pow": "power", "nearbyint": "rint", "mul_rn": "multiply"}
        function = getattr(np, names.get(name, name)) if name != "rsqrt" else lambda x: 1 / np.sqrt(x)

        def call(*args: Any) -> Any:
            tensors = [interpreter_semantic.to_tensor(x) for x in args]
            values = function(*(x.handle.data for x in tensors))
            scalar = tl.int1 if values.dtype == bool else tensors[0].dtype
            shape = tensors[0].shape
            return tl.core.tensor(TensorHandle(values, scalar), tl.block_type(scalar, shape) if shape else scalar)

        return call


def attention_on_cpu() -> Any:
    """Register CPU kernels of a GPU's attention operations, with the layouts of the GPU's."""
    import torch

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def by_token(x: Any) -> Any:
        return x.transpose(1, 2).contiguous().transpose(1, 2)  # (bs, heads, seq, head_dim), stored by token

    def repeated(x: Any, heads: int) -> Any:
        return x.repeat_interleave(heads // x.shape[1], dim=1)

    def summed(grad: Any, heads: int) -> Any:
        return grad.unflatten(1, (heads, -1)).float().sum(dim=2).to(grad.dtype)

    def attend(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
        out, logsumexp = forward(q, *(repeated(x, q.shape[1]) for x in (k, v)), 0.0, causal, scale=scale)
        return by_token(out), logsumexp.float().contiguous()

    def differentiate(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool, scale: float | None) -> Any:
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        keys, values = (repeated(x, q.shape[1]) for x in (k, v))
        dq, dk, dv = backward(grad, q, keys, values, out, lse, 0.0, causal, scale=scale)
        return by_token(dq), by_token(summed(dk, k.shape[1])), by_token(summed(dv, k.shape[1]))

    def flash(q: Any, k: Any, v: Any, _dropout: float = 0.0, causal: bool = False, *_: Any, **options: Any) -> Any:
        out, lse = attend(q, k, v, causal, options.get("scale"))
        state, none = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
        return out, lse, none.long(), none.long(), q.shape[2], k.shape[2], state, state[0], none

    def flash_backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, _cq: Any, _ck: Any, _mq: int, _mk: int, _dropout: float,
        causal: bool, *_: Any, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return differentiate(grad, q, k, v, out, lse, causal, scale)

    def efficient(
        q: Any, k: Any, v: Any, bias: Any, _lse: bool, _dropout: float = 0.0, causal: bool = False, **options: Any
    ) -> Any:
        assert bias is None
        out, lse = attend(q, k, v, causal, options.get("scale"))
        return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)

    def efficient_backward(
        grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, _seed: Any, _offset: Any, _dropout: float,
        _mask: Any, causal: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        assert bias is None
        return *differentiate(grad, q, k, v, out, lse, causal, scale), None

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    return library


def run(program: Program, tensors: Mapping[str, Any], configuration: int) -> Executed:
    """Run a program in a process that was initialized by ``install``.

    Args:
        tensors: the inputs by name, of any layout.
        configuration: index of the configuration of each kernel: 0 is the first, -1 the last.

    Raises:
        AssertionError: a Triton kernel of a graph was not launched.
    """
    import torch

    storages: dict[int, dict[View, Any]] = {}

    def define(view: View, tensor: Any) -> None:
        storages.setdefault(view.storage, {})[view] = tensor

    def value(view: Any) -> Any:
        if not isinstance(view, View):
            return view
        known = storages[view.storage]
        if view in known:
            return known[view]
        return torch.as_strided(next(iter(known.values())), view.size, view.stride, view.offset)

    for name, view in program.inputs.items():
        tensor = torch.empty_strided(view.size, view.stride, dtype=tensors[name].dtype)
        define(view, tensor.copy_(tensors[name]))
    launches: Counter[str] = Counter()
    for call in program.calls:
        with kernels_of(call.source, configuration) as (module, launched), torch.no_grad():
            outputs = module.call([value(view) for view in call.inputs])
        missing = set(re.findall(r"(\w+) = async_compile\.triton\(", call.source)) - set(launched)
        assert not missing, f"not launched: {missing}"
        launches += launched
        for output, tensor in zip(call.outputs, outputs, strict=True):
            if output is not None:
                define(output, tensor)
    return Executed({name: value(view).clone() for name, view in program.results.items()}, launches)


@contextmanager
def kernels_of(source: str, configuration: int) -> Iterator[tuple[Any, Counter[str]]]:
    """Load generated code. The kernels that it launches are counted in the second value."""
    import torch
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launched: Counter[str] = Counter()

    def load(_: Any, name: str, text: str, device_str: str = "cuda") -> Any:  # noqa: ARG001
        kernel = getattr(PyCodeCache.load(text), name)
        assert isinstance(kernel, CachingAutotuner)
        kernel.configs = [kernel.configs[configuration]]
        run = kernel.run

        def counted(*args: Any, **options: Any) -> Any:
            launched[name] += 1
            return run(*args, **options)

        kernel.run = counted  # type: ignore[method-assign]
        return kernel

    PyCodeCache.cache_clear()  # a loaded module has the kernels of another call
    with patch.object(AsyncCompile, "triton", load):
        module = PyCodeCache.load(source)
        module.empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # type: ignore[attr-defined]
        yield module, launched
