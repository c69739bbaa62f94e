"""Compare the planner's estimates with published runs, and fit the efficiencies of its cost model to them.

    python scripts/benchmarks/validate_estimate.py                  # the table of docs/development/planner.md
    python scripts/benchmarks/validate_estimate.py --only '70B'     # the rows that contain a regular expression
    python scripts/benchmarks/validate_estimate.py --fit     # fits the efficiencies, for plugins/planner/hardware.py
    python scripts/benchmarks/validate_estimate.py --others  # estimates of this trainer for the layouts of others

Memory is not fitted, and no efficiency is fitted to the rows of ``HELD_OUT``. A row describes how the trainer of a run
differed from this one, and the script reproduces it: which matrix products of a block selective checkpointing saved,
whether the loop kept the float32 logits until the end of the step, whether the loss was compiled, and whether the
allocator used expandable segments. All runs applied RoPE with complex numbers, predate PyTorch's fused kernel for
RMSNorm, used FlashAttention 2, and had the output layer in the FSDP group of the root (until torchtitan #1094). Context
parallelism was PyTorch's ring attention (``RingAttention``), and asynchronous tensor parallelism fused what Inductor
finds without this package's pass.
"""

import argparse
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tomli
import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from torchtrain.config.parse import from_toml
from torchtrain.config.schema import JobConfig
from torchtrain.models.llama import model
from torchtrain.models.loss import OutputLoss, output_loss
from torchtrain.models.model_config import build_model_config
from torchtrain.parallelisms import activation_checkpoint, fsdp
from torchtrain.parallelisms.async_tensor_parallel import FusibleCollectives
from torchtrain.parallelisms.context_parallel import ContextParallelAttention
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.planner import simulation
from torchtrain.plugins.planner.allocator import peak_reserved
from torchtrain.plugins.planner.hardware import GIB, GPUS, Efficiency
from torchtrain.plugins.planner.operations import Operation
from torchtrain.plugins.planner.request import resolve_gpu
from torchtrain.plugins.planner.simulation import simulate
from torchtrain.plugins.planner.summary import estimate
from torchtrain.plugins.planner.timing import CostModel, replay

aten = torch.ops.aten
OTHERS = Path(__file__).with_name("other_trainers.toml")
EVERY_SECOND = (1, 3, 5, 0)  # of a block's seven products


@dataclass(frozen=True)
class Row:
    """A published run: memory in GiB, tokens per second per GPU; None if a number was not published."""

    name: str
    source: str
    flavor: str
    batch: int
    reserved: float | None
    tokens: float | None
    mode: str = "selective"
    compiled: bool = False
    active: float | None = None
    first_step: float | None = None  # reserved in the first step
    kept: tuple[int, ...] = EVERY_SECOND
    holds_logits: bool = False
    compiled_loss: bool = True  # with the blocks
    expandable: bool = True
    float8: bool = False
    reshard: str = "default"
    chunk_tokens: int = 0
    tensor: int = 1
    context: int = 1
    ranks: int = 8
    async_tensor: bool = False
    seq_len: int = 8192
    gpu: str = "h100-96"


