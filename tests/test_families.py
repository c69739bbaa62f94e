"""The config of each model family, and errors about it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY
from rank_functions import build_without_tensor_parallel_plan
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.config import registry
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import ConfigError
from torchtrain.models import options
from torchtrain.models.llama import RopeScaling, Transformer, TransformerConfig
from torchtrain.models.llama.families import LINEAR_LAYERS
from torchtrain.models.llama.model import TransformerBlock
from torchtrain.models.model_config import build_model_config, flavor_config
from torchtrain.models.options import ModelConfig, ModelOverrides, MupConfig, RopeScalingConfig
from torchtrain.parallelisms.activation_checkpoint import MATRIX_PRODUCTS


def test_config_sections_list_all_families_flavors_and_fields() -> None:
    listed = "; ".join(f"{name}: {', '.join(registry.MODELS[name].flavors)}" for name in sorted(registry.MODELS._core))
    assert listed in " ".join((Path(options.__file__).read_text()).split())
    others = {"vocab_size", "max_seq_len", "family", "head_size", *(field.name for field in fields(MupConfig))}
    assert {field.name for field in fields(ModelOverrides)} == {
        field.name for field in fields(TransformerConfig)
    } - others
    assert [field.name for field in fields(RopeScalingConfig)] == [field.name for field in fields(RopeScaling)]


def section(**values: Any) -> ModelConfig:
    return ModelConfig(**values)


def shape_of(model: ModelConfig) -> TransformerConfig:
    return build_model_config(model, load_tokenizer(), 128)


def test_shape_overrides_the_flavor() -> None:
    flavor = replace(flavor_config("llama3", "debugmodel"), vocab_size=4096, max_seq_len=128)
    assert shape_of(section()) == flavor
    changes = {"dim": 768, "n_layers": 12, "n_heads": 12, "ffn_dim": 2048}
    found = shape_of(section(shape=ModelOverrides(**changes)))
    assert found == replace(flavor, **changes)
    assert found.head_size == 64
    yarn = ModelOverrides(rope_scaling=RopeScalingConfig("yarn", factor=2.0, original_max_seq_len=64), qk_norm=True)
    found = shape_of(section(vocab_size=4224, shape=yarn))
    scaling = RopeScaling("yarn", factor=2.0, original_max_seq_len=64)
    assert found == replace(flavor, rope_scaling=scaling, qk_norm=True, vocab_size=4224)
    assert shape_of(section(shape=ModelOverrides(rope_scaling=RopeScalingConfig("none")))).rope_scaling is None
    more = ModelOverrides(rope_scaling=RopeScalingConfig(factor=32.0))
    assert shape_of(section(shape=more)).rope_scaling == RopeScaling("llama3", factor=32.0)
    assert shape_of(section(name="llama2", shape=more)).rope_scaling == RopeScaling("llama3", factor=32.0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (section(vocab_size=4000), "model.vocab_size = 4000 must be at least 4096, the number of the tokenizer's ids"),
        (section(shape=ModelOverrides(n_heads=7)), "n_kv_heads = 4 must divide n_heads = 7"),
        (
            section(shape=ModelOverrides(n_heads=12)),
            "n_heads = 12 must divide dim = 256, unless head_dim is set",
        ),
        (section(shape=ModelOverrides(head_dim=9)), "head_dim = 9 must be even"),
        (section(shape=ModelOverrides(n_layers=0)), "n_layers = 0 must be above 0"),
        (
            section(shape=ModelOverrides(rope_theta=float("inf"))),
            "rope_theta = inf must be above 0, and finite",
        ),
        (
            section(shape=ModelOverrides(rope_scaling=RopeScalingConfig(factor=-1.0))),
            "rope_scaling.factor = -1.0 must be a number above 0",
        ),
        (
            section(shape=ModelOverrides(rope_scaling=RopeScalingConfig("yarn", factor=float("inf")))),
            "rope_scaling.factor = inf must be a number above 0, and finite",
        ),
        (
            section(shape=ModelOverrides(rope_scaling=RopeScalingConfig(low_freq_factor=4.0))),
            "rope_scaling.low_freq_factor = 4.0 must be below high_freq_factor = 4.0",
        ),
        (
            section(shape=ModelOverrides(rope_theta=1.0, rope_scaling=RopeScalingConfig("yarn"))),
            "rope_theta = 1.0 must be above 1: yarn divides by its logarithm",
        ),
        (section(flavor="", shape=ModelOverrides(dim=64)), "model.flavor is empty, .* 'n_layers', 'n_heads'"),
        (section(name="qwen3", shape=ModelOverrides(qkv_bias=True)), "qk_norm and qkv_bias exclude each other"),
    ],
)
def test_invalid_shape_is_rejected(model: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(model)


@pytest.mark.parametrize("bias", [False, True])
def test_initial_biases_are_zero_and_initial_norms_one(bias: bool) -> None:
    model = Transformer(replace(TINY, qkv_bias=bias, qk_norm=True))
    vectors = {name: p for name, p in model.layers["1"].named_parameters() if p.ndim == 1}
    assert len(vectors) == (7 if bias else 4)
    for name, vector in vectors.items():
        assert (vector == (0.0 if name.endswith("bias") else 1.0)).all(), name


@pytest.mark.parametrize("bias", [False, True])
def test_block_lists_its_matrix_products(bias: bool) -> None:
    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in MATRIX_PRODUCTS
            return func(*args, **(kwargs or {}))

    block = TransformerBlock(replace(TINY, qkv_bias=bias))
    table = torch.ones(1, 8, 1, 4)
    with Count() as count:
        block(torch.randn(2, 8, TINY.dim), table, table)
    assert count.products == len(LINEAR_LAYERS)
    assert {f"{name}.weight" for name in LINEAR_LAYERS} == {n for n, p in block.named_parameters() if p.ndim == 2}


def test_parameter_missing_from_the_tensor_parallel_plan_is_named(gloo: GlooPool) -> None:
    gloo.run(2, build_without_tensor_parallel_plan, "attention.wo")
