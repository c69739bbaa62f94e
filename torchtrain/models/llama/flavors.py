"""The published sizes of Llama, and a small one of each family to debug with.

Sources: Llama 2 (https://arxiv.org/abs/2307.09288), The Llama 3 Herd of Models (https://arxiv.org/abs/2407.21783), and
the models' ``params.json``. llama3 8B, 70B and 405B are Llama 3.1, 1B and 3B are Llama 3.2.
"""

from types import MappingProxyType

from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import RopeScaling, TransformerConfig


def _llama2(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int) -> TransformerConfig:
    return TransformerConfig(dim, n_layers, n_heads, n_kv_heads, ffn_dim, vocab_size=32000, max_seq_len=4096)


def _llama3(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, *, n_kv_heads: int = 8, scale: float = 8.0, tied: bool = False
) -> TransformerConfig:
    return TransformerConfig(
        dim,
        n_layers,
        n_heads,
        n_kv_heads,
        ffn_dim,
        vocab_size=128256,
        max_seq_len=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(factor=scale),
        tied_embeddings=tied,
    )


FLAVORS = MappingProxyType(
    {
        "llama2": MappingProxyType(
            {
                "debugmodel": _llama2(256, 6, 8, 8, 768),
                "7B": _llama2(4096, 32, 32, 32, 11008),
                "13B": _llama2(5120, 40, 40, 40, 13824),
                "70B": _llama2(8192, 80, 64, 8, 28672),
            }
        ),
        "llama3": MappingProxyType(
            {
                "debugmodel": _llama3(256, 6, 8, 768, n_kv_heads=4),
                "1B": _llama3(2048, 16, 32, 8192, scale=32.0, tied=True),
                "3B": _llama3(3072, 28, 24, 8192, scale=32.0, tied=True),
                "8B": _llama3(4096, 32, 32, 14336),
                "70B": _llama3(8192, 80, 64, 28672),
                "405B": _llama3(16384, 126, 128, 53248),
            }
        ),
    }
)


def flavor_config(name: str, flavor: str) -> TransformerConfig:
    """The shape of ``flavor`` of the family ``name``; ConfigError names the flavors there are."""
    flavors = FLAVORS[name]
    if flavor not in flavors:
        raise ConfigError(f"model.flavor = {flavor!r} is no flavor of {name}; there are {', '.join(flavors)}")
    return flavors[flavor]
