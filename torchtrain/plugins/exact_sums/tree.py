"""Sums in a fixed binary tree, ((0 + 1) + (2 + 3)) + ...: the same bits however its leaves are divided among ranks.

The number of leaves is a power of two, and each rank of a group has as many consecutive ones as the others. So it has a
subtree, whose root it computes alone; the ranks then exchange the roots, and add them in the same order.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class TreeSum:
    """The sum of leaves that arrive one after the other; of n leaves at most log2(n) + 1 sums exist at once."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, Tensor]] = []  # as the digits of a binary counter: number of leaves, and their sum

    def add(self, leaf: Tensor) -> None:
        count = 1
        while self.sums and self.sums[-1][0] == count:
            leaf = self.sums.pop()[1] + leaf
            count *= 2
        self.sums.append((count, leaf))

    def root(self) -> Tensor:
        ((_, total),) = self.sums
        return total


def tree_sum(leaves: Iterable[Tensor]) -> Tensor:
    """The sum of a power of two of tensors. The result of a single leaf is the leaf itself."""
    tree = TreeSum()
    for leaf in leaves:
        tree.add(leaf)
    return tree.root()


def scatter_tree_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of ``group`` of their part for this rank.

    ``parts`` (ranks, ...): this rank's root of each part, in the order of the ranks to which they go. It is an
    all-to-all, which sends as many bytes as a reduce-scatter.
    """
    parts = parts.contiguous()
    roots = torch.empty_like(parts)
    dist.all_to_all_single(roots, parts, group=group)
    return tree_sum(roots.unbind())


def all_tree_sum(root: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of ``group``, on each of them: a reduce-scatter and an all-gather, as in an all-reduce."""
    ranks, size = group.size(), root.numel()
    padded = root.new_zeros(ranks, -(-size // ranks))
    padded.view(-1)[:size] = root.flatten()
    own = scatter_tree_sum(padded, group)
    return of_all_ranks(own, group).view(-1)[:size].view(root.shape)


def of_all_ranks(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``own`` of all ranks of ``group``, of shape (ranks, ...)."""
    gathered = own.new_empty(group.size(), *own.shape)
    dist.all_gather(list(gathered.unbind()), own.contiguous(), group=group)
    return gathered
