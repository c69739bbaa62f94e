"""What stands in for FSDP's reduce-scatter: on one rank, over gloo, and for exact sums."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtrain.torch_internals import ReduceScatter


class StandIn(ReduceScatter):
    """A reduce-scatter of our own. For each group of parameters FSDP does in turn:

    allocate(whole size)     -> the input, into which FSDP copies the gradients of the group
    allocate(a shard's size) -> the output
    __call__(output, input)     fills the output with the sums over all ranks; on one rank FSDP
                                copies the input to the output instead
    """

    input: Tensor | None = None  # between the two calls of ``allocate``, which it tells apart

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is None:
            self.input = self.make_input(size, dtype, device)
            return self.input
        filled, self.input = self.input, None
        return self.make_output(filled, size, dtype, device)

    def make_input(self, size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def make_output(self, filled: Tensor, size: Any, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG002
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Only what ``apply_fsdp`` has FSDP ask for: a sum that is there when this returns."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        self.reduce(output_tensor, input_tensor, group)

    def reduce(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``output`` with the sums. FSDP does not ask for it on one rank."""
        raise NotImplementedError


class NoReduceScatter(StandIn):
    """On one rank: the input is the output, and FSDP's copy from one to the other costs nothing."""

    def make_output(self, filled: Tensor, *_: Any) -> Tensor:
        return filled


class AllToAllReduceScatter(StandIn):
    """For gloo, whose own takes longer: every rank gets all summands of its shard and adds them itself."""

    def reduce(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        torch.sum(summands_of_all_ranks(summands, group), dim=0, out=output)


def summands_of_all_ranks(summands: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all ranks have for this rank's shard: (ranks, elements of the shard)."""
    gathered = torch.empty_like(summands)
    dist.all_to_all_single(gathered, summands, group=group)
    return gathered.view(group.size(), -1)


def fit_to_cpu(model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Over gloo: reduce by an all-to-all, and gather each block while the one before computes."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:
            module.set_custom_reduce_scatter(AllToAllReduceScatter())
            # Where there are no streams, only this lets a prefetched block arrive while another computes.
            module._set_unshard_async_op(True)
    for block, following in pairwise(blocks):
        cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
