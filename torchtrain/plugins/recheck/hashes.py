"""64-bit hashes of tensors, and of what FSDP is about to reduce."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from torchtrain.torch_internals import ReduceScatter

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}  # 32-bit words at a time: in the cache of a core; few kernels
PRIME = 1_000_003

Hashes = dict[str, list[int]]
"""Hashes by name, in the order in which they were computed."""


class TensorHash:
    """Hashes the bits of a tensor, without a copy to the host.

    The hash is the sum of the 32-bit words times random odd 64-bit factors, modulo 2^64; sums of chunks are combined by
    powers of a prime. The order of additions does not matter. Tensors that differ in one word have different hashes.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same factors on all ranks
        limits = torch.iinfo(torch.int64)
        factors = torch.randint(limits.min, limits.max, (CHUNK[device.type],), generator=generator)
        self.factors = (factors | 1).to(device)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The hash, an int64 scalar on the device of ``tensor``."""
        flat = tensor.detach().reshape(-1)
        is_even = flat.numel() * flat.element_size() % 4 == 0
        words = flat.view(torch.int32 if is_even else torch.uint8)
        factors = self.factors.to(words.device)  # with CPU offload, optimizer states are on the CPU
        found = torch.zeros((), dtype=torch.int64, device=words.device)
        for chunk in torch.split(words, len(factors)):
            found = found * PRIME + (chunk * factors[: len(chunk)]).sum()
        return found


class SummandObserver:
    """Hashes the summands of the gradient, by FSDP group, between ``start`` and ``stop``.

    A summand is what FSDP sends of one microbatch on one rank: the whole gradient of a group of parameters, or with
    tensor parallelism this rank's part of it.
    """

    def __init__(self, hash_of: TensorHash) -> None:
        self.hash_of = hash_of
        self.found: dict[str, list[Tensor]] | None = None
        self.discards = False

    def start(self, *, discard: bool = False) -> None:
        """Observe from now on. ``discard``: the summands are those of a repeated microbatch, and must not count."""
        self.found, self.discards = {}, discard

    def stop(self) -> dict[str, list[Tensor]]:
        """Stop; returns the hashes by group in the order of the backward, several with pipeline microbatches.

        They may have been computed on another CUDA stream: keep them until ``read`` has returned.
        """
        found = self.found or {}
        self.found = None
        return found

    def see(self, group: str, summands: Tensor) -> None:
        if self.found is None:
            return
        self.found.setdefault(group, []).append(self.hash_of(summands))
        if self.discards:
            summands.fill_(-0.0)  # x + -0.0 has the bits of x, also where x is -0.0


def read(found: dict[str, list[Tensor]]) -> Hashes:
    """The hashes as integers. The host waits for the device."""
    values = iter(torch.stack([value for of_name in found.values() for value in of_name]).tolist() if found else ())
    return {name: [next(values) for _ in of_name] for name, of_name in found.items()}


def combine(hashes: Iterable[Sequence[int]]) -> int:
    """One 64-bit hash of all, a signed integer."""
    words = b"".join(value.to_bytes(8, "little", signed=True) for values in hashes for value in values)
    return int.from_bytes(xxhash.xxh3_64_digest(words), "little", signed=True)


class ObservedReduceScatter(ReduceScatter):
    """The reduce-scatter ``inner`` of an FSDP module, whose input ``observer`` sees before it is reduced.

    FSDP allocates the input, fills it with the gradients of the group, and allocates the output: at that moment the
    input is complete. ``AllToAllReduceScatter`` describes these calls.
    """

    input: Tensor | None = None  # set between the two calls of ``allocate``

    def __init__(self, inner: ReduceScatter, group: str, observer: SummandObserver) -> None:
        self.inner, self.group, self.observer = inner, group, observer

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is not None:
            self.observer.see(self.group, self.input)
        tensor = self.inner.allocate(size, dtype=dtype, device=device)
        self.input = tensor if self.input is None else None
        return tensor

    def __call__(self, *args: Any, **options: Any) -> dist.Work | None:
        return self.inner(*args, **options)
