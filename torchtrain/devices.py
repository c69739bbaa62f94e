"""Peak FLOP/s of GPUs."""

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
