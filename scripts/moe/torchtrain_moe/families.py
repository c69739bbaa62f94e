"""OLMoE (https://arxiv.org/abs/2409.02060) and Qwen3-MoE (https://arxiv.org/abs/2505.09388), and their formats of
Hugging Face, in whose files each expert has matrices of its own."""

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Literal

from torchtrain_families.hf import check_without_mup, llama_like_format

from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.spec import HFFormat, ModelSpec
from torchtrain_moe.config import TRAINING_FIELDS, MoEConfig
from torchtrain_moe.model import MoETransformer, flops
from torchtrain_moe.parallel import finish_step, parallelize

PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def stored(name: str) -> Literal["whole", "slices", "not"]:
    """See ``HFFormat``. The router's loads are a state of training; a bias in it is not exported."""
    if ".experts." in name:
        return "slices"
    return "not" if name.endswith(("router.load", "router.bias")) else "whole"


def expert_name(name: str) -> str | None:
    """Hugging Face's name of a matrix of an expert, such as ``layers.0.feed_forward.experts.w1.3``."""
    layer, is_there, parameter = name.partition(".feed_forward.experts.")
    projection, _, expert = parameter.partition(".")
    return f"model.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}.weight" if is_there else None


def moe_format(architecture: str, model_type: str, width: str, *, norm_all_heads: bool, **options: Any) -> HFFormat:
    """The format of a family; ``width``: its key of an expert's inner width."""

    def read(content: MutableMapping[str, Any]) -> dict[str, Any]:
        content["intermediate_size"] = content[width]
        experts = content.get("num_local_experts", content["num_experts"])  # transformers 5 writes the first one
        return {
            "n_experts": experts,
            "top_k": content["num_experts_per_tok"],
            "normalize_top_k": content["norm_topk_prob"],
            "norm_all_heads": norm_all_heads,
            **dict.fromkeys(TRAINING_FIELDS),
        }

    def write(content: MutableMapping[str, Any], config: MoEConfig) -> None:
        content |= {
            width: config.ffn_dim,
            "num_experts": config.n_experts,
            "num_experts_per_tok": config.top_k,
            "norm_topk_prob": config.normalize_top_k,
        }

    plain = llama_like_format(architecture, model_type, MoEConfig, read=read, write=write, **options)

    def to_config(config: MoEConfig, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        if config.bias_rate:
            raise ValueError(
                f"bias_rate = {config.bias_rate} cannot be exported: a {model_type} has no bias that chooses experts; "
                "train with batch_balance_weight or sequence_balance_weight"
            )
        return plain.to_config(replace(config, **dict.fromkeys(TRAINING_FIELDS)), dtype, bos_id, eos_id)

    def parameter_name(name: str) -> str:
        return expert_name(name) or plain.parameter_name(name)

    return replace(plain, to_config=to_config, parameter_name=parameter_name, stored=stored)


def _spec(flavors: Mapping[str, MoEConfig], hf: HFFormat) -> ModelSpec:
    # Of the linear layers, only those of attention are sharded and saved by name; the experts have their own ways.
    attention = {name: style for name, style in LINEAR_LAYERS.items() if name.startswith("attention.")}
    return ModelSpec(
        MoEConfig,
        MoETransformer,
        flavors,
        attention,
        hf=hf,
        check=check_without_mup,
        flops=flops,
        parallelize=parallelize,
        finish_step=finish_step,
    )


MODULES = {"feed_forward.router": "mlp.gate"}
_OLMOE: dict[str, Any] = {"normalize_top_k": False, "norm_all_heads": True}
OLMOE = _spec(
    {
        "debugmodel": MoEConfig(128, 4, 4, 4, 128, 4096, 2048, n_experts=8, top_k=2, **_OLMOE),
        "1B-7B": MoEConfig(2048, 16, 16, 16, 1024, 50304, 4096, n_experts=64, top_k=8, **_OLMOE),
    },
    moe_format(
        "OlmoeForCausalLM",
        "olmoe",
        "intermediate_size",
        norm_all_heads=True,
        modules=MODULES,
        defaults={
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
        fixed={"attention_bias": False, "clip_qkv": None},
    ),
)
QWEN3_MOE = _spec(
    {
        "debugmodel": MoEConfig(128, 4, 4, 2, 128, 4096, 2048, 1e-6, 1e6, head_dim=32, n_experts=8, top_k=2),
        "30B-A3B": MoEConfig(2048, 48, 32, 4, 768, 151936, 40960, 1e-6, 1e6, head_dim=128, n_experts=128, top_k=8),
    },
    moe_format(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        "moe_intermediate_size",
        norm_all_heads=False,
        modules=MODULES,
        defaults={
            "max_position_embeddings": 32768,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
        },
        fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
)
