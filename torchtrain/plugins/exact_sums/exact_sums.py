"""Exact gradient sums: bitwise-identical for any order and grouping of microbatches, ranks and replicas.

Each summand, the gradient of one microbatch on one rank, is rounded to a multiple of a power of two, the spacing, and
added as a 64-bit integer, which is exact. The spacing is the finest with which no sum can overflow, given the largest
summand of the previous step. A step whose summands exceed the limit is detected and recomputed.

``ExactGradientReducer`` connects this to the rest of training.
"""

import math
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import all_reduce
from torchtrain.distributed.replicas import Replicas
from torchtrain.logging import logger
from torchtrain.parallelisms.reduce_scatter import AllToAllReduceScatter, summands_of_all_ranks
from torchtrain.plugins.exact_sums.options import ExactSumsConfig, GrainsConfig
from torchtrain.plugins.exact_sums.tree import tree_sum
from torchtrain.torch_internals import DefaultReduceScatter, ReduceScatter, allow_integer_reductions

HEADROOM_BITS = 6  # the largest summand may grow by this many bits from one step to the next
SUM_BITS = 62  # usable bits of an int64; one is spare for rounding
MIN_SPACING = -126  # its inverse must be a float32
UNKNOWN = -(1 << 20)
FLOAT64_ELEMENTS = 1 << 24  # of a gradient that are converted to float64 at once


