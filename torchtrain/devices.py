"""The kind of device that a choice is made for: the tensors' own, or one that they stand in for.

A plan is made without a GPU, on tensors without data that claim to lie on a CPU (``planning/``). What the trainer does
otherwise on a GPU it asks here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_planned_capability: tuple[int, int] | None = None


def device_kind(device_type: str) -> str:
    """``device_type``, or "cuda" inside ``planned_for_gpu``."""
    return device_type if _planned_capability is None else "cuda"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of the GPU ``device``, or of the one that is planned for."""
    return _planned_capability or torch.cuda.get_device_capability(device)


@contextmanager
def planned_for_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Make all choices as for a GPU of this compute capability."""
    global _planned_capability
    before, _planned_capability = _planned_capability, capability
    try:
        yield
    finally:
        _planned_capability = before
