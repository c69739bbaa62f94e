"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after attention and feed-forward, and of whole queries and keys."""

from typing import Any

from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.llama.model import TransformerBlock
from torchtrain.models.spec import Decoder, ModelSpec
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain_families.hf import check_without_mup, llama_like_format
from torchtrain_families.norms import ProjectionNorm


class Olmo2Block(TransformerBlock):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.attention.q_norm = ProjectionNorm(config.n_heads, config.head_size, config.norm_eps)
        self.attention.k_norm = ProjectionNorm(config.n_kv_heads, config.head_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any = None) -> Tensor:
        h = x + self.attention_norm(self.attention(x, cos, sin, mask))
        return h + self.ffn_norm(self.feed_forward(h))


class Olmo2(Transformer):
    block_class = Olmo2Block


def parallelize(model: Decoder, mesh: Mesh, config: JobConfig, reducer: GradientReducer) -> None:
    """``parallelize_llama`` of a model with norms over all heads."""
    if mesh.degrees.tensor > 1:
        for module in model.modules():
            if isinstance(module, ProjectionNorm):
                module.shard(mesh.tensor)
    parallelize_llama(model, mesh, config, reducer)


MODULES = {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
OLMO2 = ModelSpec(
    TransformerConfig,
    Olmo2,
    {"debugmodel": TransformerConfig(256, 6, 8, 8, 768, 4096, norm_eps=1e-6, rope_theta=5e5)},
    LINEAR_LAYERS,
    hf=llama_like_format(
        "Olmo2ForCausalLM",
        "olmo2",
        TransformerConfig,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        fixed={"attention_bias": False},
        modules=MODULES,
    ),
    check=check_without_mup,
    parallelize=parallelize,
)
