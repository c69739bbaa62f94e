"""Grains: what the smallest shards would compute, so that a step has the same bits on any layout.

A grain is the share of tensor rank v of V and of chunk c of C of each sequence, where V and C, the options of [grains],
do not depend on the layout. Every rank computes its grains one by one, with the same shapes on every layout. What is
summed over grains is summed in a fixed binary tree (``tree.py``), of which each rank has a subtree. V and C are powers
of two, because only then are the subtrees of all degrees nested.

Sums are nested in one order: tensor grains (the innermost), then context chunks, then rows (exact sums).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.mesh import Mesh
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.plugins.exact_sums.tree import of_all_ranks


class Grains:
    """The grains of this rank.

    Attributes:
        tensor, context: V and C, the numbers of tensor grains and of chunks of all ranks.
        own: the number of tensor grains of this rank, which are consecutive.
        first: the first of them.
        chunks: the context chunks of this rank, in the order in which its part of a sequence has them.
        leaves: positions in ``chunks`` in the order of the tree's leaves, which is 0, C - 1, 1, C - 2, and so on:
            ``local_sequence`` gives each rank chunks from both ends, so that its leaves are consecutive.
        sharded: whether this rank has only its slice of each chunk of the residual stream (sequence parallelism).
        tensor_group, context_group: the ranks with other grains; None if there are none.
    """

    def __init__(self, mesh: Mesh, tensor: int, context: int, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.tensor, self.context = tensor, context
        self.ranks = mesh.degrees.tensor
        self.rank = mesh.tensor.get_local_rank()
        self.own = tensor // self.ranks
        self.first = self.own * self.rank
        chunks = torch.arange(context)
        if mesh.degrees.context > 1:
            chunks = local_sequence(chunks, mesh.context, dim=0)
        self.chunks: list[int] = chunks.tolist()
        self.leaves = sorted(
            range(len(self.chunks)), key=lambda i: min(2 * self.chunks[i], 2 * (context - 1 - self.chunks[i]) + 1)
        )
        self.sharded = sequence_parallel and self.ranks > 1
        self.tensor_group: dist.ProcessGroup | None = mesh.tensor.get_group() if self.ranks > 1 else None
        self.context_group: dist.ProcessGroup | None = mesh.context.get_group() if mesh.degrees.context > 1 else None

    def split(self, x: Tensor) -> list[Tensor]:
        """The chunks of ``x`` (bs, seq, ...), each contiguous, in the order of ``chunks``."""
        return [part.contiguous() for part in x.chunk(len(self.chunks), dim=1)]

    def slices(self, x: Tensor) -> Tensor:
        """The slices of ``x`` (bs, seq, ...), the residual stream, as a view (tensor ranks, bs, chunks, ..., ...).

        A slice has a part of each chunk, not of the whole sequence: else it would depend on the context degree.
        """
        bs, seq, *rest = x.shape
        size = seq // (len(self.chunks) * self.ranks)
        return x.view(bs, len(self.chunks), self.ranks, size, *rest).movedim(2, 0)

    def gather(self, x: Tensor) -> Tensor:
        """The full residual stream of the ranks' slices ``x``; ``x`` itself without sequence parallelism."""
        if self.tensor_group is None or not self.sharded:
            return x
        parts = of_all_ranks(x, self.tensor_group)
        by_chunk = parts.view(self.ranks, len(x), len(self.chunks), -1, *x.shape[2:])
        return by_chunk.movedim(0, 2).flatten(1, 3)

    def own_slice(self, x: Tensor) -> Tensor:
        """This rank's slice of ``x``, which all tensor ranks have; ``x`` itself without sequence parallelism."""
        return self.slices(x)[self.rank].flatten(1, 2) if self.sharded else x
