"""Sums of gradients with the same bits in any order and grouping: over microbatches, ranks and replicas.

Each summand, the gradient of one microbatch on one rank, is rounded to a multiple of a power of two, the spacing, and
added as a 64-bit integer, which is exact. The spacing is the finest with which no sum can overflow, as the largest
summand of the step before tells. A step whose summands go beyond is found out and made again.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.cpu.reduce_scatter import AllToAllReduceScatter, summands_of_all_ranks
from torchtrain.devices import device_kind
from torchtrain.distributed.connections import on_one_machine
from torchtrain.distributed.process_group import all_reduce
from torchtrain.torch_internals import DefaultReduceScatter

HEADROOM_BITS = 6  # by which the largest summand may grow from one step to the next
SUM_BITS = 62  # of an int64, with one to spare for what rounding adds
MIN_SPACING = -126  # its inverse must be a float32
CPU_BLOCK, BLOCK = 1 << 15, 1 << 22  # elements of a shard that are added at once; those of a CPU fit its cache
UNKNOWN = -(1 << 20)


class ExactSums(Stateful):
    """The spacing, on all ranks alike. Checkpoints hold what it depends on."""

    def __init__(self, device: torch.device) -> None:
        self.exponent = UNKNOWN  # of a power of two above the last step's largest summand
        self.device = device
        self.limit = self.spacing = 0  # exponents of two

    def state_dict(self) -> dict[str, Any]:
        return {"exponent": torch.tensor(self.exponent)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.exponent = int(state_dict.get("exponent", self.exponent))

    def begin(self, summands: int) -> None:
        """Call it before the first backward of a step. ``summands``: at most as many add up to an element."""
        self.limit = self.exponent + HEADROOM_BITS
        self.spacing = max(MIN_SPACING, self.limit + (summands - 1).bit_length() - SUM_BITS)
        # Of this step's summands. One for each ``see``: stages of a pipeline come there on streams of their own.
        self.largest = [torch.zeros((), device=self.device)]

    def see(self, summands: Tensor) -> None:
        """Note how large they are, before they are rounded."""
        low, high = summands.aminmax()
        self.largest.append(torch.maximum(-low, high).float())

    def rounded(self, summands: Tensor) -> Tensor:
        """Multiples of the spacing: int64."""
        return torch.mul(summands.float(), 2.0**-self.spacing).round_().to(torch.int64)

    @torch.no_grad()
    def finish(self, parts: Sequence[nn.Module]) -> bool:
        """Call it after the last backward: turns sums into gradients. The host waits for the device.

        False where sums may have overflown: the step must be made again. If a summand is not finite, gradients are NaN.
        """
        gradients = [
            cast(DTensor, p.grad).to_local() for part in parts for p in part.parameters() if p.grad is not None
        ]
        maximum = torch.stack(self.largest).nan_to_num(nan=math.inf, posinf=math.inf).amax()  # one over ranks loses NaN
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
    """Takes gradients in ``dtype`` from FSDP, and gives it their sums over the shards in multiples of the spacing.

    ``mesh``: (replicate, shard). ``transport``, ``parallelism.fsdp_exact_transport``: "all_to_all" sends gradients as
    they are, and rounds where they arrive; "ring" rounds before, and sends 8 bytes each.
    """

    def __init__(self, sums: ExactSums, dtype: torch.dtype, mesh: DeviceMesh, transport: str) -> None:
        self.sums = sums
        self.dtype = dtype
        shards = mesh.get_group(1)
        self.ranks = shards.size()
        near = device_kind(mesh.device_type) == "cpu" or on_one_machine(shards)
        self.all_to_all = transport == "all_to_all" or (transport == "auto" and near)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        filled = self.input
        if filled is not None:
            self.sums.see(filled)
            if self.ranks == 1:
                filled.mul_(2.0**-self.sums.spacing).round_()  # FSDP copies them to the output, and calls nothing
        return super().allocate(size, dtype=self.dtype if filled is None else dtype, device=device)

    def reduce(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        if not self.all_to_all:
            DefaultReduceScatter()(output, self.sums.rounded(summands), group, dist.ReduceOp.SUM)
            return
        block = CPU_BLOCK if output.device.type == "cpu" else BLOCK
        columns = torch.split(summands_of_all_ranks(summands, group), block, dim=1)
        for total, column in zip(torch.split(output, block), columns, strict=True):
            torch.sum(self.sums.rounded(column), dim=0, out=total)