BENCHMARK = "torchtitan benchmarks/llama3_h100_202412"
ASYNC = "torchtitan benchmarks/asyncTP_llama3_h100_2025-06"
H200 = "torchtitan benchmarks/llama3_8b_h200_2025-06"
ON_H200 = {"gpu": "h200", "ranks": 32}
A100 = "torchtitan docs/performance.md, 2024"
ON_A100 = {"gpu": "a100-80", "ranks": 64, "holds_logits": True, "expandable": False}
FMS = "pytorch.org/blog/maximizing-training-throughput"
ON_128 = {"gpu": "a100-80", "ranks": 128, "seq_len": 4096, "compiled": True}
ON_64 = {"tensor": 8, "ranks": 64}
# torchtitan's loss was not compiled before the autumn of 2024, nor from that December to the next April (#755, #1033).
PLAIN_LOSS = {"compiled": True, "compiled_loss": False}
# torchtitan in March 2024
OLD = {"holds_logits": True, "expandable": False, "compiled_loss": False, "seq_len": 2048}
ROWS = (
    Row("8B, 8 GPUs, batch 2", BENCHMARK, "8B", 2, 82.4, 5762),
    Row("... compiled", BENCHMARK, "8B", 2, 77.0, 6667, **PLAIN_LOSS),
    Row("... compiled, float8", BENCHMARK, "8B", 2, 76.8, 8532, **PLAIN_LOSS, float8=True),
    Row("8B, 64 GPUs, tensor 8, batch 12", ASYNC, "8B", 12, None, 4378, compiled=True, **ON_64),
    Row("... asynchronous", ASYNC, "8B", 12, None, 4809, compiled=True, **ON_64, async_tensor=True),
    Row("8B, 8 GPUs, batch 1", "#822", "8B", 1, 49.59, 5605, first_step=42.08),
    Row("... reshard never", "#822", "8B", 1, 62.18, 5763, first_step=54.66, reshard="never"),
    Row("8B, 8 GPUs, batch 1", "#996", "8B", 1, 49.58, 5957),
    Row("... loss in chunks", "#996", "8B", 1, 42.26, 5953, chunk_tokens=1024),
    Row("8B, 8 GPUs, batch 1, compiled", "#808", "8B", 1, 47.65, 5760, **PLAIN_LOSS),
    Row("... float8", "#808", "8B", 1, 47.32, 7186, **PLAIN_LOSS, float8=True),
    Row("Llama 2 7B, full", "#165", "7B", 8, 31.02, 6200, "full", active=22.73, **OLD),
    Row("... selective", "#165", "7B", 8, 59.41, 6700, active=49.54, **OLD),
    Row("... compiled, full", "#165", "7B", 8, 28.90, 7350, "full", compiled=True, **OLD),
    Row("... compiled, selective", "#165", "7B", 8, 53.83, 8250, compiled=True, **OLD),
    Row("... compiled, selective, batch 16", "#165", "7B", 16, 88.23, 8600, compiled=True, **OLD),
    Row("... compiled, none", "#165", "7B", 8, 90.28, 9200, "none", compiled=True, **OLD),
    Row(
        "8B, 32 H200 GPUs, batch 2, compiled, float8", H200, "8B", 2, None, 10938, compiled=True, float8=True, **ON_H200
    ),
    Row("8B, 64 A100 GPUs, batch 1", A100, "8B", 1, None, 2973, **ON_A100),
    Row("70B, 64 A100 GPUs, batch 1, full", A100, "70B", 1, None, 331, "full", **ON_A100),
)
# Runs that no efficiency is fitted to.
LONG = {**PLAIN_LOSS, "float8": True}
ON_256 = {"tensor": 8, "ranks": 256, "mode": "full"}  # FSDP over 32 ranks
HELD_OUT = (
    Row("8B, 32,768 tokens, full", BENCHMARK, "8B", 1, 83.9, 3890, "full", **LONG, seq_len=32768),
    Row("... context 2, 65,536 tokens", BENCHMARK, "8B", 1, 84.2, 2540, "full", **LONG, seq_len=65536, context=2),
    Row("... context 4, 131,072 tokens", BENCHMARK, "8B", 1, 84.0, 1071, "full", **LONG, seq_len=131072, context=4),
    Row("... context 8, 262,144 tokens", BENCHMARK, "8B", 1, 84.5, 548, "full", **LONG, seq_len=262144, context=8),
    Row("8B, 128 GPUs, batch 2", BENCHMARK, "8B", 2, 67.0, 5605, ranks=128),
    Row("... compiled", BENCHMARK, "8B", 2, 62.0, 6514, **PLAIN_LOSS, ranks=128),
    Row("... compiled, float8", BENCHMARK, "8B", 2, 61.8, 8380, **LONG, ranks=128),
    Row("70B, 256 GPUs, tensor 8, batch 16, compiled, float8", BENCHMARK, "70B", 16, 71.9, 829, **LONG, **ON_256),
    Row("... asynchronous", BENCHMARK, "70B", 16, 67.6, 876, **LONG, **ON_256, async_tensor=True),
    Row("70B, 256 GPUs, tensor 8, batch 16", ASYNC, "70B", 16, None, 597.3, compiled=True, **ON_256),
    Row("... asynchronous", ASYNC, "70B", 16, None, 652.4, compiled=True, **ON_256, async_tensor=True),
    Row("... float8", ASYNC, "70B", 16, None, 809.8, compiled=True, float8=True, **ON_256),
    Row(
        "... float8, asynchronous",
        ASYNC,
        "70B",
        16,
        None,
        942.4,
        compiled=True,
        float8=True,
        **ON_256,
        async_tensor=True,
    ),
    Row("8B, 64 GPUs, tensor 8, batch 12, float8", ASYNC, "8B", 12, None, 5078.1, compiled=True, float8=True, **ON_64),
    Row("... asynchronous", ASYNC, "8B", 12, None, 5570.1, compiled=True, float8=True, **ON_64, async_tensor=True),
    Row("Llama 2 7B, 128 A100 GPUs, compiled", FMS, "7B", 2, None, 4550, "none", **ON_128),
    Row("Llama 2 70B, 128 A100 GPUs, compiled, full", FMS, "70B", 2, None, 410, "full", **ON_128),
)


