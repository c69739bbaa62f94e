"""Gradient reducers for CPUs: reduce-scatter over gloo, and no copy on a single rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtrain.config.registry import GRADIENT_REDUCERS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.parallelisms.reduce_scatter import AllToAllReduceScatter
from torchtrain.torch_internals import ReduceScatter


class CPUGradientReducer(GradientReducer):
    """The default gradient reducer, with a faster reduce-scatter than that of gloo."""

    def reduce_scatter(self) -> ReduceScatter:
        return AllToAllReduceScatter() if self.mesh.size() > 1 else NoReduceScatter()


class NoReduceScatter(ReduceScatter):
    """For a single rank, which has nothing to reduce: the output is the input, so that FSDP's copy costs nothing.

    Not for GPUs: FSDP would give the memory of the input to the next group while another stream still reads the output.
    """

    input: Tensor | None = None  # set between the two calls of ``allocate``

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        filled, self.input = self.input, None
        return filled

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("on one rank FSDP copies instead of reducing")


def build_cpu_gradient_reducer(config: JobConfig, mesh: Mesh) -> GradientReducer:
    """``build_gradient_reducer`` for CPUs."""
    kind: type[GradientReducer] = GRADIENT_REDUCERS[config.training.sums]
    reducer = (CPUGradientReducer if kind is GradientReducer else kind.on_cpu()).build(config, mesh)
    # A single rank has no communication that could overlap with computation, and each FSDP group adds host overhead.
    reducer.by_block = reducer.mesh.size() > 1 or config.parallelism.fsdp_reshard_after_forward != "default"
    return reducer
