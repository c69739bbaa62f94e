"""Parameter groups and patterns of which some are updated by Muon, and others by AdamW."""

from typing import Any

import pytest
import torch
from test_optimizer_groups import MODEL, check_rates_and_decays_of_mup
from torch import nn

from torchtrain.config.parse import from_toml
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer
from torchtrain.optimizers.adamw import ShardedAdamW
from torchtrain.optimizers.groups import build_optimizer, check_optimizer
from torchtrain.optimizers.options import OptimizerConfig, ParameterGroupConfig, ParameterPatternConfig
from torchtrain.plugins.muon.muon import Muon

PATTERNS = (
    ParameterPatternConfig(params="layers.*.attention.wq.*", lr_factor=0.5, optimizer="adamw"),
    ParameterPatternConfig(params="layers.?.attention.w[qk].*", weight_decay=0.3, lr_factor=4.0),
    ParameterPatternConfig(params="*norm.weight", optimizer="adamw", weight_decay=0.7),
    ParameterPatternConfig(params="output.weight", optimizer="muon"),
)


def test_the_first_pattern_that_matches_sets_optimizer_rate_and_decay_of_a_parameter() -> None:
    config = OptimizerConfig(
        name="muon", lr=1e-2, weight_decay=0.2, hidden=ParameterGroupConfig(lr_factor=2.0), groups=PATTERNS
    )
    container = build_optimizer([Transformer(MODEL)], config)
    found = {}
    for optimizer in container.optimizers:
        for group in optimizer.param_groups:
            for name in group["param_names"]:
                kind = "muon" if isinstance(optimizer, Muon) else "adamw"
                found[name.removeprefix("layers.0.")] = kind, group["lr"], group["weight_decay"]
    assert {"attention.wq.weight", "attention.wk.weight", "attention.wq.bias", "norm.weight"} <= found.keys()
    expected = {
        "attention.wq.weight": ("adamw", 0.5e-2, 0.2),  # the first of two patterns, the decay of its group
        "attention.wk.weight": ("muon", 4e-2, 0.3),  # the optimizer of its group
        "attention.wv.weight": ("muon", 2e-2, 0.2),  # in no pattern
        "attention.wq.bias": ("adamw", 0.5e-2, 0.0),
        "attention.q_norm.weight": ("adamw", 1e-2, 0.7),
        "output.weight": ("muon", 1e-2, 0.2),
        "tok_embeddings.weight": ("adamw", 1e-2, 0.2),
    }
    assert {name: found[name] for name in expected} == expected


def test_optimizer_states_are_named_by_parameter() -> None:
    model = Transformer(MODEL)
    optimizer = build_optimizer([model], OptimizerConfig(name="muon", groups=PATTERNS))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = optimizer.state_dict()
    entries = {
        name: {key[len(name) + 1 :] for key in states if key.startswith(f"{name}.")}
        for name in ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight")
    }
    assert entries == {
        "layers.0.attention.wq.weight": {"step", "exp_avg", "exp_avg_sq"},
        "layers.0.attention.wk.weight": {"momentum_buffer"},
    }
    assert optimizer.state_dict()["norm.weight.exp_avg"] is states["norm.weight.exp_avg"]


def test_muon_rejects_a_parameter_of_four_dimensions_by_name() -> None:
    model = nn.Module()
    model.experts = nn.Parameter(torch.ones(2, 3, 4, 5))
    with pytest.raises(
        ConfigError, match=r"muon cannot update experts, whose shape is 2 x 3 x 4 x 5: .*optimizer = 'adamw'"
    ):
        build_optimizer([model], OptimizerConfig(name="muon"))
    by_adamw = (ParameterPatternConfig(params="experts", optimizer="adamw"),)
    (optimizer,) = build_optimizer([model], OptimizerConfig(name="muon", groups=by_adamw)).optimizers
    assert isinstance(optimizer, ShardedAdamW)


def test_mup_divides_rates_and_multiplies_decays_as_the_table_in_the_documentation() -> None:
    check_rates_and_decays_of_mup("muon", of_matrices=2.0)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"params": "*", "optimizer": "moun"}, r"groups\[0\].optimizer = 'moun' .*did you mean 'muon'"),
        ({"params": "*norm.weight", "optimizer": "muon"}, "muon cannot update .*norm.weight, whose shape"),
    ],
)
def test_invalid_patterns_are_rejected(table: dict[str, Any], message: str) -> None:
    parameters = dict(Transformer(MODEL).named_parameters())
    with pytest.raises(ConfigError, match=message):
        check_optimizer(from_toml(OptimizerConfig, {"groups": [table]}, "optimizer."), parameters, MODEL)