def print_others(pattern: str) -> None:
    """Print the estimates for those runs of ``OTHERS`` whose name or source contains ``pattern``."""
    print("| run | tokens/s | estimate | GiB | CPU seconds |", "| --- | --: | --: | --: | --: |", sep="\n")
    for run in tomli.loads(OTHERS.read_text(encoding="utf-8"))["run"]:
        name, tokens = f"{run.pop('name')} ({run.pop('source')})", run.pop("tokens")
        if not re.search(pattern, name):
            continue
        config = from_toml(JobConfig, {"activation_checkpoint": {"mode": "none"}, "compile": {"enable": False}} | run)
        started = time.process_time()
        model_config = build_model_config(config.model, None, config.training.seq_len)
        found = estimate(config, model_config, resolve_gpu(config))
        error, seconds = found.tokens_per_second_per_gpu / tokens - 1, time.process_time() - started
        print(f"| {name} | {tokens:,.0f} | {error:+.1%} | {found.peak_reserved_gib:.1f} | {seconds:.0f} |", flush=True)


def complex_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """torchtitan's RoPE: pairs of channels as complex numbers, for which Inductor generates no kernels."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(3).type_as(x)


class RingAttention(torch.autograd.Function):
    """PyTorch's ring attention, as torchtitan called it: one rank's step for each shard of keys and values.

    A rank gathers keys and values once in forward, recomputation and backward, and sends their float32 gradients on in
    each step. The partial results of all steps are merged in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        """``q``, ``k`` and ``v`` have the shape (bs, heads, seq / n, head_dim)."""
        kernel = aten._scaled_dot_product_flash_attention
        out, logsumexp, *others = _templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0)
        *lengths, seed, offset, _ = others
        ctx.save_for_backward(q, k, v, out, logsumexp, seed, offset)
        ctx.group, ctx.lengths = group, lengths
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, logsumexp, seed, offset = ctx.saved_tensors
        lengths = ctx.lengths

        # With these names as keywords, Dynamo takes ``out`` for a tensor to write to.
        def kernel(
            query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor
        ) -> Any:
            return aten._scaled_dot_product_flash_attention_backward.default(
                grad_out, query, key, value, out, logsumexp, *lengths, 0.0, is_causal, seed, offset
            )

        dq, dk, dv, *_ = _templated_ring_attention_backward(
            ctx.group, 2, kernel, grad, "grad_out", q, k, v, out, logsumexp, is_causal=True
        )
        return dq, dk, dv, None


