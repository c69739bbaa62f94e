"""Hugging Face's format of the Llama decoder: parameter names, and ``config.json`` of each family.

The rows of wq and wk are in Hugging Face's order (see ``apply_rope``), so that conversion permutes no weights.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torchtrain.models.llama.model import TransformerConfig
from torchtrain.models.llama.rope_scaling import RopeScaling
from torchtrain.models.spec import HFFormat


@dataclass(frozen=True)
class Family:
    """A model family. ``model_type`` is its name in ``config.json``; Hugging Face's class is Model_typeForCausalLM."""

    model_type: str
    fixed: Mapping[str, Any]
    """Keys of ``config.json`` that must have these values, because others would change what the model computes."""
    defaults: Mapping[str, Any]
    """Default values in transformers for keys missing from ``config.json``, where they differ between families."""
    qk_norm: bool = False
    qkv_bias: bool = False


_LLAMA = Family("llama", fixed={"attention_bias": False, "mlp_bias": False}, defaults={"max_position_embeddings": 2048})
_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama2": _LLAMA,
        "llama3": _LLAMA,
        "mistral": Family(
            "mistral",
            fixed={"sliding_window": None},
            defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
        "qwen2": Family("qwen2", fixed={"use_sliding_window": False}, defaults=_QWEN_DEFAULTS, qkv_bias=True),
        "qwen3": Family(
            "qwen3",
            fixed={"attention_bias": False, "use_sliding_window": False},
            defaults={**_QWEN_DEFAULTS, "head_dim": 128},
            qk_norm=True,
        ),
    }
)


def export_family(config: TransformerConfig) -> str:
    """Name of the family under which a model is exported: its own, or one with the same computation."""

    def computes_the_same(name: str) -> bool:
        return (FAMILIES[name].qk_norm, FAMILIES[name].qkv_bias) == (config.qk_norm, config.qkv_bias)

    own = [config.family] if config.family in FAMILIES else []  # else a family from outside with the same decoder
    return next(filter(computes_the_same, [*own, *FAMILIES]))


_HF_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def hf_name(name: str) -> str:
    """Hugging Face's name of a ``Transformer`` parameter, such as ``layers.3.attention.wq.weight``."""
    layer, module, kind = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", name).groups()  # type: ignore[union-attr]
    return f"{'model.' + layer if layer else ''}{_HF_MODULES[module]}.{kind}"


# Keys of config.json that must have these values in every family, if they are present.
_FIXED: Mapping[str, Any] = MappingProxyType({"hidden_act": "silu", "is_causal": True, "transformers_weights": None})
# Hugging Face's keys of each RoPE scaling type. ``RopeScaling`` has the same names, apart from that of the length.
_LENGTH = "original_max_position_embeddings"
_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _LENGTH, "beta_fast", "beta_slow", "attention_factor"),
}
# Fields that do not change what the model computes, and head_dim, which is exported as head_size.
_NOT_EXPORTED = ("family", "head_dim", "base_dim", "base_layers", "max_position_embeddings")


