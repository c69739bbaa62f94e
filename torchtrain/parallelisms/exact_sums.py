"""Sums of gradients that have the same bits in any order and grouping: over microbatches, ranks and replicas.

A summand is the gradient of one microbatch on one rank. Each is rounded to a multiple of a power of two, the spacing, and
added as a 64-bit integer, which is exact. The spacing is the finest at which the sums of the step cannot overflow, as the
largest summand of the step before tells; a step whose summands go beyond is found out, and made again.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

from torchtrain.distributed.process_group import all_reduce
from torchtrain.log import logger

HEADROOM_BITS = 6  # by which summands may grow from one step to the next
SUM_BITS = 62  # of an int64, with one to spare for what rounding adds
MIN_SPACING = -126  # its inverse must be a float32
CPU_BLOCK = 1 << 15  # elements that are added at once, within the cache
UNKNOWN = -(1 << 20)


class ExactSums(Stateful):
    """The spacing of all gradients of a model: the same on every layout, and saved, so that a resumed run has it, too."""

    def __init__(self, device: torch.device) -> None:
        self.exponent = torch.tensor(UNKNOWN)  # of two, above the largest summand of the last step
        self.largest = torch.zeros((), device=device)  # summand of this step
        self.limit = self.spacing = 0  # both exponents of two

    def state_dict(self) -> dict[str, Any]:
        return {"exponent": self.exponent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: the tensor of ``state_dict`` is this one's own."""

    def begin(self, summands: int) -> None:
        """Call it before the first backward of a step. ``summands``: at most as many add up to an element."""
        self.limit = int(self.exponent) + HEADROOM_BITS
        self.spacing = max(MIN_SPACING, self.limit + (summands - 1).bit_length() - SUM_BITS)
        self.largest.zero_()

    def see(self, summands: Tensor) -> None:
        """Note the size of ``summands`` before they are rounded."""
        low, high = summands.aminmax()
        torch.maximum(self.largest, torch.maximum(-low, high).float(), out=self.largest)

    def rounded(self, summands: Tensor) -> Tensor:
        """Multiples of the spacing, as int64."""
        return (summands * 2.0**-self.spacing).round_().to(torch.int64)

    @torch.no_grad()
    def finish(self, parts: Sequence[nn.Module]) -> bool:
        """Call it after the last backward: turn the sums into gradients. The host waits for the device here.

        False where they may have overflown: the step must be made again. Gradients are NaN where a summand is not finite.
        """
        gradients = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        self.largest.nan_to_num_(nan=math.inf)  # a maximum over ranks may lose NaN
        all_reduce(self.largest, op=dist.ReduceOp.MAX)
        largest = self.largest.item()
        if not math.isfinite(largest):
            torch._foreach_mul_(local, math.nan)
            return True
        exponent = math.frexp(largest)[1]
        if largest > 0:
            self.exponent.fill_(exponent)
        if largest > 0 and exponent > self.limit:
            if self.limit > UNKNOWN + HEADROOM_BITS:
                logger.info("gradients have grown more than 2^%d times: the step is made again", HEADROOM_BITS)
            return False
        torch._foreach_mul_(local, 2.0**self.spacing)
        return True


class ExactReduceScatter(ReduceScatter):
    """Takes gradients in their own ``dtype`` from FSDP, and gives it sums as int64."""

    def __init__(self, sums: ExactSums, dtype: torch.dtype, ranks: int, *, all_to_all: bool) -> None:
        """``all_to_all``: send gradients in ``dtype``, and round where they arrive; else send rounded ones, 8 bytes each."""
        self.sums = sums
        self.dtype = dtype
        self.ranks = ranks
        self.all_to_all = all_to_all
        self.input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The input, which FSDP asks for first and fills; then the output."""
        if self.input is None:
            self.input = torch.empty(*size, dtype=self.dtype, device=device)
            return self.input
        summands, self.input = self.input, None
        self.sums.see(summands)
        if self.ranks == 1:
            summands.mul_(2.0**-self.sums.spacing).round_()  # FSDP then copies them to the output, and calls nothing
        return torch.empty(*size, dtype=torch.int64, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Only what ``apply_fsdp`` has FSDP ask for: a sum that is there when this returns."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        if not self.all_to_all:
            DefaultReduceScatter()(output_tensor, self.sums.rounded(input_tensor), group, op)
            return
        summands = torch.empty_like(input_tensor)
        dist.all_to_all_single(summands, input_tensor, group=group)
        block = CPU_BLOCK if output_tensor.device.type == "cpu" else output_tensor.numel()
        columns = summands.view(self.ranks, -1).split(block, dim=1)
        for column, total in zip(columns, output_tensor.split(block), strict=True):
            total.copy_(self.sums.rounded(column[0]))
            for summand in column[1:]:
                total += self.sums.rounded(summand)
