"""OLMo 3 (https://allenai.org/olmo): OLMo 2 with sliding windows in three of four layers, whose RoPE is not scaled."""

from typing import Any

from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.spec import Decoder, ModelSpec
from torchtrain_families import layer_types, olmo2, sliding_windows
from torchtrain_families.hf import check_without_mup, llama_like_format
from torchtrain_families.sliding_windows import SlidingWindowConfig, SlidingWindowTransformer, rope_and_mask


class Olmo3Block(olmo2.Olmo2Block):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, masks: Any) -> Tensor:
        return super().forward(x, *rope_and_mask(self, cos, sin, masks))


class Olmo3(SlidingWindowTransformer):
    block_class = Olmo3Block


def parallelize(model: Decoder, mesh: Mesh, config: JobConfig, reducer: GradientReducer) -> None:
    sliding_windows.use_context(model, mesh, config)
    olmo2.parallelize(model, mesh, config, reducer)


OLMO3 = ModelSpec(
    SlidingWindowConfig,
    Olmo3,
    {
        "debugmodel": SlidingWindowConfig(
            256, 6, 8, 8, 768, 4096, norm_eps=1e-6, rope_theta=5e5, sliding_window=128, full_attention_interval=3
        )
    },
    LINEAR_LAYERS,
    hf=llama_like_format(
        "Olmo3ForCausalLM",
        "olmo3",
        SlidingWindowConfig,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_local_base_freq": 5e5,
            "rope_theta": 5e5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        fixed={"attention_bias": False},
        modules=olmo2.MODULES,
        read=layer_types.read,
        write=layer_types.write,
    ),
    check=check_without_mup,
    flops=sliding_windows.flops,
    parallelize=parallelize,
)
