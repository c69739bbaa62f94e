"""Operations of a training step: FLOPs, bytes moved and bytes sent, computed from their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torchtrain.plugins.planner.torch_internals import _resolve_process_group, tree_leaves

aten = torch.ops.aten


WAIT_FOR_MESSAGE = "wait_for_message"
"""Name of an operation: the wait for a message from ``peer``."""


@dataclass
class Operation:
    """An operation on the device, or a collective.

    Lists of operations are in the order in which the host issues them.
    """

    name: str
    phase: str
    """forward, loss, backward, recompute or update (``StepRecorder.phase``)."""
    module: str
    """Fully qualified name of the FSDP module that was running, or ""."""
    flops: int = 0
    """FLOPs of a matrix product or of attention; 0 for other operations."""
    dtype: torch.dtype = torch.float32
    """dtype in which the FLOPs are computed."""
    bytes: int = 0
    """Bytes read and written in the device's memory; for a collective, the bytes that ``collective`` returns."""
    axis: str = ""
    """For a collective, the name of the mesh axis."""
    ranks: tuple[int, ...] = ()
    """For a collective, the global ranks of its group."""
    peer: int | None = None
    """For a send, a receive, or the wait for a message, the global rank of the peer."""
    message: int = 0
    """For the wait for a message, how many other messages from ``peer`` were received after it and before the wait."""
    share: float = 1.0
    """Fraction of ``flops`` that the kernel computes, because attention skips masked blocks."""
    keys: float = 0.0
    """For attention, the mean number of keys of a query, without those that the mask excludes."""
    head_dim: int = 0
    """For attention, the size of a head."""
    fsdp: bool = False
    """Whether it is a collective of fully_shard, which runs on a separate stream."""
    fused_with_matmul: bool = False
    """For a collective, whether the compiler fuses it with a matrix product, to overlap both."""


def collective(func: Any, args: tuple[Any, ...], outputs: Any) -> tuple[str, dist.ProcessGroup, int] | None:
    """Return name, process group and bytes of a collective, or None if ``func`` is not a collective.

    The bytes are those of the output of an all-gather, of the input of a reduction, and of the tensor of a send or
    receive.
    """
    namespace, name = func.namespace, func._opname
    if namespace == "c10d":
        group = next(
            dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)
        )
        return name.strip("_"), group, max(nbytes(a) for a in args)
    if namespace == "_c10d_functional" and args and isinstance(args[-1], str):  # excludes wait_tensor
        group = _resolve_process_group(args[-1])
        return name, group, max((t.nbytes for t in tensors_in((args, outputs))), default=0)
    return None


def work_of(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``Operation`` that describe the FLOPs of a matrix product or of attention; {} for others.

    Attention has two matrix products over all pairs of queries and keys in forward, and five in backward. ``share`` and
    ``keys`` are those of a causal mask aligned with the last key, or of no mask; other masks count as causal.
    """
    if getattr(func, "overloadpacket", None) in MATMULS:
        return {"flops": int(flop_registry[func.overloadpacket](*args))}
    if "attention" not in name:
        return {}
    backward = "backward" in name
    q, k = args[:2]
    masked = True
    if not name.startswith("flex"):
        given = zip(func._schema.arguments, args, strict=False)
        bound = {argument.name: value for argument, value in given} | dict(kwargs)
        q, k, masked = bound["query"], bound["key"], bound.get("is_causal", False)
    bs, heads, seq, dim = q.shape
    flops = (10 if backward else 4) * int(bs * heads * seq * k.shape[2] * dim)
    share = 1 - seq / (2 * k.shape[2]) if masked else 1.0
    return {"flops": flops, "share": share, "keys": share * k.shape[2], "head_dim": int(dim)}


MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm)
VIEWS = (aten._unsafe_view, aten._reshape_alias)  # views that have no alias annotation in their schemas
ALLOCATIONS = ("empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided")
OVERWRITES = ("copy_", "fill_", "zero_")
LOOKUPS = ("embedding", "gather", "index", "nll_loss_forward")


def moved_bytes(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    """Bytes of device memory that ``func`` reads and writes. An argument that it only overwrites is not read."""
    name = func._opname
    if name in LOOKUPS:  # they read as many bytes of the table as they write
        return 2 * nbytes(outputs)
    if name == "copy_" and args[0] is args[1]:  # PyTorch returns at once
        return 0
    if name == "all_gather_copy_in":  # copies into this rank's part of a buffer, which is the second argument
        return 2 * nbytes(args[0])
    moved = 0 if func._schema.is_mutable else nbytes(outputs)
    for i, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = written and (argument.is_out or name in OVERWRITES)
        moved += nbytes(args[i] if i < len(args) else kwargs.get(argument.name)) * (written + (not overwritten))
    return moved


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes(value: Any) -> int:
    """Total bytes of the tensors in nested tuples, lists and dicts."""
    return sum(t.nbytes for t in tensors_in(value))
