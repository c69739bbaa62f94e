"""GPU and interconnect specifications from the vendors' data sheets, and the efficiencies that training reaches."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Specification of a GPU, its interconnects and its share of the host. All rates are per GPU."""

    memory_gib: float
    """Memory that a process can allocate, GiB."""
    flops_bfloat16: float
    """Peak dense bfloat16 FLOP/s."""
    flops_float8: float
    """Peak dense float8 FLOP/s."""
    flops_float32: float
    """Peak float32 FLOP/s."""
    memory_bandwidth: float
    """Bandwidth of the GPU's memory, bytes/s."""
    link_bandwidth: float
    """Bandwidth to the other GPUs of the same machine, bytes/s in one direction."""
    network_bandwidth: float
    """Share of the machine's network bandwidth, bytes/s in one direction. It differs between clusters."""
    host_bandwidth: float
    """Bandwidth to the host's memory, bytes/s in one direction."""
    host_memory_bandwidth: float
    """Share of the bandwidth of the host's own memory, bytes/s."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    interval: float = 0.15
    """Relative error of the estimated throughput, in either direction (docs/estimate.md)."""
    power_limited: bool = False
    """Whether its power limit, 500 instead of 700 W, slows down computation."""


# One network card per GPU. The host's share is an eighth of a DGX by its data sheet: PCIe 4.0 and 5.0 x16; 16 channels
# of DDR4-3200, DDR5-4800 and DDR5-5600.
GPUS = {
    # NVIDIA A100 data sheet (2021); HDR InfiniBand, 200 Gb/s
    "a100-40": Gpu(39.4, 312e12, 312e12, 19.5e12, 1.555e12, 300e9, 25e9, 32e9, 51e9, (8, 0)),
    "a100-80": Gpu(79.1, 312e12, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 32e9, 51e9, (8, 0)),
    # NVIDIA H100 (SXM) and H200 data sheets; 400 Gb/s. h100-96 has HBM2e and 500 W, as in Meta's published runs.
    "h100-80": Gpu(79.1, 989e12, 1979e12, 67e12, 3.35e12, 450e9, 50e9, 64e9, 77e9, (9, 0)),
    "h100-96": Gpu(95.0, 989e12, 1979e12, 67e12, 2.4e12, 450e9, 50e9, 64e9, 77e9, (9, 0), power_limited=True),
    "h200": Gpu(139.8, 989e12, 1979e12, 67e12, 4.8e12, 450e9, 50e9, 64e9, 77e9, (9, 0)),
    # NVIDIA DGX B200 data sheet, divided by its 8 GPUs
    # No efficiency is fitted to runs on it: the one published run known was slower than estimated by 20%.
    "b200": Gpu(178.4, 2250e12, 4500e12, 80e12, 8.0e12, 900e9, 50e9, 64e9, 90e9, (10, 0), interval=0.3),
}


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the peak rates that training reaches, and latencies.

    ``scripts/benchmarks/validate_estimate.py`` fits ``matmul``, ``matmul_ampere``, ``float8``, ``memory`` and
    ``power_limited`` to published runs.
    """

    matmul: float = 0.584
    matmul_ampere: float = 0.676
    """``matmul`` on an A100."""
    float8: float = 0.464
    memory: float = 0.95
    power_limited: float = 0.839
    """Factor of all FLOP/s where the GPU is ``power_limited``."""
    link: float = 0.75
    network: float = 0.75
    """Of collectives of many bytes; ``nccl.py`` has their latencies."""
    async_tensor: float = 0.57
    """Fraction of a collective's time that overlaps with the matrix product that the compiler fuses it with, from a
    published run with asynchronous tensor parallelism."""
    kernel_seconds: float = 3e-6
    """Minimum duration of a kernel."""
    launch_seconds: float = 6e-6
    """Time in which the host issues an operation."""
