"""Gemma 3 without images (https://arxiv.org/abs/2503.19786): norms on both sides of each sublayer, whose weights are
added to 1, norms of queries and keys, sliding windows in five of six layers, GELU, and scaled embeddings."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.llama.model import FeedForward, TransformerBlock
from torchtrain.models.spec import Decoder, ModelSpec
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain_families import layer_types, sliding_windows
from torchtrain_families.hf import check_without_mup, llama_like_format
from torchtrain_families.norms import OffsetNorm
from torchtrain_families.sliding_windows import SlidingWindowConfig, SlidingWindowTransformer, rope_and_mask


@dataclass(frozen=True)
class Gemma3Config(SlidingWindowConfig):
    """Queries times keys are divided by the root of ``query_pre_attn_scalar``, and not of head_dim."""

    query_pre_attn_scalar: int = 256
    full_attention_interval: int = 6
    local_rope_theta: float = 10000.0


class GeGLU(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class Gemma3Block(TransformerBlock):
    feed_forward_class = GeGLU

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        for name in ("attention_norm", "post_attention_norm", "ffn_norm", "post_ffn_norm"):
            setattr(self, name, OffsetNorm(config.dim, config.norm_eps))
        self.attention.q_norm = OffsetNorm(config.head_size, config.norm_eps)
        self.attention.k_norm = OffsetNorm(config.head_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masks: Any) -> Tensor:
        cos, sin, mask = rope_and_mask(self, cos, sin, masks)
        h = x + self.post_attention_norm(self.attention(self.attention_norm(x), cos, sin, mask))
        return h + self.post_ffn_norm(self.feed_forward(self.ffn_norm(h)))


class Gemma3(SlidingWindowTransformer):
    block_class = Gemma3Block

    def __init__(self, config: Gemma3Config):
        super().__init__(config)
        self.norm = OffsetNorm(config.dim, config.norm_eps)

    def init_weights(self) -> None:
        super().init_weights()
        for module in self.modules():
            if isinstance(module, OffsetNorm):
                nn.init.zeros_(module.weight)

    def init_buffers(self) -> None:
        """The RoPE tables multiply queries and keys, so that the factor on attention is part of them."""
        super().init_buffers()
        for table in self.buffers():
            table.mul_((self.config.head_size / self.config.query_pre_attn_scalar) ** 0.25)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        h = tokens
        if self.tok_embeddings is not None and not tokens.is_floating_point():  # else hidden states
            h = self.tok_embeddings(tokens)
            h = h * torch.tensor(self.config.dim**0.5, dtype=h.dtype)  # rounded as in transformers
        return super().forward(h, positions, mask, head)


def parallelize(model: Decoder, mesh: Mesh, config: JobConfig, reducer: GradientReducer) -> None:
    sliding_windows.use_context(model, mesh, config)
    if mesh.degrees.tensor > 1:
        for name, module in model.named_modules():
            if isinstance(module, OffsetNorm):
                sharded = config.parallelism.enable_sequence_parallel or ".attention." in name  # there by heads
                module.shard(mesh.tensor, sharded_input=sharded)
    parallelize_llama(model, mesh, config, reducer)


def read(content: MutableMapping[str, Any]) -> dict[str, Any]:
    return {**layer_types.read(content), "query_pre_attn_scalar": content["query_pre_attn_scalar"]}


def write(content: MutableMapping[str, Any], config: Gemma3Config) -> None:
    layer_types.write(content, config)
    del content["hidden_act"]  # Gemma's key is hidden_activation
    content["query_pre_attn_scalar"] = config.query_pre_attn_scalar


GEMMA3_TEXT = ModelSpec(
    Gemma3Config,
    Gemma3,
    {"debugmodel": Gemma3Config(256, 6, 8, 4, 768, 4096, 2048, 1e-6, 1e6, None, True, sliding_window=128)},
    LINEAR_LAYERS,
    hf=llama_like_format(
        "Gemma3ForCausalLM",
        "gemma3_text",
        Gemma3Config,
        defaults={
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
        fixed={
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": False,
        },
        modules={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffn_norm": "post_feedforward_layernorm",
        },
        read=read,
        write=write,
    ),
    check=check_without_mup,
    flops=sliding_windows.flops,
    parallelize=parallelize,
)
