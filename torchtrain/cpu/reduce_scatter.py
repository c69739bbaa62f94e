"""What stands in for FSDP's reduce-scatter: over gloo, on one rank with a CPU, and for exact sums."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.torch_internals import ReduceScatter


class AllToAllReduceScatter(ReduceScatter):
    """For gloo, whose own takes longer: every rank gets all summands of its shard and adds them itself.

    For each group of parameters FSDP does in turn:

    allocate(whole size)     -> the input, into which FSDP copies the gradients of the group
    allocate(a shard's size) -> the output
    __call__(output, input)     fills the output with the sums over all ranks; on one rank FSDP
                                copies the input to the output instead
    """

    input: Tensor | None = None  # None, but between the two calls of ``allocate``

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(*size, dtype=dtype, device=device)
        self.input = tensor if self.input is None else None
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Only what ``apply_fsdp`` has FSDP ask for: a sum that is there when this returns."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        self.reduce(output_tensor, input_tensor, group)

    def reduce(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``output`` with the sums over all ranks of their ``summands``."""
        torch.sum(summands_of_all_ranks(summands, group), dim=0, out=output)


class NoReduceScatter(AllToAllReduceScatter):
    """On one rank, with nothing to reduce: the input is the output, and FSDP's copy between them costs nothing.

    For CPUs: on a GPU, FSDP lets the next group have the input's memory while another stream still reads the output.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None:
            return super().allocate(size, dtype=dtype, device=device)
        filled, self.input = self.input, None
        return filled


def summands_of_all_ranks(summands: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all ranks have for this rank's shard: (ranks, elements of the shard)."""
    gathered = torch.empty_like(summands)
    dist.all_to_all_single(gathered, summands, group=group)
    return gathered.view(group.size(), -1)
