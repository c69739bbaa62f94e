"""Pinned (page-locked) CPU memory, for asynchronous copies at full speed between CPU and GPU."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

ALIGNMENT = 64
# torch rounds each pinned allocation up to a power of two: one allocation per tensor would take up to twice the memory.
CHUNK_BYTES = 1 << 30


def pinned_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uninitialized, contiguous tensors in pinned memory with the names, shapes and dtypes of ``tensors``."""
    found: dict[str, Tensor] = {}
    for names in in_buckets(tensors, CHUNK_BYTES):
        sizes = [-(-tensors[name].nbytes // ALIGNMENT) * ALIGNMENT for name in names]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True).numpy()
        start = 0
        for name, size in zip(names, sizes, strict=True):
            tensor = tensors[name]
            # A storage of its own, not a view of the chunk's storage: torch.save would write all of the chunk.
            part = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            found[name] = part.view(tensor.shape)
            start += size
    return found


def in_buckets(tensors: Mapping[str, Tensor], limit_bytes: int) -> Iterator[list[str]]:
    """Split the names of the non-empty ``tensors``, in order, into lists of at most ``limit_bytes``, or one tensor."""
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
