"""Pinned CPU memory, which a GPU copies to and from at full speed while the host does something else."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

ALIGNMENT = 64
# torch rounds each pinned allocation up to a power of two, tensor by tensor up to twice what is needed.
CHUNK_BYTES = 1 << 30


def pinned_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each of ``tensors`` an uninitialized, contiguous one in pinned memory, cut from a few large allocations."""
    found: dict[str, Tensor] = {}
    for names in in_buckets(tensors, CHUNK_BYTES):
        sizes = [-(-tensors[name].nbytes // ALIGNMENT) * ALIGNMENT for name in names]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True).numpy()
        start = 0
        for name, size in zip(names, sizes, strict=True):
            tensor = tensors[name]
            # With a storage of its own size, not a view of the chunk's: torch.save would write, or copy, all of that.
            part = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            found[name] = part.view(tensor.shape)
            start += size
    return found


def in_buckets(tensors: Mapping[str, Tensor], limit_bytes: int) -> Iterator[list[str]]:
    """Names of ``tensors`` that are not empty, in order, as many at once as ``limit_bytes`` hold, and at least one."""
    bucket: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if bucket and used + size > limit_bytes:
            yield bucket
            bucket, used = [], 0
        if size:
            bucket.append(name)
            used += size
    if bucket:
        yield bucket
