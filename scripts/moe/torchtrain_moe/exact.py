"""Exact sums of the gradients of experts that ranks divide among them (``training.sums = "exact"``).

The summands of an exact sum are the gradients of one microbatch on one rank, which are rounded. With an expert degree
of 1 each rank computes them for its own tokens; so the rank that has an expert computes with the rows of each rank by
themselves, and rounds the gradient of each.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtrain.distributed.process_group import all_reduce
from torchtrain.parallelisms.reduce_scatter import summands_of_all_ranks
from torchtrain.plugins.exact_sums.exact_sums import ExactSums
from torchtrain.torch_internals import ReduceScatter


class ExactExpertSums(ReduceScatter):
    """The exact sums of a step for the weights of a layer's experts, in the place of FSDP's.

    ``mesh``, over which FSDP shards them, has the dimensions (replicate, shard); ``dtype`` is that of gradients. FSDP
    cannot get several summands from a rank. So its own sums are not computed (``__call__``), and ``after_all_reduce``
    writes the exact ones in their place.
    """

    next_is_input = True  # FSDP calls ``allocate`` for its input, and then for its output

    def __init__(self, sums: ExactSums, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self.sums = sums
        self.mesh = mesh
        self.dtype = dtype
        self.totals: dict[str, Tensor] = {}  # of each weight, in multiples of the spacing

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of the weight ``name``, by one microbatch of one rank."""
        self.sums.see(gradient)
        rounded = self.sums.rounded(gradient)
        self.totals[name] = self.totals[name].add_(rounded) if name in self.totals else rounded

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        is_input, self.next_is_input = self.next_is_input, not self.next_is_input
        return torch.empty(*size, dtype=self.dtype if is_input else dtype, device=device)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Leave FSDP's output uninitialized."""

    def after_all_reduce(self, output: Tensor) -> None:
        """Fill ``output``, this rank's shard of all weights as FSDP orders them, after the last microbatch."""
        shards = self.mesh.get_group(1)
        parts = []
        for name in ("w1", "w2", "w3"):
            total = self.totals.pop(name)
            if total.is_cuda:
                total.record_stream(torch.cuda.current_stream())
            padded = F.pad(total, (0, 0, 0, 0, 0, -len(total) % shards.size()))
            parts.append(padded.view(shards.size(), -1))
        torch.sum(summands_of_all_ranks(torch.cat(parts, dim=1).flatten(), shards), dim=0, out=output)
        all_reduce(output, group=self.mesh.get_group(0))


class Summand(torch.autograd.Function):
    """Returns ``weight``. Its backward also adds the gradient to ``sums``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: ExactExpertSums, name: str) -> Tensor:
        ctx.sums, ctx.name = sums, name
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.sums.add(ctx.name, grads[0])
        return grads[0], None, None
