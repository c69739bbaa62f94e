"""Peak FLOP/s of GPUs, and memory of this machine or of its GPUs."""

import os
from pathlib import Path
from typing import Any

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container

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


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of the device, or None if it is not known."""
    if " MIG " in device_name:  # a part of a GPU, such as 1g.5gb
        return None
    return next((peak for name, peak in PEAK_FLOPS_BFLOAT16.items() if name in device_name), None)


def memory_of(device: Any) -> tuple[int, int]:
    """Bytes of the memory of a ``torch.device`` of this rank, and the number of ranks that share it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory, 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else ""
    return min(memory, int(limit)) if limit.isdecimal() else memory, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
