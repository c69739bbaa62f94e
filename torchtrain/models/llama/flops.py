"""Model FLOPs per token."""

from torchtrain.models.llama.model import TransformerConfig


def flops_per_token(config: TransformerConfig, seq_len: int) -> int:
    """Floating-point operations of forward and backward per token, without recomputation.

    6 per parameter of a linear layer (the embedding lookup does not count) plus 12 * layers * heads * head_dim *
    seq_len for attention, not halved for causality, as in PaLM (https://arxiv.org/abs/2204.02311, appendix B).
    """
    heads_width = config.n_heads * config.head_size
    attention = 2 * config.dim * heads_width + 2 * config.dim * config.n_kv_heads * config.head_size
    feed_forward = 3 * config.dim * config.ffn_dim
    matrices = config.n_layers * (attention + feed_forward) + config.dim * config.vocab_size
    return 6 * matrices + 12 * config.n_layers * heads_width * seq_len
