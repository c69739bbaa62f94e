"""Peak FLOP/s of GPUs, and the kind of device that code makes choices for.

The planner (``planning/``) runs without a GPU, on fake tensors whose device is the CPU. Code that does something else
on a GPU asks here whether it runs, or plans, for one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Dense bfloat16 FLOP/s from the vendors' data sheets, by a part of the device's name; the first that fits counts.
PEAK_FLOPS_BFLOAT16 = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "MI300X": 1307e12,
    "L40S": 362e12,
}

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


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of the device, or None where it is not known."""
    if " MIG " in device_name:  # a part of a GPU, such as 1g.5gb
        return None
    return next((peak for name, peak in PEAK_FLOPS_BFLOAT16.items() if name in device_name), None)
