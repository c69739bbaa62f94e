"""What [grains] rejects, with the rule, the value and the way out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY, config_of, train
from torch import Tensor, nn

from torchtrain.checkpoint.resume_compatibility import check_resume_compatibility
from torchtrain.config.parse import to_toml
from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.families import LLAMA3
from torchtrain.models.llama.model import Attention, FeedForward, TransformerBlock
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.exact_sums.options import GrainsConfig
from torchtrain.resolve import ResolvedRun

SHAPE = replace(TINY, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=104)


def config_with(tensor: int = 4, context: int = 4, **changes: dict[str, Any]) -> JobConfig:
    training = {"sums": "exact", **changes.pop("training", {})}
    return config_of(training=training, grains={"tensor": tensor, "context": context}, **changes)


def check(config: JobConfig, shape: TransformerConfig = SHAPE, device: str = "cpu") -> None:
    layout = config.parallelism
    ranks = layout.tensor_parallel_degree * layout.context_parallel_degree * layout.pipeline_parallel_degree
    config, dims = resolve_layout(config, shape, ranks)
    run = ResolvedRun(config, load_tokenizer(""), shape, dims)
    section_of(config, GrainsConfig).check_run(run, torch.device(device))


def test_valid_configs_are_accepted() -> None:
    check(config_with())
    check(config_with(parallelism={"tensor_parallel_degree": 4, "context_parallel_degree": 2}))
    check(config_with(4, 1, parallelism={"tensor_parallel_degree": 2}))
    check(config_of(grains={"tensor": 1, "context": 1}))  # off


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 6}, r"grains.tensor = 6 must be a power of two"),
        ({"context": 3}, r"grains.context = 3 must be a power of two"),
        ({"tensor": 0}, r"grains.tensor = 0 must be at least 1"),
        ({"training": {"sums": "fast"}}, r"need training.sums = 'exact'; set that, or set both to 1"),
        ({"exact_sums": {"transport": "ring"}}, r"set exact_sums.transport = 'all_to_all' or 'auto', not 'ring'"),
        ({"compile": {"enable": True}}, r"compile.enable = true cannot be combined with them: set it to false"),
        ({"float8": {"recipe": "rowwise"}}, r"float8.recipe cannot be combined with them: set it to 'none'"),
        ({"training": {"enable_cpu_offload": True}}, r"training.enable_cpu_offload = true cannot be combined with"),
        ({"comparison": {"fingerprint_steps": (1,)}}, r"comparison.fingerprint_steps cannot be combined with them"),
        (
            {"evaluation": {"prompts": ("a",)}, "data": {"held_out": 0.1}},
            r"evaluation.prompts and evaluation.tasks cannot be combined with them: evaluate checkpoints by",
        ),
    ],
)
def test_configs_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_with(**changes)


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        (
            {"tensor": 2, "parallelism": {"tensor_parallel_degree": 4}},
            {},
            r"grains.tensor = 2 must be a multiple of parallelism.tensor_parallel_degree = 4: .*; try 4, or",
        ),
        (
            {"context": 2, "parallelism": {"context_parallel_degree": 2}},
            {},
            r"grains.context = 2 must be a multiple of 2 \* parallelism.context_parallel_degree = 4: .*; try 4, or",
        ),
        (
            {"context": 1, "parallelism": {"context_parallel_degree": 2}},
            {},
            r"grains.context = 1 must be a multiple of 2 \* parallelism.context_parallel_degree = 4",
        ),
        ({}, {"n_kv_heads": 2}, r"grains.tensor = 4 must divide the model's n_kv_heads = 2: .*; try 2, or"),
        ({}, {"n_heads": 6, "n_kv_heads": 2, "head_dim": 4}, r"grains.tensor = 4 must divide the model's n_heads = 6"),
        ({}, {"ffn_dim": 66}, r"grains.tensor = 4 must divide the model's ffn_dim = 66"),
        ({}, {"vocab_size": 101}, r"must divide the model's vocab_size = 101: .*; try 1, or another .* 100 or 104"),
        ({"context": 8}, {}, r"training.seq_len = 16 must be a multiple of grains.tensor = 4 times .* = 8; try 32"),
        ({}, {"ffn_dim": 32}, r"ffn_dim / grains.tensor = 32 must be a multiple of 64 on CPUs"),
        (
            {"parallelism": {"pipeline_parallel_degree": 2}},
            {"tied_embeddings": True},
            r"\[grains\] does not support tied embeddings on a pipeline.*set parallelism.pipeline_parallel_degree = 1",
        ),
    ],
)
def test_layouts_and_models_are_rejected(changes: dict[str, Any], shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config_with(**changes), replace(SHAPE, **shape))


def test_document_masks_with_chunks_are_rejected_on_gpus() -> None:
    with pytest.raises(ConfigError, match=r"grains.context = 4 does not support data.document_mask = true on GPUs"):
        check(config_with(data={"document_mask": True}), device="cuda")


class Scaled(FeedForward):
    """A feed-forward network with another parameter."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(config.ffn_dim))


class Biased(Attention):
    """Attention with a bias of the output projection."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.wo = nn.Linear(self.wo.in_features, self.wo.out_features)


class Gated(FeedForward):
    """A feed-forward network that applies a function to its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def register(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Register a model "mine", whose block has other modules or whose spec has other fields."""
    modules = {name: changes.pop(name) for name in ("feed_forward", "attention") if name in changes}

    class Block(TransformerBlock):
        def __init__(self, config: TransformerConfig):
            super().__init__(config)
            for name, module in modules.items():
                setattr(self, name, module(config))

    class Model(Transformer):
        block_class = Block

    monkeypatch.setitem(MODELS._entries, "mine", replace(LLAMA3, model_class=Model, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelize": lambda *_: None}, r"'mine' has a ModelSpec.parallelize of its own"),
        ({"feed_forward": Scaled}, r"layers.0.feed_forward is a Scaled, and \[grains\] needs RMSNorm there"),
        ({"attention": Biased}, r"layers.0.attention.wo has a bias, which each grain would add"),
    ],
)
def test_models_with_other_modules_are_rejected(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    register(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=message):
        check(config_with(), replace(SHAPE, family="mine"))


def _train_gated(config: JobConfig) -> str:
    with pytest.MonkeyPatch.context() as patch:
        register(patch, feed_forward=Gated)
        with pytest.raises(ConfigError) as found:
            train(config, replace(SHAPE, family="mine"))
    return str(found.value)


def test_function_of_what_a_row_wise_layer_returns_is_rejected(gloo: GlooPool) -> None:
    """Its sum over grains would be another function."""
    (message,) = gloo.run(1, _train_gated, config_with())
    assert "[grains] adds what the tensor grains of feed_forward return" in message


def test_change_of_grains_is_checked_on_resume() -> None:
    with pytest.raises(CheckpointError, match=r"grains.tensor = 2 \(checkpoint: 4\)"):
        check_resume_compatibility(to_toml(config_with()), to_toml(config_with(2)), ())
    config = config_with(2)
    assert section_of(config, GrainsConfig).enabled
    check_resume_compatibility(to_toml(config_with()), to_toml(config), ("grains.tensor",))
