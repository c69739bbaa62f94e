"""Peak FLOP/s of GPUs, and the device type that code is specialized for.

The planner (``planning/``) simulates a GPU with fake tensors whose device is the CPU. Code that differs between CPUs
and GPUs therefore calls ``device_kind`` and ``compute_capability``, which return those of the simulated GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Dense bfloat16 FLOP/s from the vendors' data sheets, by a substring of the device name; the first match counts.
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
    """Compute capability (major, minor) of the GPU ``device``, or of the simulated one inside ``planned_for_gpu``."""
    return _planned_capability or torch.cuda.get_device_capability(device)


@contextmanager
def planned_for_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """A context manager in which code is specialized for a GPU of this compute capability."""
    global _planned_capability
    before, _planned_capability = _planned_capability, capability
    try:
        yield
    finally:
        _planned_capability = before


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of the device, or None if it is not known."""
    if " MIG " in device_name:  # a part of a GPU, such as 1g.5gb
        return None
    return next((peak for name, peak in PEAK_FLOPS_BFLOAT16.items() if name in device_name), None)
