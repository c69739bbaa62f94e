"""Read Llama models in Meta's original checkpoint format."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchtrain.models.llama.model import TransformerConfig
from torchtrain.models.llama.rope_scaling import RopeScaling


def config_from_meta(params: Mapping[str, Any], vocab_size: int) -> TransformerConfig:
    """Convert the content of Meta's ``params.json`` to a TransformerConfig.

    The formulas are those of ``FeedForward`` in Meta's llama-models, ``models/llama3/model.py``. Meta's file contains
    neither the RoPE scaling factor nor whether embeddings are tied. They are in Llama 3.2's 1B and 3B, whose factor
    is 32.
    """
    dim, n_heads = params["dim"], params["n_heads"]
    ffn_dim = int(2 * 4 * dim / 3)
    ffn_dim = int((params.get("ffn_dim_multiplier") or 1) * ffn_dim)
    multiple = params.get("multiple_of", 256)
    ffn_dim = multiple * math.ceil(ffn_dim / multiple)
    scaled = params.get("use_scaled_rope", False)
    small = scaled and dim <= 3072
    theta = params.get("rope_theta", 10000.0)
    return TransformerConfig(
        dim=dim,
        n_layers=params["n_layers"],
        n_heads=n_heads,
        n_kv_heads=params.get("n_kv_heads") or n_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        max_seq_len=131072 if scaled else 8192 if theta > 10000.0 else 4096,
        norm_eps=params.get("norm_eps", 1e-5),
        rope_theta=theta,
        rope_scaling=RopeScaling(factor=32.0 if small else 8.0) if scaled else None,
        tied_embeddings=small,
    )


def meta_rows_to_ours(weight: Tensor, n_heads: int) -> Tensor:
    """Permute rows of Meta's wq or wk from interleaved channel pairs to halves, the order that ``apply_rope`` uses.

    ``weight`` has the shape (heads * head_dim, dim); ``n_heads`` is the number of its heads.
    """
    rows, dim = weight.shape
    return weight.view(n_heads, rows // n_heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


# Meta shards these matrices by columns over its files of one model, and all others by rows; norms are replicated.
META_SPLIT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")
