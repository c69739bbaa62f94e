"""The operations of a step: what each computes, moves and sends, from its arguments."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torchtrain.torch_internals import _resolve_process_group, tree_leaves

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
        return name.strip("_"), group, max(nbytes(a) for a in args)
    if namespace == "_c10d_functional" and args and isinstance(args[-1], str):  # not such as wait_tensor
        group = _resolve_process_group(args[-1])
        return name, group, max((t.nbytes for t in tensors_in((args, outputs))), default=0)
    return None


def flops_of(func: Any, name: str, args: tuple[Any, ...]) -> tuple[int, float]:
    """FLOPs of a matrix product or attention, 0 of others; and the share of them that its kernel computes.

    Of attention: the two products over all pairs, forward, or the five of the backward. The share is that of a causal
    mask, aligned with the last key, whatever else is masked.
    """
    if getattr(func, "overloadpacket", None) in PRODUCTS:
        return int(flop_registry[func.overloadpacket](*args)), 1.0
    if "attention" not in name:
        return 0, 1.0
    backward = "backward" in name
    # The gradient comes before queries and keys, but for flex_attention.
    q, k = args[1:3] if backward and not name.startswith("flex") else args[:2]
    bs, heads, seq, dim = q.shape
    flops = (10 if backward else 4) * int(bs * heads * seq * k.shape[2] * dim)
    return flops, 1 - seq / (2 * k.shape[2])


PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm)
VIEWS = (aten._unsafe_view, aten._reshape_alias)  # which their schemas do not say
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
OVERWRITES = ("copy_", "fill_", "zero_")
LOOKUPS = ("embedding", "gather", "index", "nll_loss_forward")


def moved_bytes(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    """Bytes of device memory that ``func`` reads and writes; an argument that it only overwrites is not read."""
    name = func._opname
    if name in LOOKUPS:  # of a table they read as much as they write
        return 2 * nbytes(outputs)
    if name == "all_gather_copy_in":  # into this rank's part of a buffer that is the second argument
        return 2 * nbytes(args[0])
    moved = 0 if func._schema.is_mutable else nbytes(outputs)
    for i, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = written and (argument.is_out or name in OVERWRITES)
        moved += nbytes(args[i] if i < len(args) else kwargs.get(argument.name)) * (written + (not overwritten))
    return moved


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes(value: Any) -> int:
    return sum(t.nbytes for t in tensors_in(value))
