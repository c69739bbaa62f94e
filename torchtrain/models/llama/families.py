"""Model specs of Llama, Mistral and Qwen: their published sizes (flavors), and facts about the Llama decoder.

Sizes are from the papers and the models' own files: Llama 2 (https://arxiv.org/abs/2307.09288), The Llama 3 Herd of
Models (https://arxiv.org/abs/2407.21783; 8B, 70B and 405B are Llama 3.1, 1B and 3B are Llama 3.2), Qwen3
(https://arxiv.org/abs/2505.09388). Each family also has a small flavor for debugging, "debugmodel".
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torchtrain.models.llama.model import Transformer, TransformerConfig
from torchtrain.models.llama.rope_scaling import RopeScaling
from torchtrain.models.spec import ModelSpec

LINEAR_LAYERS: Mapping[str, Literal["colwise", "rowwise"]] = {
    "attention.wq": "colwise",
    "attention.wk": "colwise",
    "attention.wv": "colwise",
    "attention.wo": "rowwise",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}


def check_config(config: TransformerConfig) -> None:
    """Raise ValueError if no model family supports ``config``."""
    if config.qk_norm and config.qkv_bias:
        raise ValueError("qk_norm and qkv_bias exclude each other: no supported family has both; set one of them")


def _spec(flavors: Mapping[str, TransformerConfig]) -> ModelSpec:
    return ModelSpec(TransformerConfig, Transformer, flavors, LINEAR_LAYERS, check=check_config)


# The positional arguments are dim, n_layers, n_heads, n_kv_heads and ffn_dim.
_llama2 = partial(TransformerConfig, vocab_size=32000, max_seq_len=4096)
_llama3 = partial(
    TransformerConfig, vocab_size=128256, max_seq_len=131072, rope_theta=500000.0, rope_scaling=RopeScaling()
)
_qwen3 = partial(
    TransformerConfig, vocab_size=151936, max_seq_len=40960, norm_eps=1e-6, rope_theta=1e6, qk_norm=True, head_dim=128
)
_LLAMA32: dict[str, Any] = {"rope_scaling": RopeScaling(factor=32.0), "tied_embeddings": True}

LLAMA2 = _spec(
    {
        "debugmodel": _llama2(256, 6, 8, 8, 768),
        "7B": _llama2(4096, 32, 32, 32, 11008),
        "13B": _llama2(5120, 40, 40, 40, 13824),
        "70B": _llama2(8192, 80, 64, 8, 28672),
    },
)
LLAMA3 = _spec(
    {
        "debugmodel": _llama3(256, 6, 8, 4, 768),
        "1B": _llama3(2048, 16, 32, 8, 8192, **_LLAMA32),
        "3B": _llama3(3072, 28, 24, 8, 8192, **_LLAMA32),
        "8B": _llama3(4096, 32, 32, 8, 14336),
        "70B": _llama3(8192, 80, 64, 8, 28672),
        "405B": _llama3(16384, 126, 128, 8, 53248),
    },
)
MISTRAL = _spec({"debugmodel": _llama2(256, 6, 8, 4, 768)})
QWEN2 = _spec({"debugmodel": _llama2(256, 6, 8, 4, 768, qkv_bias=True, norm_eps=1e-6, rope_theta=1e6)})
QWEN3 = _spec(
    {
        "debugmodel": _qwen3(256, 6, 8, 4, 768, head_dim=64),
        "0.6B": _qwen3(1024, 28, 16, 8, 3072, tied_embeddings=True),
        "1.7B": _qwen3(2048, 28, 16, 8, 6144, tied_embeddings=True),
        "4B": _qwen3(2560, 36, 32, 8, 9728, tied_embeddings=True),
        "8B": _qwen3(4096, 36, 32, 8, 12288),
        "14B": _qwen3(5120, 40, 40, 8, 17408),
        "32B": _qwen3(5120, 64, 64, 8, 25600),
    },
)
