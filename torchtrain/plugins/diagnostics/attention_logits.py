"""Root mean square and maximum of the logits of attention, which fused kernels do not store."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.hooks import RemovableHandle

from torchtrain.models.spec import Decoder
from torchtrain.parallelisms.context_parallel import local_sequence, whole_sequence

MAX_LOGITS = 1 << 24
"""Number of logits that are computed at a time, in this rank's memory."""


class AttentionLogits:
    """Computes the logits q k^T / sqrt(head_dim) of each block again, from the q and k that its attention gets.

    These are a third of the matrix products in forward and backward of causal attention. Logits that the mask excludes
    do not count. Blocks must not be compiled: the hooks would be compiled with them.
    """

    def __init__(self, model_parts: Sequence[Decoder], context: DeviceMesh, layers: dict[nn.Module, int]) -> None:
        """``context``: the mesh over which sequences are sharded; ``layers``: index of each block in the results."""
        self.context = context
        found: list[nn.Module] = []

        def keep(inner: nn.Module) -> nn.Module:
            found.append(inner)
            return inner

        for part in model_parts:
            part.replace_inner_attention(keep)  # the only interface that names these modules
        self.modules = [(i, inner) for block, i in layers.items() for inner in found if inner in set(block.modules())]
        self.handles: list[RemovableHandle] = []

    def start(self, sums: Tensor, maxima: Tensor) -> None:
        """Observe forwards until ``stop``. Adds to ``sums``, float64 (2, layers): sums of squares, and numbers of
        logits; updates ``maxima``, float64 (layers,)."""
        for layer, inner in self.modules:
            hook = self._hook(sums[:, layer], maxima[layer])
            self.handles.append(inner.register_forward_pre_hook(hook, with_kwargs=True))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _hook(self, sums: Tensor, maximum: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        @torch.no_grad()
        def add(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            q, k, _, mask = (*args, options.get("mask")) if len(args) == 3 else args
            square, count, largest = self._statistics(q, k, mask)
            sums.add_(torch.stack((square, count)))
            torch.maximum(maximum, largest, out=maximum)

        return add

    def _statistics(self, q: Tensor, k: Tensor, mask: Tensor | BlockMask | None) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(k.shape[2] * self.context.size())
        if self.context.size() > 1:
            parts = [torch.empty_like(k) for _ in range(self.context.size())]
            dist.all_gather(parts, k.contiguous(), group=self.context.get_group())
            k = whole_sequence(torch.stack(parts))
            positions = local_sequence(positions, self.context, dim=0)
        return logit_statistics(q, k, mask, positions)


def logit_statistics(
    q: Tensor, k: Tensor, mask: Tensor | BlockMask | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of squares, number and maximum of the logits q k^T / sqrt(head_dim) that ``mask`` leaves: float64 scalars.

    Products are computed in the dtype of ``q``.

    Args:
        q: (bs, heads, q_seq, head_dim).
        k: (bs, kv_heads, seq, head_dim).
        mask: as for ``attend``; None: a causal mask.
        positions: int64 (q_seq,) on the CPU: the positions of the queries in the sequence.
    """
    (bs, heads, q_seq, head_dim), (_, kv_heads, seq, _) = q.shape, k.shape
    square, count = (torch.zeros((), dtype=torch.float64, device=q.device) for _ in range(2))
    maximum = torch.full_like(square, -math.inf)
    size = max(1, MAX_LOGITS // (bs * heads * seq))
    for first in range(0, q_seq, size):
        queries = q[:, :, first : first + size]
        own = positions[first : first + size]
        end = int(own.max()) + 1  # no query attends to later keys
        # The heads that share keys are one batch of a matrix product.
        grouped = queries.reshape(bs, kv_heads, -1, head_dim)
        logits = (grouped @ k[:, :, :end].transpose(2, 3)).view(bs, heads, -1, end).float()
        allowed = _allowed(mask, own.to(q.device), first, end, bs)
        count += allowed.expand(bs, 1, -1, -1).sum() * heads
        square += logits.masked_fill(~allowed, 0.0).square().sum(dim=-1).sum(dtype=torch.float64)
        torch.maximum(maximum, logits.masked_fill(~allowed, -math.inf).max().double(), out=maximum)
    return square / head_dim, count, maximum / math.sqrt(head_dim)


def _allowed(mask: Tensor | BlockMask | None, positions: Tensor, first: int, end: int, bs: int) -> Tensor:
    """The part of ``mask`` of the queries from number ``first`` on and the first ``end`` keys, (1 or bs, 1, n, end)."""
    keys = torch.arange(end, device=positions.device)
    if mask is None:
        return (positions[:, None] >= keys)[None, None]
    if isinstance(mask, BlockMask):
        rows = torch.arange(bs, device=keys.device)[:, None, None, None]
        queries = torch.arange(first, first + len(positions), device=keys.device)[:, None]
        return mask.mask_mod(rows, torch.zeros_like(rows), queries, keys)
    return mask[:, :, first : first + len(positions), :end]
