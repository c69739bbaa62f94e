"""How many floating-point operations a token costs, and how many a device can do: together, MFU."""

from torchtrain.models.llama.model import TransformerConfig

# Dense bfloat16 FLOP/s from the vendors' data sheets, by a part of the device's name; the first that fits counts.
PEAK_FLOPS_BFLOAT16 = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2.25e15,
    "MI300X": 1307e12,
    "L40S": 362e12,
}


def flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token, without recomputation.

    6 per parameter of a matrix product (the embedding lookup is none) plus 12 * layers * heads * head_dim * seq_len for
    attention, not halved for causality, as in PaLM (https://arxiv.org/abs/2204.02311, appendix B).
    """
    heads_width = config.n_heads * config.head_size
    attention = 2 * config.dim * heads_width + 2 * config.dim * config.n_kv_heads * config.head_size
    feed_forward = 3 * config.dim * config.ffn_dim
    matrices = config.n_layers * (attention + feed_forward) + config.dim * config.vocab_size
    return 6 * matrices + 12 * config.n_layers * heads_width * seq_len


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of the device, or None where it is not known."""
    return next((peak for name, peak in PEAK_FLOPS_BFLOAT16.items() if name in device_name), None)
