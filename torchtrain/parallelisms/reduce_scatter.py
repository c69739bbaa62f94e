"""Reduce-scatter for FSDP by an all-to-all and local sums."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.torch_internals import ReduceScatter


class AllToAllReduceScatter(ReduceScatter):
    """Reduce-scatter in which each rank receives all summands of its shard and adds them itself.

    For each group of parameters, FSDP makes these calls:

    allocate(full size)       returns the input, into which FSDP copies the gradients of the group
    allocate(size of a shard) returns the output
    __call__(output, input)   fills the output with the sums over all ranks; on one rank FSDP copies the input to the
                              output instead
    """

    input: Tensor | None = None  # set between the two calls of ``allocate``

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.empty(*size, dtype=dtype, device=device)
        self.input = tensor if self.input is None else None
        return tensor

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Supports only what FSDP requests as configured by ``apply_fsdp``: synchronous sums."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        self.reduce(output_tensor, input_tensor, group)

    def reduce(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``output``, this rank's shard, with the sums of the ``summands`` of all ranks."""
        torch.sum(summands_of_all_ranks(summands, group), dim=0, out=output)


def summands_of_all_ranks(summands: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The summands of this rank's shard from all ranks, of shape (ranks, elements of the shard)."""
    gathered = torch.empty_like(summands)
    dist.all_to_all_single(gathered, summands, group=group)
    return gathered.view(group.size(), -1)
