"""RoPE scaling (linear, Llama 3, YaRN), for contexts longer than those of the original training."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Scales RoPE by ``factor`` to extend the context beyond ``original_max_seq_len``, the original training length.

    linear: position interpolation (https://arxiv.org/abs/2306.15595). llama3: ``apply_scaling`` in Meta's llama-models,
    ``models/llama3/model.py``; it uses both ``freq_factor`` fields. yarn: YaRN (https://arxiv.org/abs/2309.00071); it
    uses both ``beta`` fields and ``attention_factor``, by which queries and keys are multiplied (None: 0.1 ln(factor) +
    1).
    """

    type: Literal["llama3", "linear", "yarn"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "type" and value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"rope_scaling.{name} = {value!r} must be a number above 0, and finite")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope_scaling.low_freq_factor = {self.low_freq_factor} must be below high_freq_factor = "
                f"{self.high_freq_factor}"
            )

    def apply(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scale RoPE ``frequencies`` (head_dim / 2,), which have the base ``theta``.

        llama3 and yarn divide low frequencies by ``factor``, keep high ones, and interpolate in between.
        """
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "yarn":
            # Fractional indices of the channel pairs that make beta_fast and beta_slow turns in the original length.
            head_size = 2 * len(frequencies)
            radians = (self.original_max_seq_len / turns for turns in (self.beta_fast, self.beta_slow))
            pairs = [head_size * math.log(r / (2 * math.pi)) / (2 * math.log(theta)) for r in radians]
            low, high = max(math.floor(pairs[0]), 0), min(math.ceil(pairs[1]), head_size - 1)
            ramp = (torch.arange(head_size // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
            keep = 1 - ramp.clamp(0, 1)
        else:
            turns = self.original_max_seq_len * frequencies / (2 * math.pi)  # full turns within the original length
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = keep.clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / self.factor

    @property
    def amplitude(self) -> float:
        """Factor on queries and keys: yarn's ``attention_factor``; 1.0 for other types."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