def hf_config(config: TransformerConfig, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """Return the content of ``config.json`` for weights in ``dtype``, such as ``bfloat16``.

    Raises:
        ValueError: ``config.json`` cannot describe ``config``, or no family of Hugging Face's supports it.
    """
    name = export_family(config)
    content = _hf_config(FAMILIES[name], config, dtype, bos_id, eos_id)
    # Round trip: it detects new fields of TransformerConfig that the export does not support yet.
    written = config_from_hf(name, content)
    expected = replace(
        config, max_seq_len=content["max_position_embeddings"], rope_scaling=_without_unused(config.rope_scaling)
    )
    for key in (field.name for field in fields(config) if field.name not in _NOT_EXPORTED):
        if getattr(written, key) != getattr(expected, key):
            raise ValueError(
                f"{key} = {getattr(expected, key)!r} cannot be exported: the config.json of a "
                f"{content['model_type']} would mean {getattr(written, key)!r}. Add this field to hf_config and "
                "config_from_hf in torchtrain/plugins/huggingface/llama.py, or train without it"
            )
    return content


def _without_unused(scaling: RopeScaling | None) -> RopeScaling | None:
    """Return ``scaling`` with the values that its type does not use reset to their defaults."""
    if scaling is None:
        return None
    default = RopeScaling(scaling.type)
    unused = {key for keys in _SCALING.values() for key in keys} - set(_SCALING[scaling.type])
    names = ("original_max_seq_len" if key == _LENGTH else key for key in unused)
    return replace(scaling, **{name: getattr(default, name) for name in names})


def _hf_config(
    family: Family, config: TransformerConfig, dtype: str, bos_id: int | None, eos_id: int | None
) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope = None
    if scaling is not None:
        values = {**vars(scaling), _LENGTH: scaling.original_max_seq_len}
        keys = (key for key in _SCALING[scaling.type] if values[key] is not None)
        rope = {"rope_type": scaling.type, **{key: values[key] for key in keys}}
    return {
        "architectures": [f"{family.model_type.capitalize()}ForCausalLM"],
        "model_type": family.model_type,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": max(config.max_seq_len, config.max_position_embeddings or 0),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        **family.fixed,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def config_from_hf(name: str, hf: Mapping[str, Any]) -> TransformerConfig:
    """Convert the content of a ``config.json`` of the family ``name`` to a TransformerConfig.

    Missing keys have the defaults of transformers.

    Raises:
        KeyError: a required key is missing.
        ValueError: the message names the value that is not supported.
    """
    family = FAMILIES[name]
    hf = {**family.defaults, **hf}
    for key, ours in {**_FIXED, **family.fixed}.items():
        if hf.get(key, ours) != ours:
            why = "; attention in sliding windows is not supported" if "sliding" in key else ""
            raise ValueError(f"{key} = {hf[key]!r} must be {ours!r} in a {family.model_type}{why}")
    if set(hf.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"layer_types = {hf['layer_types']!r} must all be 'full_attention': no sliding windows are supported"
        )
    if hf.get("quantization_config"):
        raise ValueError("it has a quantization_config; the weights must be float32, bfloat16 or float16")
    n_heads, n_kv_heads, tied = hf["num_attention_heads"], hf.get("num_key_value_heads"), hf.get("tie_word_embeddings")
    rope = _rope(hf)
    return TransformerConfig(
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        ffn_dim=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        max_seq_len=hf["max_position_embeddings"],
        norm_eps=_number("rms_norm_eps", hf.get("rms_norm_eps", 1e-6)),
        rope_theta=_number("rope_theta", rope["rope_theta"]),
        rope_scaling=_scaling_from_hf(rope),
        tied_embeddings=False if tied is None else tied,
        head_dim=hf.get("head_dim"),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        family=name,
    )


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key} = {value!r} must be a number")
    return float(value)


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """All RoPE parameters of a ``config.json`` in one dict, collected as transformers does."""
    # transformers 5 stores theta and scaling in one entry, earlier versions in two.
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    given = hf.get(key) or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{key} = {given!r} must be an object")
    # RoPE parameters per layer type: transformers' Llama ignores them, and its Qwen fails on them. Only models with
    # sliding windows have them.
    if nested := [name for name, value in given.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"{key} has values per type of layer ({', '.join(nested)}), but all layers must have the same RoPE. If the "
            f"values are equal, write them directly into {key}"
        )
    rope = {"rope_theta": hf.get("rope_theta", 10000.0), _LENGTH: hf["max_position_embeddings"], **given}
    if _LENGTH in hf:  # overrides the one in given
        rope[_LENGTH] = hf[_LENGTH]
    if "partial_rotary_factor" in hf:
        rope.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    return rope


def _scaling_from_hf(rope: Mapping[str, Any]) -> RopeScaling | None:
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", *_SCALING):
        raise ValueError(f"rope_type = {rope_type!r} is not supported; there are default, {', '.join(_SCALING)}")
    for key, ours in {"partial_rotary_factor": 1.0, "truncate": True, "mscale": None, "mscale_all_dim": None}.items():
        if rope.get(key, ours) != ours and not (key == "partial_rotary_factor" and rope[key] is None):
            raise ValueError(f"{key} = {rope[key]!r} of RoPE must be {ours!r}")
    if rope_type == "default":
        return None
    given = {key: rope[key] for key in _SCALING[rope_type] if rope.get(key) is not None}
    optional = {"beta_fast", "beta_slow", "attention_factor"}
    if missing := [key for key in _SCALING[rope_type] if key not in optional | given.keys()]:
        raise ValueError(f"{', '.join(missing)} of RoPE with rope_type = {rope_type!r} must be given, and not null")
    if _LENGTH in given:
        given["original_max_seq_len"] = given.pop(_LENGTH)
    return RopeScaling(rope_type, **given)  # type: ignore[arg-type]


FORMATS: Mapping[str, HFFormat] = MappingProxyType(
    {
        name: HFFormat(
            family.model_type,
            hf_name,
            hf_config,
            partial(config_from_hf, name),
            reads=name != "llama2",  # its config.json has the same model_type as that of Llama 3
        )
        for name, family in FAMILIES.items()
    }
)
"""Hugging Face's format of each family of the core."""
