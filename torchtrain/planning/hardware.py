"""GPUs and the links between them, from the vendors' data sheets, and what of that a trainer gets."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU and its place in a cluster. Rates, FLOP/s and bytes/s, are per GPU; so are all ``*_bytes``."""

    memory_gib: float
    """What a process can allocate of its memory."""
    flops_bfloat16: float
    """Peak of dense matrix products."""
    flops_float8: float
    flops_float32: float
    memory_bytes: float
    """Bandwidth of its memory, bytes/s."""
    link_bytes: float
    """Bandwidth to the other GPUs of its machine, bytes/s in one direction."""
    network_bytes: float
    """Its share of the machine's network bandwidth, bytes/s in one direction; clusters differ."""
    host_bytes: float
    """Bandwidth to the memory of its host, bytes/s in one direction."""
    host_memory_bytes: float
    """Its share of the bandwidth of the host's memory, bytes/s."""
    capability: tuple[int, int]


# A network card a GPU. The host is an eighth of a DGX, by its data sheet: PCIe 4.0 and 5.0 x16; 16 channels of
# DDR4-3200, DDR5-4800 and DDR5-5600.
GPUS = {
    # NVIDIA A100 data sheet (2021); HDR InfiniBand, 200 Gb/s
    "a100-40": Gpu(39.4, 312e12, 312e12, 19.5e12, 1.555e12, 300e9, 25e9, 32e9, 51e9, (8, 0)),
    "a100-80": Gpu(79.1, 312e12, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 32e9, 51e9, (8, 0)),
    # NVIDIA H100 data sheet (SXM), the second with HBM2e, and H200 data sheet; 400 Gb/s
    "h100-80": Gpu(79.1, 989e12, 1979e12, 67e12, 3.35e12, 450e9, 50e9, 64e9, 77e9, (9, 0)),
    "h100-96": Gpu(95.0, 989e12, 1979e12, 67e12, 2.4e12, 450e9, 50e9, 64e9, 77e9, (9, 0)),
    "h200": Gpu(139.8, 989e12, 1979e12, 67e12, 4.8e12, 450e9, 50e9, 64e9, 77e9, (9, 0)),
    # NVIDIA DGX B200 data sheet, an eighth
    "b200": Gpu(178.4, 2250e12, 4500e12, 80e12, 8.0e12, 900e9, 50e9, 64e9, 90e9, (10, 0)),
}


@dataclass(frozen=True)
class Efficiency:
    """What is reached of a peak. Fitted to published runs by ``scripts/validate_estimate.py``."""

    matrices: float = 0.463
    float8: float = 0.345
    attention: float = 0.403
    memory: float = 0.95
    link: float = 0.75
    network: float = 0.75
    async_tensor: float = 0.45
    """Share of its collectives that asynchronous tensor parallelism hides, from the one published pair."""
    kernel_seconds: float = 3e-6
    """The least time of a kernel."""
    launch_seconds: float = 6e-6
    """That the host needs to issue an operation."""
    collective_seconds: float = 20e-6
    """Latency of a collective."""
