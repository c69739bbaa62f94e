"""The kind of device to choose for: that of the tensors, or the GPU that the planner plans for.

The planner (``planning/``) runs without a GPU, on fake tensors whose device is the CPU. Code that does something else
on a GPU asks here.
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
