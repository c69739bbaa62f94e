"""Measure on one GPU the rates that the planner assumes: ``python scripts/benchmarks/measure_kernels.py``.

Matrix products of the Llama sizes in bfloat16 and float8, attention forward and backward by kernel, head size and
length, element-wise operations that only move bytes, and the time in which the host issues an operation. The results
are rows of JSON: seconds are medians, ``fraction`` is that of the data sheet's peak, as in the ``Efficiency`` of the
planner. FLOPs of attention are counted as in published_attention.csv: without masked pairs,
and 2.5 times as many in backward. ``--tiny`` runs small sizes on a CPU, to try the script.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from torchtrain.plugins.planner.hardware import GPUS  # noqa: E402

TOKENS = 8192
# Inputs and outputs of the matrices of 1B, 8B and 70B.
MATRICES = [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)]
MATRICES += [(4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672), (28672, 8192)]
LENGTHS = (2048, 8192, 32768)
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Row = dict[str, Any]


class Device:
    """Times functions on the GPU, or on a CPU in a trial."""

    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.name = "cpu" if tiny else torch.cuda.get_device_name()
        self.type = "cpu" if tiny else "cuda"
        memory = 0 if tiny else torch.cuda.get_device_properties(0).total_memory / 2**30
        known = [name for name in GPUS if name.split("-")[0].upper() in self.name]
        # Of several models of a name, the one whose memory is closest.
        self.gpu = GPUS[min(known, key=lambda name: abs(GPUS[name].memory_gib - memory))] if known else None

    def synchronize(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 10) -> float:
        """Median duration on the device; a write to a buffer larger than the cache comes before each."""
        if self.tiny:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        cache = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        for _ in range(3):
            run()
        times = []
        for _ in range(repeats):
            cache.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        return statistics.median(times)

    def fraction(self, rate: float, of: str) -> float | None:
        return rate / getattr(self.gpu, of) if self.gpu else None


def products(device: Device) -> Iterator[Row]:
    tokens, matrices = (64, [(64, 32)]) if device.tiny else (TOKENS, MATRICES)
    for inputs, outputs in matrices:
        x = torch.randn(tokens, inputs, device=device.type).bfloat16()
        weight = torch.randn(outputs, inputs, device=device.type).bfloat16() / inputs**0.5
        shape = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
        out = x @ weight.T
        runs: dict[str, Callable[[], Any]] = {
            "forward": lambda x=x, w=weight: x @ w.T,
            "input gradient": lambda out=out, w=weight: out @ w,
            "weight gradient": lambda out=out, x=x: out.T @ x,
        }
        yield from (product_row(device, "bfloat16", name, shape, run) for name, run in runs.items())
        if device.tiny:
            continue
        a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).T
        one = torch.ones((), device="cuda")
        rows, columns = torch.ones(tokens, 1, device="cuda"), torch.ones(1, outputs, device="cuda")
        for name, scales in {"tensorwise": (one, one), "rowwise": (rows, columns)}.items():
            options = {"out_dtype": torch.bfloat16, "use_fast_accum": name == "tensorwise"}
            multiply = partial(torch._scaled_mm, a, b, *scales, **options)
            yield product_row(device, "float8", name, shape, multiply)


def product_row(device: Device, dtype: str, name: str, shape: dict[str, int], run: Callable[[], Any]) -> Row:
    """Time a matrix product."""
    seconds, flops = device.seconds(run), 2 * shape["tokens"] * shape["inputs"] * shape["outputs"]
    row: Row = {"kind": "product", "dtype": dtype, "name": name, **shape, "seconds": seconds}
    return row | {"fraction": device.fraction(flops / seconds, f"flops_{dtype}")}


def attentions(device: Device) -> Iterator[Row]:
    kernels = {"flash": SDPBackend.FLASH_ATTENTION} if device.tiny else KERNELS
    for kernel, backend in kernels.items():
        for head_dim in (64, 128):
            for seq_len in (64,) if device.tiny else LENGTHS:
                heads, kv_heads = (2, 1) if device.tiny else (4096 // head_dim, 1024 // head_dim)
                q, k, v = (
                    torch.randn(1, n, seq_len, head_dim, device=device.type).bfloat16().requires_grad_()
                    for n in (heads, kv_heads, kv_heads)
                )

                def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

                with sdpa_kernel([backend]):
                    try:
                        out = forward()
                    except RuntimeError as error:
                        yield {"kind": "attention", "kernel": kernel, "head_dim": head_dim, "error": str(error)[:200]}
                        break
                    gradient = torch.randn_like(out)
                    times = {
                        "forward": device.seconds(forward),
                        "backward": device.seconds(
                            lambda out=out, i=(q, k, v), g=gradient: torch.autograd.grad(out, i, g, retain_graph=True)
                        ),
                    }
                flops = 4 * heads * head_dim * seq_len * seq_len / 2
                for direction, seconds in times.items():
                    rate = flops * (2.5 if direction == "backward" else 1) / seconds
                    row: Row = {"kind": "attention", "kernel": kernel, "direction": direction, "mask": "causal"}
                    row |= {"head_dim": head_dim, "seq_len": seq_len, "seconds": seconds, "tflops": rate / 1e12}
                    yield row | {"fraction": device.fraction(rate, "flops_bfloat16")}


def movements(device: Device) -> Iterator[Row]:
    """Element-wise operations that only move bytes, small ones that the host issues, copies from and to the host."""
    size = 1 << 10 if device.tiny else 1 << 28
    for dtype in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(size, device=device.type).to(dtype) for _ in range(2))
        runs: dict[str, tuple[int, Callable[[], Any]]] = {
            "copy": (2, lambda x=x, y=y: y.copy_(x)),
            "add": (3, lambda x=x, y=y: torch.add(x, y, out=y)),
        }
        for name, (tensors, run) in runs.items():
            seconds, moved = device.seconds(run), tensors * size * dtype.itemsize
            fraction = device.fraction(moved / seconds, "memory_bandwidth")
            row: Row = {"kind": "memory", "name": name, "dtype": str(dtype), "bytes": moved, "seconds": seconds}
            yield row | {"fraction": fraction}
    small, repeats = torch.zeros(16, device=device.type), 10 if device.tiny else 2000
    for _ in range(2):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            small.add_(1)
        issued = time.perf_counter() - start
        device.synchronize()
        done = time.perf_counter() - start
    yield {"kind": "launch", "host_seconds": issued / repeats, "device_seconds": done / repeats}
    if not device.tiny:
        host = torch.empty(1 << 30, dtype=torch.int8, pin_memory=True)
        there = torch.empty_like(host, device="cuda")
        for name, run in {
            "to the device": lambda: there.copy_(host, non_blocking=True),
            "to the host": lambda: host.copy_(there, non_blocking=True),
        }.items():
            seconds = device.seconds(run)
            fraction = device.fraction(host.numel() / seconds, "host_bandwidth")
            yield {"kind": "host", "name": name, "bytes": host.numel(), "seconds": seconds, "fraction": fraction}


def chosen_attention(device: Device) -> Row:
    """The kernel that PyTorch selects, by itself, for the shape of 8B."""
    if device.tiny:
        return {}
    q, k = (torch.empty(1, n, TOKENS, 128, dtype=torch.bfloat16, device="cuda") for n in (32, 8))
    choice = SDPBackend(torch._fused_sdp_choice(q, k, k, None, is_causal=True, enable_gqa=True)).name
    return {"attention": choice, "cudnn": torch.backends.cudnn.version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--output", default="kernels.json", help="file for the results")
    arguments = parser.parse_args()
    device = Device(arguments.tiny)
    results: Row = {"device": device.name, "torch": torch.__version__, "chosen": chosen_attention(device), "rows": []}
    print(json.dumps(results["chosen"]))
    for measure in (movements, products, attentions):
        for row in measure(device):
            results["rows"].append(row)
            print(json.dumps(row), flush=True)
            Path(arguments.output).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
