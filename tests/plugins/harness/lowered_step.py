"""Lower training steps of a config for a GPU: the simulation of ``simulated_step``, with the real Inductor and Triton.

Runs inside a ``fake_cuda.Worker`` that was initialized by ``fake_gpu_compiler.install``.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import simulated_step
import torch
import torch._inductor.config
from fake_gpu_compiler import DEVICES, Capture, capture
from simulated_step import Report

from torchtrain.models.document_mask import compiled_create_block_mask
from torchtrain.models.llama.model import compiled_flex_attention
from torchtrain.plugins.planner import simulation

# The operations of each attention kernel, as the simulation records them.
ATTENTION = {
    "flash": {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"},
    "cudnn": {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"},
    "flex": {"flex_attention", "flex_attention_backward"},
}
# Kernels that may spill, by a pattern of their names, and how many bytes.
ACCEPTED_SPILLS = {
    # float8 by rows with tensor parallelism: one of several configurations, between which a GPU chooses by timing them.
    "triton_per_fused__to_copy_abs_add_all_reduce_amax_cat_mul_neg": 24,
    # float8: one of five configurations, between which a GPU chooses by timing them.
    "triton_red_fused__fused_rms_norm__fused_rms_norm_backward__scaled_mm": 72,
    "fused_rms_norm__fused_rms_norm_backward__unsafe_view_add": 16,  # dim 2048, on H100 and B200
    "triton_red_fused__to_copy_gather_mul_pow.*_sum": 8,  # the sums of z-loss, on a B200
    "tem_fused.*flex_attention_backward": 88,  # at head_dim 128, outside of its loops
    "tem_fused(?!.*backward).*flex_attention": 80,  # A100, head_dim 64; eight warps need more instructions
}


@dataclass(frozen=True)
class Lowered:
    """A training step as compiled: what Inductor and Triton made, and what the simulation recorded."""

    code: Capture
    report: Report
    cpu_seconds: float
    """With the processes that it started: ptxas and cuobjdump."""


@contextmanager
def real_inductor(_: Any) -> Iterator[None]:
    """Replacement of ``simulated_inductor``, which leaves torch.compile as it is in training."""
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        # A simulated run sets these options for its process: restore them for the next one.
        torch._functorch.config.patch(activation_memory_budget=1.0),
        torch._inductor.config.patch(_micro_pipeline_tp=False),
    ):
        warnings.simplefilter("ignore")
        yield
    for cached in (compiled_flex_attention, compiled_create_block_mask):
        cached.cache_clear()
    torch._dynamo.reset()


def lower(
    options: Mapping[str, Any],
    world_size: int,
    *,
    shape: Mapping[str, Any],
    gpu: str = "h100-80",
    deterministic: bool = False,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Lowered:
    """Resolve and validate a config as ``train`` does, and compile its step (arguments: ``simulated_step.run``)."""
    begin = sum(os.times()[:4])
    torch.use_deterministic_algorithms(deterministic)
    try:
        with patch.object(simulation, "simulated_inductor", real_inductor), capture() as code:
            report = simulated_step.run(options, world_size, shape=shape, gpu=gpu, fault=fault)
    finally:
        torch.use_deterministic_algorithms(False)
    return Lowered(code, report, sum(os.times()[:4]) - begin)


def problems(lowered: Lowered, attention: str, gpu: str = "h100-80") -> list[str]:
    """Return what is wrong with a lowered step. It accepts the spills in ``ACCEPTED_SPILLS``.

    Args:
        attention: "flash", "cudnn" or "flex": the kernel that all attention should use.
    """
    device, code, report = DEVICES[gpu], lowered.code, lowered.report
    found = [f"graph break: {reason}" for reason in code.breaks]
    found += [f"waits for the device: {where}" for where in report.readbacks]
    found += [f"computed on the host: {line.strip()}" for graph in code.graphs for line in graph.host_work]
    found += [f"ranks disagree: {text}" for text in report.disagreements]
    for graph in code.graphs:
        if graph.collectives != graph.planned_collectives:
            found.append(f"{graph.name}: collectives {graph.planned_collectives} became {graph.collectives}")
        if "extern_kernels.bmm" in graph.libraries:
            found.append(f"{graph.name}: a batched matrix product, which is attention without a fused kernel")
    for kernel in code.kernels:
        accepted = max((size for name, size in ACCEPTED_SPILLS.items() if re.search(name, kernel.name)), default=0)
        if kernel.spilled > accepted:
            found.append(f"{kernel.name} ({kernel.config}) spills {kernel.spilled} bytes")
        if kernel.shared > device.shared_memory_per_block_optin:
            found.append(f"{kernel.name} ({kernel.config}) needs {kernel.shared} bytes of shared memory")
        if kernel.float64:
            found.append(f"{kernel.name} computes in float64")
        if not kernel.target.startswith(f"sm_{device.major}{device.minor}"):
            found.append(f"{kernel.name} is compiled for {kernel.target}")
    for rank in report.ranks:
        if rank.attention != ATTENTION[attention]:
            found.append(f"rank {rank.rank}: attention by {rank.attention or 'no fused kernel'}")
    if attention == "flex" and sum("flex_attention" in kernel.name for kernel in code.kernels) < 2:
        found.append("flex_attention has no kernels for forward and backward")
    if attention == "flex" and not any(graph.name.startswith("document_mask.") for graph in code.graphs):
        found.append("the document mask is not compiled, and has all pairs of tokens")
    return found
