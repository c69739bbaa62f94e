"""Names, order and config of the same Llama elsewhere: Hugging Face's ``LlamaForCausalLM`` and Meta's own files.

Our q and k rows are in Hugging Face's order (see ``apply_rope``), so that only Meta's have to be permuted.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchtrain.models.llama.model import RopeScaling, TransformerConfig

_HF_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter ``name``: ``layers.3.attention.wq.weight`` and the like."""
    layer, module = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups()  # type: ignore[union-attr]
    return f"{'model.' + layer if layer else ''}{_HF_MODULES[module]}.weight"


def hf_config(config: TransformerConfig, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """The content of ``config.json`` for weights in ``dtype``, such as ``bfloat16``."""
    hf: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }
    if config.rope_scaling is not None:
        hf["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_seq_len,
        }
    return hf


def config_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    """Our shape of the model whose ``config.json`` is ``hf``; ValueError says what of it we do not have.

    A key that is not there has transformers' default.
    """
    unsupported = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, ours in unsupported.items():
        if hf.get(key, ours) != ours:
            raise ValueError(f"{key} = {hf[key]!r}; a Llama here has {ours!r}")
    if hf.get("quantization_config"):
        raise ValueError("it has a quantization_config; weights must be float32, bfloat16 or float16")
    n_heads = hf["num_attention_heads"]
    if hf.get("head_dim") not in (None, hf["hidden_size"] // n_heads):
        raise ValueError(f"head_dim = {hf['head_dim']}; a Llama here has hidden_size / num_attention_heads")
    # transformers 5 keeps theta and scaling in one entry, earlier versions in two.
    rope = hf.get("rope_parameters") or {**(hf.get("rope_scaling") or {}), "rope_theta": hf.get("rope_theta", 10000.0)}
    scaling = None
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "llama3":
        scaling = RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    elif rope_type != "default":
        raise ValueError(f"rope_type = {rope_type!r}; a Llama here has 'default' or 'llama3'")
    return TransformerConfig(
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=hf.get("num_key_value_heads") or n_heads,
        ffn_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_seq_len=hf.get("max_position_embeddings", 2048),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", 10000.0),
        rope_scaling=scaling,
        tied_embeddings=hf.get("tie_word_embeddings", False),
    )


def config_from_meta(params: Mapping[str, Any], vocab_size: int) -> TransformerConfig:
    """Our shape of the model whose ``params.json``, in Meta's folder, is ``params``.

    The formulas are those of ``FeedForward`` in Meta's llama-models, ``models/llama3/model.py``. Meta's file does not
    say how far RoPE is stretched, nor that embeddings are tied: Llama 3.2's 1B and 3B, which are, stretch by 32.
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
    """Rows of Meta's wq or wk (heads x head_dim, dim), pairs of channels side by side, in our order: in halves."""
    rows, dim = weight.shape
    return weight.view(n_heads, rows // n_heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


# Along which dimension Meta's files of one model split a parameter; norms are whole in each.
META_SPLIT_DIM = {
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
    "output": 0,
}