class ExactGradientReducer(GradientReducer):
    """Exact sums of gradients, and gradient norms that are bitwise identical on any number of data-parallel ranks."""

    elements_at_once = 1 << 22
    """Elements of a shard that are converted to 64-bit integers at once."""

    def __init__(self, config: JobConfig, mesh: Mesh) -> None:
        # Always 2-D (replicate, shard), because FSDP accumulates microbatches in its reduce_dtype only with HSDP.
        super().__init__(mesh.hsdp, torch.int64, mesh.replicas)
        allow_integer_reductions()
        self.state = self.sums = ExactSums(torch.device(mesh.world.device_type), mesh.replicas)
        self.param_dtype: torch.dtype = getattr(torch, config.training.mixed_precision_param)
        self.transport = section_of(config, ExactSumsConfig).transport
        self.grains, self.context = section_of(config, GrainsConfig), 1
        # Upper bound on the summands of a gradient element, reached with one row per microbatch: of all rows, however
        # they are divided among ranks and replicas. Gradients of norms are also summed over tensor-parallel ranks.
        self.summands = config.training.global_batch_size * mesh.degrees.context * mesh.degrees.tensor
        if self.grains.enabled:  # gradients of tensor and context ranks are added before they are rounded
            self.summands, self.context = config.training.global_batch_size, mesh.degrees.context
            self.transport = "all_to_all" if self.context > 1 else self.transport

    @classmethod
    def build(cls, config: JobConfig, mesh: Mesh) -> GradientReducer:
        return cls(config, mesh)

    @classmethod
    def on_cpu(cls) -> type[GradientReducer]:
        return CPUExactGradientReducer

    def reduce_scatter(self) -> ReduceScatter:
        return ExactReduceScatter(
            self.sums, self.param_dtype, self.mesh, self.transport, self.elements_at_once, self.context
        )

    def begin(self, rows: int) -> None:  # noqa: ARG002
        self.sums.begin(self.summands)

    def finish(self, model_parts: Sequence[nn.Module]) -> bool:
        fits = self.sums.finish(model_parts)
        if not fits:
            logger.info(
                "the step is recomputed: a gradient exceeds the range of exact sums (training.sums), which is chosen "
                "by the gradients of the previous step"
            )
        return fits

    def rows(self, gradient: DTensor) -> Tensor:
        """This rank's shard of a matrix, in rows that are the same on every layout.

        With grains these are rows of a matrix whose columns are sharded over the tensor grains.
        """
        shard, grains = gradient.to_local(), self.grains.tensor
        if gradient.shape[-1] % grains:  # tensor parallelism does not shard its columns
            return shard
        return shard.reshape(-1, gradient.shape[-1] // grains)

    def row_norms(self, gradient: DTensor) -> Tensor:
        return row_norms_by_halves(self.rows(gradient))

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        return exact_sum(values)


class CPUExactGradientReducer(ExactGradientReducer):
    """``ExactGradientReducer`` for CPUs."""

    elements_at_once = 1 << 15  # fits the cache

    def __init__(self, config: JobConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        if self.transport == "auto":
            self.transport = "all_to_all"

    def row_norms(self, gradient: DTensor) -> Tensor:
        # On a CPU the norm of a row does not depend on the number of rows.
        norms: Tensor = torch.linalg.vector_norm(self.rows(gradient), dim=-1)
        return norms


class ExactSums(Stateful):
    """Chooses the spacing of exact sums, identical on all ranks. Its state, saved in checkpoints, determines it."""

    def __init__(self, device: torch.device, replicas: Replicas | None = None) -> None:
        self.replicas = Replicas() if replicas is None else replicas
        self.exponent = UNKNOWN  # of a power of two above the last step's largest summand
        self.device = device
        self.limit = self.spacing = 0  # exponents of two

    def state_dict(self) -> dict[str, Any]:
        return {"exponent": torch.tensor(self.exponent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.exponent = int(state_dict.get("exponent", self.exponent))

    def begin(self, summands: int) -> None:
        """Set the spacing; call it before the first backward of a step.

        ``summands`` is the maximum number of summands of any gradient element.
        """
        self.limit = self.exponent + HEADROOM_BITS
        self.spacing = max(MIN_SPACING, self.limit + (summands - 1).bit_length() - SUM_BITS)
        # Maxima of this step's summands, one for each call of ``see``, because pipeline stages call it on CUDA streams
        # of their own.
        self.largest = [torch.zeros((), device=self.device)]

    def see(self, summands: Tensor) -> None:
        """Record the largest magnitude of ``summands``, before they are rounded."""
        low, high = summands.aminmax()
        self.largest.append(torch.maximum(-low, high).float())

    def rounded(self, summands: Tensor) -> Tensor:
        """Return ``summands`` rounded to multiples of the spacing, as int64."""
        return torch.mul(summands.float(), 2.0**-self.spacing).round_().to(torch.int64)

    @torch.no_grad()
    def finish(self, model_parts: Sequence[nn.Module]) -> bool:
        """Convert the sums to gradients in place; call it after the last backward. The host waits for the device.

        Returns False if sums may have overflowed: the step must then be recomputed. If a summand is not finite, the
        gradients are NaN.
        """
        gradients = [
            cast(DTensor, p.grad).to_local() for part in model_parts for p in part.parameters() if p.grad is not None
        ]
        maximum = torch.stack(self.largest).nan_to_num(nan=math.inf, posinf=math.inf).amax()  # MAX would lose NaN
        # In this order, so that the ranks of a replica agree also if the reduction over replicas fails on one of them.
        self.replicas.all_reduce(maximum, dist.ReduceOp.MAX)
        all_reduce(maximum, op=dist.ReduceOp.MAX)
        largest = maximum.item()
        scale = 2.0**self.spacing if math.isfinite(largest) else math.nan
        if math.isfinite(largest) and largest > 0:
            self.exponent = math.frexp(largest)[1]
            if self.exponent > self.limit:
                return False
        torch._foreach_mul_(gradients, scale)
        return True


class ExactReduceScatter(AllToAllReduceScatter):
    """Custom reduce-scatter for FSDP: takes gradients in ``dtype`` and returns exact sums in multiples of the spacing.

    ``mesh`` has the dimensions (replicate, shard). ``transport`` is ``exact_sums.transport``: "all_to_all"
    sends unrounded gradients and rounds them on the receiving rank; "ring" rounds first and sends 8 bytes per element.
    ``context``: number of consecutive ranks of a shard whose gradients are added in a tree before they are rounded.
    """

    def __init__(
        self,
        sums: ExactSums,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        transport: str,
        elements_at_once: int,
        context: int = 1,
    ) -> None:
        self.sums = sums
        self.dtype = dtype
        shards = mesh.get_group(1)
        self.ranks = shards.size()
        self.elements_at_once = elements_at_once
        self.context = context
        self.all_to_all = transport == "all_to_all" or (transport == "auto" and on_one_machine(shards))

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        filled = self.input
        if filled is not None and self.context == 1:
            self.sums.see(filled)
            if self.ranks == 1:
                filled.mul_(2.0**-self.sums.spacing).round_()  # FSDP only copies them to the output
        return super().allocate(size, dtype=self.dtype if filled is None else dtype, device=device)

    def reduce(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        if not self.all_to_all:
            DefaultReduceScatter()(output, self.sums.rounded(summands), group, dist.ReduceOp.SUM)
            return
        columns = torch.split(summands_of_all_ranks(summands, group), self.elements_at_once, dim=1)
        for total, column in zip(torch.split(output, self.elements_at_once), columns, strict=True):
            if self.context > 1:
                column = tree_sum(column.view(-1, self.context, column.shape[1]).unbind(1))
                self.sums.see(column)
            torch.sum(self.sums.rounded(column), dim=0, out=total)


def row_norms_by_halves(gradient: Tensor) -> Tensor:
    """L2 norms along the last dimension in float64, by elementwise additions of halves of the rows.

    CUDA's own kernel adds the elements of a row in an order that depends on the number of rows.
    """
    norms_of_chunks = []
    for rows in torch.split(gradient, max(1, FLOAT64_ELEMENTS // gradient.shape[-1])):
        squares = rows.double().square()
        while squares.shape[1] > 1:
            half = squares.shape[1] // 2
            sums = squares[:, :half] + squares[:, -half:]
            squares = torch.cat((sums, squares[:, half:-half]), dim=1)  # with an odd width, the element in the middle
        norms_of_chunks.append(squares.sqrt().flatten())
    return torch.cat(norms_of_chunks)


def exact_sum(values: Tensor) -> Tensor:
    """Sum over all ranks of ``values`` (float64, not negative, at most 2^30 in number), bitwise identical in any order.

    Each value is added as two 64-bit integers, with an error of at most 2^-64 of the largest value. The sum is infinite
    if a value is infinite or NaN. Collective.
    """
    largest = values.nan_to_num(math.inf, posinf=math.inf).max()
    all_reduce(largest, op=dist.ReduceOp.MAX)
    scale = ((1055 - torch.frexp(largest)[1].long()) << 52).view(torch.float64)  # 2^(32 - exponent), from its bits
    coarse = (values * scale).floor()  # under 2^32
    fine = ((values * scale - coarse) * 2.0**32).round()
    sums = torch.stack((coarse.long().sum(), fine.long().sum()))
    all_reduce(sums)
    sums = sums.double()
    return torch.where(largest.isfinite(), (sums[0] + sums[1] * 2.0**-32) / scale, largest)


def on_one_machine(group: dist.ProcessGroup) -> bool:
    """Whether torchrun started all ranks of ``group`` on the same machine."""
    ranks_per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // ranks_per_machine for rank in dist.get_process_group_ranks(group)}) == 1
