"""SmolLM 3 (https://huggingface.co/blog/smollm3): Llama without RoPE in every fourth layer (NoPE)."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.llama.model import TransformerBlock
from torchtrain.models.spec import ModelSpec
from torchtrain_families.hf import check, llama_like_format


@dataclass(frozen=True)
class SmolLM3Config(TransformerConfig):
    """Of each ``no_rope_layer_interval`` layers, the last one has no RoPE."""

    no_rope_layer_interval: int = 4

    def has_rope(self, layer: int) -> bool:
        return (layer + 1) % self.no_rope_layer_interval != 0


class SmolLM3Block(TransformerBlock):
    has_rope = True

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None) -> Tensor:
        if not self.has_rope:  # a rotation by the angle 0
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(x, cos, sin, mask)


class SmolLM3(Transformer):
    block_class = SmolLM3Block

    def __init__(self, config: SmolLM3Config):
        super().__init__(config)
        for layer, block in self.layers.items():
            block.has_rope = config.has_rope(int(layer))


def read(content: MutableMapping[str, Any]) -> dict[str, Any]:
    interval, layers = content["no_rope_layer_interval"], content.get("no_rope_layers")
    if type(interval) is not int or interval < 1:
        raise ValueError(f"no_rope_layer_interval = {interval!r} must be an integer above 0")
    expected = [int((layer + 1) % interval != 0) for layer in range(content["num_hidden_layers"])]
    if layers is not None and layers[: len(expected)] != expected:  # transformers ignores more
        raise ValueError(f"no_rope_layers = {layers} must be 0 in the last of each {interval} layers, and else 1")
    return {"no_rope_layer_interval": interval}


def write(content: MutableMapping[str, Any], config: SmolLM3Config) -> None:
    content["no_rope_layer_interval"] = config.no_rope_layer_interval
    content["no_rope_layers"] = [int(config.has_rope(layer)) for layer in range(config.n_layers)]


SMOLLM3 = ModelSpec(
    SmolLM3Config,
    SmolLM3,
    {"debugmodel": SmolLM3Config(256, 6, 8, 4, 768, 4096, rope_theta=2e6, tied_embeddings=True)},
    LINEAR_LAYERS,
    hf=llama_like_format(
        "SmolLM3ForCausalLM",
        "smollm3",
        SmolLM3Config,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        fixed={"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
        read=read,
        write=write,
    ),
    check=check,
)
