"""The experts of a layer: each token's rows go to its experts, wherever these are, and come back.

Shapes in comments: n = tokens of this rank, k = experts per token, E = experts, rows = pairs of a token and an expert.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torchtrain.distributed.mesh import local


class Experts(nn.Module):
    """SwiGLU experts, w2(silu(w1 x) * w3 x), with one 3-D parameter for each of the three projections of all experts.

    ``expert_group``: the ranks that divide the experts among them; None: this rank has all. With tensor parallelism a
    rank has a part of each expert's inner width, and the results are summands. ``as_summand``: with exact sums of
    gradients, gets each weight for the rows of one rank of ``expert_group``, and its name (``exact.py``).
    """

    expert_group: dist.ProcessGroup | None = None
    as_summand: Callable[[Tensor, str], Tensor] | None = None
    rows_computed = 0
    """Of the last forward; the rows of all ranks are those that the routers have sent, since none is dropped."""

    def __init__(self, dim: int, inner: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.w1 = nn.Parameter(torch.empty(experts, inner, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, inner))
        self.w3 = nn.Parameter(torch.empty(experts, inner, dim))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Outputs (n, k, dim) of the experts ``chosen`` (n, k), numbers from 0, for the tokens ``x`` (n, dim)."""
        # Stable, so that an expert's rows are in the order of the tokens.
        order = chosen.flatten().argsort(stable=True)  # of the rows, by expert
        rows = x[order // chosen.shape[1]]
        counts = count_experts(chosen, self.experts)
        if self.expert_group is None:
            outputs = self.compute(rows, sizes_of(counts, len(rows)))
        else:
            outputs = self.compute_elsewhere(rows, counts, self.expert_group)
        return outputs[order.argsort().view(chosen.shape)]  # each row back to its place

    def compute_elsewhere(self, rows: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Outputs of ``rows``, which are in the order of their experts, by the ranks of ``group`` that have these.

        ``counts``: rows of each expert. Rank r of ``group`` has the experts from r * E / ranks on.
        """
        received = torch.empty_like(counts)  # the rows of this rank's experts: of those from rank 0, then rank 1, ...
        dist.all_to_all_single(received, counts, group=group)
        by_source = received.view(group.size(), -1)  # (ranks, E / ranks)
        # The sizes of messages must be known to the host, which waits here for the routers of all these ranks.
        sent_sizes = sizes_of(counts.view_as(by_source).sum(1), len(rows))
        received_sizes = sizes_of(by_source.sum(1), len(rows))
        arrived = AllToAll.apply(rows, sent_sizes, received_sizes, group)
        if self.as_summand is not None:  # as each of these ranks would compute its rows
            of_ranks = zip(arrived.split(received_sizes), by_source, strict=True)
            outputs = torch.cat([self.compute(own, sizes_of(sizes, len(own))) for own, sizes in of_ranks])
            self.rows_computed = len(arrived)
            return AllToAll.apply(outputs, received_sizes, sent_sizes, group)  # type: ignore[no-any-return]
        experts = torch.arange(by_source.shape[1], device=rows.device).repeat(group.size())
        order = experts.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
        outputs = self.compute(arrived[order], sizes_of(by_source.sum(0), len(arrived)))
        return AllToAll.apply(outputs[order.argsort()], received_sizes, sent_sizes, group)  # type: ignore[no-any-return]

    def compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Outputs of ``rows``, of which the first ``sizes[0]`` are of this rank's first expert, and so on."""
        self.rows_computed = len(rows)
        w1, w2, w3 = (local(weight) for weight in (self.w1, self.w2, self.w3))
        if self.as_summand is not None:
            w1, w2, w3 = (self.as_summand(weight, name) for name, weight in (("w1", w1), ("w2", w2), ("w3", w3)))
        by_kernel = has_grouped_kernel(rows)
        return (swiglu_by_kernel if by_kernel else swiglu_by_expert)(rows, w1, w2, w3, sizes)


def count_experts(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is in ``chosen``: int64 of shape (E,)."""
    if not has_values(chosen):
        return chosen.new_zeros(experts)
    return torch.bincount(chosen.flatten(), minlength=experts)


def sizes_of(counts: Tensor, rows: int) -> list[int]:
    """``counts``, whose sum is ``rows``, as numbers, for which the host waits; without values as if they were equal."""
    if not has_values(counts):
        return [rows // len(counts) + (expert < rows % len(counts)) for expert in range(len(counts))]
    return counts.tolist()  # type: ignore[no-any-return]


def has_values(tensor: Tensor) -> bool:
    """False where only shapes are computed: on the meta device, and by the planner."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def swiglu_by_expert(rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, sizes: Sequence[int]) -> Tensor:
    """Outputs of ``rows``, of which the first ``sizes[0]`` are of the first expert of each weight, and so on.

    The bits of an expert's outputs depend on its rows alone: where a CPU's vectors do not divide the elements of a
    tensor, SiLU rounds the last ones otherwise.
    """
    # unbind, whose backward stacks the gradients of all experts once; that of an index would add matrices of zeros.
    experts = zip(rows.split(list(sizes)), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, a)) * F.linear(x, c), b) for x, a, b, c in experts])


def swiglu_by_kernel(rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, sizes: Sequence[int]) -> Tensor:
    """``swiglu_by_expert`` with one kernel for each projection of all experts."""
    hidden = F.silu(grouped_product(rows, w1, sizes)) * grouped_product(rows, w3, sizes)
    return grouped_product(hidden, w2, sizes)


def grouped_product(rows: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """The product of the rows of each expert and its matrix in ``weight`` (E, out, in): (rows, in) becomes (rows, out).

    The kernel needs groups that begin at multiples of 16 bytes: they are padded.
    """
    counts = torch.tensor(sizes)
    padded = (counts + 7) // 8 * 8
    ends = padded.cumsum(0)
    moved = (ends - padded) - (counts.cumsum(0) - counts)  # by how many rows each group is moved
    at = (torch.arange(len(rows)) + moved.repeat_interleave(counts)).to(rows.device)
    spaced = rows.new_zeros(int(ends[-1]), rows.shape[1]).index_copy(0, at, rows)
    offsets = ends.to(rows.device, torch.int32)
    return F.grouped_mm(spaced, weight.transpose(1, 2), offs=offsets)[at]


def has_grouped_kernel(rows: Tensor) -> bool:
    """Whether the device has a kernel for ``grouped_product``: GPUs from Hopper on, in bfloat16."""
    return rows.is_cuda and rows.dtype is torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)


class AllToAll(torch.autograd.Function):
    """Send ``sent[r]`` rows to rank r of ``group``, and receive ``received[r]`` rows from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return exchange(grads[0], received, sent, ctx.group), None, None, None


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