def ring_attention(module: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor, _: Any = None) -> Tensor:
    """The forward of torchtitan's attention, which repeated keys and values for all heads of their group."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out: Tensor = RingAttention.apply(q, k, v, module.mesh.get_group())  # type: ignore[no-untyped-call]
    return out


def in_eager_mode(_: OutputLoss, logits: Tensor, labels: Tensor) -> Tensor:
    return output_loss.token_losses(logits, labels)


@contextmanager
def their_policies(row: Row) -> Iterator[None]:
    held: list[Tensor] = []
    cross_entropy = output_loss.cross_entropy_sum

    def holding(logits: Tensor, labels: Tensor) -> Tensor:
        held[:] = [logits.detach().float()]
        return cross_entropy(logits, labels)

    with ExitStack() as stack:
        stack.enter_context(patch.object(activation_checkpoint, "saved_linear_layers", lambda _: row.kept))
        stack.enter_context(patch.object(model, "apply_rope", complex_rope))
        stack.enter_context(patch.object(simulation, "fused_rms_norm", nullcontext))
        stack.enter_context(patch.object(fsdp, "shard_output_layer", lambda *_: set()))
        stack.enter_context(patch.object(ContextParallelAttention, "forward", ring_attention))
        stack.enter_context(patch.object(FusibleCollectives, "__call__", lambda *_: None))
        # Each of their chunks adds a gradient of the output matrix.
        stack.enter_context(patch.object(OutputLoss, "keeps_logits_grad", lambda *_: False))
        if row.holds_logits:
            stack.enter_context(patch.object(output_loss, "cross_entropy_sum", holding))
        if not row.compiled_loss:
            stack.enter_context(patch.object(OutputLoss, "chunk_losses", in_eager_mode))
        yield


def config_of(row: Row) -> JobConfig:
    return from_toml(
        JobConfig,
        {
            "model": {
                "name": "llama2" if row.name.startswith("Llama 2") or row.flavor == "7B" else "llama3",
                "flavor": row.flavor,
            },
            "training": {
                "local_batch_size": row.batch,
                "seq_len": row.seq_len,
                "loss_chunk_tokens": row.chunk_tokens,
                "attention_backend": "flash",  # as torchtitan's on H100
            },
            "parallelism": {
                "tensor_parallel_degree": row.tensor,
                "context_parallel_degree": row.context,
                "fsdp_reshard_after_forward": row.reshard,
                "enable_async_tensor_parallel": row.async_tensor,
            },
            "activation_checkpoint": {"mode": row.mode},
            "compile": {"enable": row.compiled},
            "float8": {"recipe": "tensorwise" if row.float8 else "none"},
        },
    )


@dataclass(frozen=True)
class Trace:
    """Results of a simulation; memory in GiB."""

    active: float
    reserved: float
    first_step: float
    operations: Sequence[Operation]


def trace(row: Row) -> Trace:
    config = config_of(row)
    shape = build_model_config(config.model, None, row.seq_len)
    config, degrees = resolve_layout(config, shape, row.ranks)
    with their_policies(row):
        # The last rank of a ring merges the most: it has all queries of its shard in each step.
        first, last = simulate(config, shape, degrees, (row.context - 1) * row.tensor).recorder.steps
    reserved, first_step = (
        peak_reserved(allocations, expandable_segments=row.expandable) / GIB
        for allocations in (first.allocations + last.allocations, first.allocations)
    )
    operations = [with_all_bytes(operation) for operation in last.operations]
    return Trace(max(sum(first.peak), sum(last.peak)) / GIB, reserved, first_step, operations)


def with_all_bytes(operation: Operation) -> Operation:
    """Let a ring's all-to-all send all of its bytes to the next rank. Otherwise a part of them stays on each rank."""
    if operation.name != "all_to_all_single":
        return operation
    ranks = len(operation.ranks)
    return replace(operation, bytes=operation.bytes * ranks // (ranks - 1))


def tokens_per_second(row: Row, found: Trace, efficiency: Efficiency) -> float:
    cost_model = CostModel(GPUS[row.gpu], efficiency, config_of(row))
    seconds = replay({0: found.operations}, cost_model)[0].seconds
    return row.batch * row.seq_len / (row.tensor * row.context) / seconds


FITTED = ("matmul", "matmul_ampere", "float8", "memory", "power_limited")  # these runs hardly depend on the links
LIMIT = 0.95  # of an efficiency
PULL = 0.002  # weak regularization towards the initial values, for directions that the rows do not determine


def efficiency_of(logs: Tensor) -> Efficiency:
    """Return efficiencies from their logarithms in the order of ``FITTED``."""
    return replace(Efficiency(), **dict(zip(FITTED, logs.exp().tolist(), strict=True)))


def misses(traces: Sequence[Trace], logs: Tensor) -> Tensor:
    """Logarithm of the ratio of estimated to published throughput for each row, float64 of shape (rows,)."""
    efficiency = efficiency_of(logs)
    pairs = zip(ROWS, traces, strict=True)
    ratios = [tokens_per_second(row, found, efficiency) / (row.tokens or math.nan) for row, found in pairs]
    return torch.tensor(ratios, dtype=torch.float64).log()


def fit(traces: Sequence[Trace], by: float = 0.02) -> tuple[Efficiency, list[Efficiency]]:
    """Fit the efficiencies to all rows, and to all rows but one for each row.

    Least squares of the logarithms of throughput in the logarithms of efficiencies, by the Gauss-Newton method.
    """
    begin = torch.tensor([getattr(Efficiency(), key) for key in FITTED], dtype=torch.float64).log()
    identity = torch.eye(len(FITTED), dtype=torch.float64)

    def solve(errors: Tensor, slopes: Tensor, at: Tensor) -> Tensor:
        """Solve the linearization at ``at``: ``errors`` (rows,) and derivatives ``slopes`` (rows, efficiencies)."""
        found, free = at.clone(), list(range(len(FITTED)))
        while True:
            a, missed = slopes[:, free], errors + slopes @ (found - at)
            pulled = a.T @ missed + PULL * (found - begin)[free]
            found[free] -= torch.linalg.solve(a.T @ a + PULL * identity[free][:, free], pulled)
            above = [i for i in free if found[i] > math.log(LIMIT) + 1e-9]
            if not above:
                return found
            found[above] = math.log(LIMIT)
            free = [i for i in free if i not in above]

    best = begin
    for _ in range(3):
        at, errors = best, misses(traces, best)
        slopes = torch.stack([(misses(traces, at + by * one) - errors) / by for one in identity], dim=1)
        best = solve(errors, slopes, at)
    others = [[other for other in range(len(ROWS)) if other != row] for row in range(len(ROWS))]
    return efficiency_of(best), [efficiency_of(solve(errors[rows], slopes[rows], at)) for rows in others]


def label(row: Row) -> str:
    """Name and source of a row; a name that begins with "..." follows that of the nearest row above without it."""
    rows = ROWS + HELD_OUT
    parts = [row.name]
    for above in reversed(rows[: rows.index(row)]):
        if not parts[0].startswith("..."):
            break
        if not above.name.startswith("..."):
            parts = [above.name, parts[0].removeprefix("... ")]
    return f"{', '.join(parts)} ({row.source})"


def print_table(traces: Mapping[Row, Trace], efficiency: Efficiency, without: Mapping[Row, Efficiency]) -> None:
    """Print the errors of all rows in ``traces``; ``without`` are efficiencies fitted without a row."""

    def cells(found: float, published: float | None, digits: int) -> str:
        return f"{published:,.{digits}f} | {found / published - 1:+.1%}" if published else "| "

    header = "| run | reserved GiB | estimate | tokens/s | estimate |" + " left out |" * bool(without)
    print(header, "| --- |" + " --: |" * (header.count("|") - 2), sep="\n")
    source, held_out = "", False
    for row, found in traces.items():
        if row in HELD_OUT and not held_out:
            held_out = True
            print("| *held out* |" + " |" * (header.count("|") - 2))
        speed = tokens_per_second(row, found, efficiency)
        memory, tokens = cells(found.reserved, row.reserved, 2), cells(speed, row.tokens, 0)
        name = row.name if row.source == source else f"{row.name} ({row.source})"
        print(f"| {name} | {memory} | {tokens} |", end="")
        source = row.source
        if without:
            error = (
                tokens_per_second(row, found, without[row]) / (row.tokens or math.nan) - 1 if row in without else None
            )
            print(" |" if error is None else f" {error:+.1%} |", end="")
        print(flush=True)


def print_differences(traces: Mapping[Row, Trace]) -> None:
    """Print the errors of live memory, and of differences between two runs or steps."""
    for row, found in traces.items():
        if row.active:
            print(f"\nactive GiB, {row.name}: published {row.active}, {found.active / row.active - 1:+.1%}", end="")
    default, never = (traces[row] for row in ROWS if row.source == "#822")
    print("\nAdam's states, step 10 minus step 1 of #822: measured 7.51 GiB, estimated", end=" ")
    print(f"{default.reserved - default.first_step:.2f} reserved; by arithmetic 7.48")
    print(f"reshard never minus default, #822: measured 12.59 GiB, estimated {never.reserved - default.reserved:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies, with and without each row")
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="only the rows whose name and source contain a regular expression"
    )
    parser.add_argument("--others", action="store_true", help="runs of other trainers, as estimates of this one")
    options = parser.parse_args()
    if options.others:
        print_others(options.only)
        return
    if options.fit and options.only:
        parser.error("--fit needs all rows; leave out --only")
    rows = [row for row in ROWS + HELD_OUT if re.search(options.only, label(row))]
    if not rows:
        names = "\n".join(label(row) for row in ROWS + HELD_OUT)
        parser.error(f"--only {options.only!r} is in none of these rows:\n{names}")
    traces = {row: trace(row) for row in rows}
    efficiency, without = Efficiency(), dict[Row, Efficiency]()
    if options.fit:
        efficiency, others = fit([traces[row] for row in ROWS])
        without = dict(zip(ROWS, others, strict=True))
        print({key: round(getattr(efficiency, key), 3) for key in FITTED}, "\n")
    print_table(traces, efficiency, without)
    if not options.only:
        print_differences(traces)


if __name__ == "__main__":
    main()
