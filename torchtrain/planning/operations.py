"""The operations of a step: what each computes, moves and sends, from its arguments."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.torch_internals import _resolve_process_group as resolve_process_group
from torchtrain.torch_internals import tree_iter

aten = torch.ops.aten


@dataclass
class Operation:
    """One operation of the device, or one collective, in the order in which the host issues them."""

    name: str
    phase: str
    module: str
    flops: int = 0  # of matrix products and attention
    dtype: torch.dtype = torch.float32  # that these are computed in
    bytes: int = 0  # read and written in the device's memory; of a collective: that it has to send or receive in all
    axis: str = ""  # of the mesh, for a collective
    ranks: tuple[int, ...] = ()
    peer: int | None = None  # of a message
    share: float = 1.0  # of the operations that a kernel computes: attention skips what is masked
    fsdp: bool = False  # a collective of fully_shard, on a stream of its own


def collective(func: Any, args: tuple[Any, ...], outputs: Any) -> tuple[str, dist.ProcessGroup, int] | None:
    """Name, group and bytes of the collective ``func``, or None where it is none.

    Bytes are those of the whole: what an all-gather gives, what a reduction takes, what a send or receive moves.
    """
    namespace, name = func.namespace, func._opname
    if namespace == "c10d":
        group = next(
            dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)
        )
        tensors = [[t for t in tree_iter(a) if isinstance(t, Tensor)] for a in args]
        sizes = [sum(t.nbytes for t in some) for some in tensors if some]
        return name.strip("_"), group, max(sizes, default=0)
    if namespace == "_c10d_functional" and args and isinstance(args[-1], str):  # not such as wait_tensor
        group = resolve_process_group(args[-1])
        sizes = [t.nbytes for t in tree_iter((args, outputs)) if isinstance(t, Tensor)]
        return name, group, max(sizes, default=0)
    return None


def attention_flops(name: str, args: tuple[Any, ...]) -> tuple[int, float]:
    """Of the two products over all pairs, forward, or of the five of the backward; and which share is not masked."""
    backward = "backward" in name
    q, k = (args[1], args[2]) if backward else (args[0], args[1])
    bs, heads, seq, dim = q.shape
    flops = (10 if backward else 4) * int(bs * heads * seq * k.shape[2] * dim)
    return flops, 1 - seq / (2 * k.shape[2])  # causal, aligned with the last key


def matrix_flops(func: Any, args: Any) -> int:
    """Of a matrix product: 2 m k n."""
    packet = func.overloadpacket
    if packet in (aten.mm, aten._scaled_mm):
        return 2 * int(args[0].shape[0] * args[0].shape[1] * args[1].shape[1])
    if packet is aten.addmm:
        return 2 * int(args[1].shape[0] * args[1].shape[1] * args[2].shape[1])
    if packet in (aten.bmm, aten.baddbmm):
        a, b = args[-2:] if packet is aten.baddbmm else args[:2]
        return 2 * int(prod(a.shape) * b.shape[2])
    return 0


VIEWS = (aten._unsafe_view, aten._reshape_alias)  # which their schemas do not say
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
OVERWRITES = ("copy_", "fill_", "zero_")
LOOKUPS = ("embedding", "gather", "index", "nll_loss_forward")


def moved_bytes(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    """That ``func`` reads and writes: an argument that it only overwrites is not read."""
    name = func._opname
    if name in LOOKUPS:  # of a table they read as much as they write
        return 2 * nbytes(outputs)
    if name == "all_gather_copy_in":  # into this rank's part of a buffer that is the second argument
        return 2 * nbytes(args[0])
    schema = func._schema
    moved = 0 if schema.is_mutable else nbytes(outputs)
    for i, argument in enumerate(schema.arguments):
        size = nbytes(args[i] if i < len(args) else kwargs.get(argument.name))
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = written and (argument.is_out or name in OVERWRITES)
        moved += size * (written + (not overwritten))
    return moved


def nbytes(value: Any) -> int:
    return sum(t.nbytes for t in tree_iter(value) if isinstance(t, Tensor))
