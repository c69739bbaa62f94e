"""Speed of attention kernels by GPU generation, direction, head size and number of keys."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torchtrain.config.schema import TrainingConfig


class Kernel(NamedTuple):
    """An attention kernel in one direction."""

    name: str
    """flash (FlashAttention 2), fa3 or cudnn."""
    generation: int
    """Major CUDA compute capability."""
    direction: str
    """forward or backward."""
    head_dim: int


@dataclass(frozen=True)
class AttentionSpeed:
    """Speed of a kernel: its time is proportional to the number of keys of a query plus a constant number."""

    efficiency: float
    """Fraction of the peak bfloat16 FLOP/s for very long sequences."""
    overhead_keys: float
    """Time per query that does not depend on its number of keys, in the time of one key."""

    def fraction(self, keys: float) -> float:
        """Fraction of the peak FLOP/s where a query has ``keys`` keys in the mean, without those that are masked."""
        return self.efficiency * keys / (keys + self.overhead_keys)


# Fitted by scripts/benchmarks/fit_attention.py to published benchmarks of the kernels alone (published_attention.csv).
SPEEDS = {
    Kernel("cudnn", 8, "forward", 128): AttentionSpeed(0.576, 140),
    Kernel("cudnn", 8, "backward", 128): AttentionSpeed(0.469, 336),
    Kernel("cudnn", 9, "forward", 64): AttentionSpeed(0.423, 127),
    Kernel("cudnn", 9, "backward", 64): AttentionSpeed(0.456, 337),
    Kernel("cudnn", 9, "forward", 128): AttentionSpeed(0.663, 200),
    Kernel("cudnn", 9, "backward", 128): AttentionSpeed(0.568, 366),
    Kernel("cudnn", 9, "forward", 256): AttentionSpeed(0.528, 175),
    Kernel("cudnn", 10, "forward", 128): AttentionSpeed(0.690, 639),
    Kernel("cudnn", 10, "backward", 128): AttentionSpeed(0.551, 587),
    Kernel("fa3", 9, "forward", 64): AttentionSpeed(0.516, 277),
    Kernel("fa3", 9, "backward", 64): AttentionSpeed(0.502, 404),
    Kernel("fa3", 9, "forward", 128): AttentionSpeed(0.663, 301),
    Kernel("fa3", 9, "backward", 128): AttentionSpeed(0.598, 427),
    Kernel("flash", 8, "forward", 128): AttentionSpeed(0.677, 142),
    Kernel("flash", 8, "backward", 128): AttentionSpeed(0.591, 287),
    Kernel("flash", 9, "forward", 64): AttentionSpeed(0.331, 78),
    Kernel("flash", 9, "backward", 64): AttentionSpeed(0.299, 252),
    Kernel("flash", 9, "forward", 128): AttentionSpeed(0.342, 180),
    Kernel("flash", 9, "backward", 128): AttentionSpeed(0.323, 245),
    Kernel("flash", 9, "forward", 256): AttentionSpeed(0.310, 119),
    Kernel("flash", 10, "forward", 64): AttentionSpeed(0.161, 66),
    Kernel("flash", 10, "backward", 64): AttentionSpeed(0.149, 195),
}


# Context parallelism calls this kernel itself. In a simulation, scaled_dot_product_attention has another name.
DIRECT_CALLS = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")


def kernel_of(name: str, training: TrainingConfig, capability: tuple[int, int]) -> str:
    """Return the kernel that runs the attention operation ``name`` on a GPU: "flash", "fa3" or "cudnn".

    flex_attention, and kernels without benchmarks, count as "flash".
    """
    backend = training.attention_backend
    if backend == "fa3":
        return "fa3"
    if backend not in ("auto", "cudnn") or "flex" in name or name in DIRECT_CALLS:
        return "flash"
    # PyTorch prefers cuDNN, which has no deterministic backward, on Hopper and later GPUs.
    return "cudnn" if backend == "cudnn" or (capability[0] >= 9 and not training.deterministic) else "flash"


def attention_fraction(kernel: Kernel, keys: float) -> float:
    """Fraction of the peak FLOP/s that ``kernel`` reaches alone; head sizes without benchmarks count as the nearest."""
    same = [found for found in SPEEDS if found._replace(head_dim=kernel.head_dim) == kernel]
    nearest = min(same, key=lambda found: abs(math.log(found.head_dim / kernel.head_dim)))
    return SPEEDS[nearest].fraction(keys)
