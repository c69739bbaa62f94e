"""Matrix products of bfloat16 and float16 in float32, for CPUs without such instructions, for example with only AVX2.

On these CPUs torch computes the products without oneDNN: (2048, 688) @ (688, 256) takes 950 ms in bfloat16 and 10 ms in
float32 (two cores of an AMD EPYC with AVX2, torch 2.13.0).
"""

import warnings
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def apply_float32_matmul(dtype: torch.dtype) -> None:
    """Make this process compute CPU matrix products of ``dtype`` in float32 if that is faster, from now on.

    Sums are in float32, and only the result is rounded to ``dtype``, as in oneDNN's kernels. PyTorch's dispatcher has
    one kernel per operator, so that this setting of the process cannot be limited to one model.
    """
    if dtype in slow_dtypes():
        _replace()


@cache
def slow_dtypes() -> tuple[torch.dtype, ...]:
    """Those of bfloat16 and float16 in which oneDNN has no matrix products on this CPU."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    supported = {
        torch.bfloat16: has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: has_onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return tuple(dtype for dtype, is_supported in supported.items() if not is_supported)


@cache
def _replace() -> torch.library.Library:
    # The kernels are registered as long as the library exists; the cache keeps it alive.
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    replace_matmuls(library, slow_dtypes())
    return library


def replace_matmuls(library: torch.library.Library, dtypes: Collection[torch.dtype]) -> None:
    """Register kernels in ``library`` that compute products of ``dtypes`` in float32; other dtypes are unaffected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for name in PRODUCTS:
            for overload in (name, f"{name}.out"):
                kernel = _kernel(name, overload, dtypes)
                library.impl(overload, kernel, "CPU", with_keyset=True, allow_override=True)  # type: ignore[no-untyped-call]


def _kernel(name: str, overload: str, dtypes: Collection[torch.dtype]) -> Any:
    product = getattr(torch.ops.aten, name).default
    original = torch.library.get_kernel(f"aten::{overload}", "CPU")

    def kernel(keys: torch.DispatchKeySet, first: Tensor, *rest: Any, out: Tensor | None = None, **numbers: Any) -> Any:
        if first.dtype not in dtypes:
            return original.call_boxed(keys, first, *rest, **numbers, **({} if out is None else {"out": out}))
        arguments = (x.float() if isinstance(x, Tensor) else x for x in (first, *rest))
        result = product(*arguments, **numbers)
        return result.to(first.dtype) if out is None else out.copy_(result)

    return kernel
