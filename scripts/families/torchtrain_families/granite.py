"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.llama.model import TransformerBlock
from torchtrain.models.spec import ModelSpec
from torchtrain_families.hf import check, llama_like_format, own_fields


@dataclass(frozen=True)
class GraniteConfig(TransformerConfig):
    """Factors on embeddings, on queries times keys (in place of 1 / sqrt(head_dim)) and on what a sublayer adds to the
    residual stream; logits are divided by ``logits_scaling``."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteBlock(TransformerBlock):
    def __init__(self, config: GraniteConfig):
        super().__init__(config)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, mask) * self.residual_multiplier
        return h + self.feed_forward(self.ffn_norm(h)) * self.residual_multiplier


class Granite(Transformer):
    block_class = GraniteBlock

    def init_buffers(self) -> None:
        """The RoPE tables multiply queries and keys, so that the factor on attention is part of them."""
        super().init_buffers()
        amplitude = (self.config.attention_multiplier * self.config.head_size**0.5) ** 0.5
        for table in (self.rope_cos, self.rope_sin):
            table.mul_(amplitude)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        h = tokens
        if self.tok_embeddings is not None and not tokens.is_floating_point():  # else hidden states
            h = self.tok_embeddings(tokens) * self.config.embedding_multiplier

        def scaled_head(hidden: Tensor, output: nn.Module) -> Tensor:
            hidden = hidden / self.config.logits_scaling
            return output(hidden) if head is None else head(hidden, output)

        return super().forward(h, positions, mask, scaled_head)


# The defaults of transformers, 1.0 each, are those of GraniteConfig.
DEFAULTS = {name: getattr(GraniteConfig, name) for name in own_fields(GraniteConfig)}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 1 / 32,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GRANITE = ModelSpec(
    GraniteConfig,
    Granite,
    {"debugmodel": GraniteConfig(256, 6, 8, 4, 768, 4096, tied_embeddings=True, **MULTIPLIERS)},
    LINEAR_LAYERS,
    hf=llama_like_format(
        "GraniteForCausalLM",
        "granite",
        GraniteConfig,
        defaults={"max_position_embeddings": 2048, **DEFAULTS},
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    check=check,
)
