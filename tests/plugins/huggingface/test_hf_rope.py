"""RoPE: equal to transformers' at the sizes of published models, and in a model that is loaded in bfloat16."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import TINY
from plugin_rank_functions import export
from rank_functions import recorded_rope
from test_rope import FLOAT32_TABLES, ONE_ROUNDING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchtrain.config.registry import MODELS
from torchtrain.distributed.connections import gloo_backend
from torchtrain.models.llama import Transformer
from torchtrain.models.llama.model import rope_frequencies
from torchtrain.models.model_config import flavor_config
from torchtrain.plugins.evaluation.trained_model import load_model
from torchtrain.plugins.huggingface.config import config_from_hf
from torchtrain.plugins.huggingface.llama import hf_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 320,
    "max_position_embeddings": 40960,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def hf_rotary_embedding(hf: dict[str, Any]) -> LlamaRotaryEmbedding:
    values = {key: value for key, value in copy.deepcopy(hf).items() if key != "model_type"}
    return LlamaRotaryEmbedding(CONFIG_MAPPING[hf["model_type"]](**values))


def assert_same_rope(hf: dict[str, Any]) -> None:
    ours, theirs = config_from_hf(hf), hf_rotary_embedding(hf)
    torch.testing.assert_close(rope_frequencies(ours), theirs.inv_freq, rtol=1e-6, atol=0)
    amplitude = ours.rope_scaling.amplitude if ours.rope_scaling else 1.0
    assert amplitude == pytest.approx(theirs.attention_scaling, rel=1e-9)


def yarn(theta: float, length: int, factor: float, head_dim: int = 128, **keys: float) -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **keys}
    return {"rope_theta": theta, "rope_scaling": scaling, "head_dim": head_dim}


# Published models, and cases in which a bound of YaRN is outside the channel pairs of a head, or both are on one pair.
PUBLISHED_SIZES = {
    "Llama 2 7B, linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "Llama 3.1 8B": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "Llama 3.2 1B": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
        "head_dim": 64,
    },
    "llama3, other frequency factors": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "low_freq_factor": 2.5, "high_freq_factor": 17.0, "factor": 3.0},
    },
    "Qwen2.5 7B": yarn(1e6, 32768, 4.0),
    "Qwen3 8B": yarn(1e6, 40960, 4.0),
    "Llama 2 7B 128k": yarn(1e4, 4096, 32.0),
    "Llama 2 7B 64k": yarn(1e4, 4096, 16.0, beta_fast=24.0, beta_slow=2.0, attention_factor=0.8),
    "Qwen2 0.5B": yarn(1e6, 131072, 2.5, head_dim=64),
    "first bound below 0": yarn(1e4, 128, 8.0),
    "second bound above the last pair": yarn(1e4, 131072, 8.0),
    "second bound above the head dimension": yarn(20.0, 131072, 8.0),
    "both bounds on one pair": yarn(1e6, 32768, 4.0, beta_fast=4.0, beta_slow=4.0),
    "small beta_slow": yarn(5e5, 8192, 16.0, beta_fast=64.0, beta_slow=0.05),
    "factor below 1": yarn(1e4, 8192, 0.5),
}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_frequencies_equal_transformers_at_published_sizes(name: str) -> None:
    assert_same_rope({**BASE, **PUBLISHED_SIZES[name]})


def test_cos_and_sin_tables_equal_transformers_up_to_the_last_position() -> None:
    hf = {**BASE, **yarn(1e6, 32768, 4.0), "max_position_embeddings": 131072}
    shape = replace(config_from_hf(hf), dim=8, n_heads=1, n_kv_heads=1, head_dim=128, ffn_dim=2, vocab_size=2)
    model, positions = Transformer(shape), torch.tensor([[*range(64), *range(131072 - 64, 131072)]])
    cos, sin = hf_rotary_embedding(hf)(torch.zeros(()), positions)
    assert model.rope_cos.shape == (131072, 64)
    # Rounding an angle of 131072 radians to float32 changes it by up to 0.008.
    torch.testing.assert_close(model.rope_cos[positions], cos[..., :64], rtol=0, atol=1e-2)
    torch.testing.assert_close(model.rope_sin[positions], sin[..., :64], rtol=0, atol=1e-2)
    torch.testing.assert_close(model.rope_cos[:64], cos[0, :64, :64], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": YARN, "original_max_position_embeddings": 2048},  # the value in rope_scaling has priority
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 2048},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": YARN, "beta_fast": 2.0, "factor": 9.0, "attention_factor": 3.0},  # ignored at the top level
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_scaling": {**YARN, "low_freq_factor": 3.0, "beta_fast": None}},
        {"rope_scaling": YARN, "truncate": False},
        {"rope_scaling": {"rope_type": "default", "factor": 3.0, "mrope_section": [16, 24, 24]}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}, "rope_theta": 5e5},
        {"partial_rotary_factor": 1.0, "rope_theta": 3e4},
        {"rope_local_base_freq": 2e4, "rope_theta": 3e4},
        {"model_type": "qwen3", "rope_theta": 3e4},
        {"model_type": "qwen2", "head_dim": 96, "rope_theta": 3e4},
        {"model_type": "mistral", "sliding_window": None, "head_dim": None, "rope_theta": 3e4},
    ],
)
def test_rope_keys_are_interpreted_as_in_transformers(rope: dict[str, Any]) -> None:
    assert_same_rope({**BASE, **rope})


def nested(**layers: float) -> dict[str, Any]:
    return {layer: {"rope_theta": theta, "rope_type": "default"} for layer, theta in layers.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": nested(full_attention=1e6, sliding_attention=1e4)},
            r"rope_parameters has values per type of layer \(full_attention, sliding_attention\)",
        ),
        ({"rope_parameters": nested(full_attention=1e6)}, "rope_parameters has values per type of layer"),
        ({"rope_scaling": nested(full_attention=1e6)}, "rope_scaling has values per type of layer"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' must be an object"),
        ({"rope_theta": None}, "rope_theta = None must be a number"),
        ({"rope_theta": 0}, "rope_theta = 0.0 must be above 0"),
        ({"rope_theta": "1e6"}, "rope_theta = '1e6' must be a number"),
        ({"rope_theta": 1e6, "rope_scaling": {**YARN, "rope_theta": None}}, "rope_theta = None must be a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None must be a number"),
        ({"rope_scaling": {"rope_type": "linear"}, "factor": 2.0}, "factor of RoPE with rope_type = 'linear' must be"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "su"}}, "rope_type = 'su'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type = 'mrope'"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type = 'proportional'"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate = False"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate = None"),
        ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}, "mscale = 1.0"),
        ({"rope_scaling": {**YARN, "factor": None}}, "factor of RoPE with rope_type = 'yarn' must be given"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast = 0 must be a number above 0"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings of RoPE"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"num_key_value_heads": 0}, "n_kv_heads = 0 must be above 0"),
        ({"is_causal": False}, "is_causal = False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' must be 'silu' in a llama"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"model_type": "granite", "attention_multiplier": 0.5}, "model_type = 'granite'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "layer_types"),
    ],
)
def test_unsupported_config_values_raise_an_error_that_names_them(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**BASE, **change})


FLAVORS = [f"{name} {flavor}" for name in MODELS for flavor in MODELS[name].flavors]


@pytest.mark.parametrize("name", FLAVORS)
def test_exported_config_of_each_flavor_has_the_same_rope_in_transformers(name: str) -> None:
    shape = flavor_config(*name.split())
    assert_same_rope(hf_config(shape, "bfloat16", 1, 2))
    rotary = hf_rotary_embedding(hf_config(shape, "bfloat16", 1, 2))
    torch.testing.assert_close(rope_frequencies(shape), rotary.inv_freq, rtol=1e-6, atol=0)


def test_tables_are_float32_in_a_model_loaded_in_bfloat16(tmp_path: Path) -> None:
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    export(Transformer(replace(TINY, vocab_size=4096)), tmp_path / "hf")
    dist.destroy_process_group()
    trained = load_model(tmp_path / "hf", "cpu", "bfloat16")
    dist.destroy_process_group()
    with recorded_rope() as rope:
        trained.model(torch.arange(TINY.max_seq_len)[None])
    assert rope.dtypes == FLOAT32_TABLES
    assert rope.calls == 2 * TINY.n_layers
    assert not rope.tables_rounded
    assert rope.error < ONE_ROUNDING
