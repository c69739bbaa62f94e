"""Parameter groups by name, each with its weight decay and learning-rate factor."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import TINY
from torch import nn

from torchtrain.config.parse import from_toml
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer
from torchtrain.optimizers.groups import build_optimizer, check_optimizer, group_of
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import (
    LRSchedulerConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    ParameterPatternConfig,
)

MODEL = replace(TINY, n_layers=1, qkv_bias=True, qk_norm=True)


def test_parameters_are_grouped_by_name() -> None:
    groups: dict[str, set[str]] = {"hidden": set(), "embedding": set(), "no_decay": set()}
    for name, parameter in Transformer(MODEL).named_parameters():
        groups[group_of(name, parameter)].add(name.removeprefix("layers.0.").removesuffix(".weight"))
    assert groups["embedding"] == {"tok_embeddings", "output"}
    assert groups["hidden"] == {f"attention.w{x}" for x in "qkvo"} | {f"feed_forward.w{x}" for x in "123"}
    norms = {"norm", "attention_norm", "ffn_norm", "attention.q_norm", "attention.k_norm"}
    assert groups["no_decay"] == norms | {f"attention.w{x}.bias" for x in "qkv"}


def test_weight_decay_and_learning_rate_of_each_group_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    model, plain = Transformer(MODEL), Transformer(MODEL)
    plain.load_state_dict(model.state_dict())
    config = OptimizerConfig(
        lr=1e-2,
        weight_decay=0.2,
        hidden=ParameterGroupConfig(lr_factor=0.5),
        embedding=ParameterGroupConfig(lr_factor=3.0, weight_decay=0.0),
        no_decay=ParameterGroupConfig(weight_decay=0.3),
    )
    expected = {"hidden": (0.5, 0.2), "embedding": (3.0, 0.0), "no_decay": (1.0, 0.3)}
    optimizer = build_optimizer([model], config)
    reference = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in plain.named_parameters() if group_of(n, p) == name],
                "lr": 1e-2 * factor,
                "weight_decay": decay,
            }
            for name, (factor, decay) in expected.items()
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = LRSchedule(LRSchedulerConfig(warmup_steps=0, decay_type="linear"), config.lr, 4)
    for step in (1, 2):
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        schedule.apply(optimizer, step)
        for group, (factor, _) in zip(reference.param_groups, expected.values(), strict=True):
            group["lr"] = 1e-2 * (1 - (step - 1) / 4) * factor
        optimizer.step(torch.tensor(0.0))
        reference.step()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7, msg=name)


def test_negative_lr_factor_raises_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.no_decay.lr_factor = -1.0 must be at least 0"):
        OptimizerConfig(no_decay=ParameterGroupConfig(lr_factor=-1.0))


def test_betas_and_epsilon_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    plain = nn.Parameter(model.weight.detach().clone())
    optimizer = build_optimizer([model], OptimizerConfig(lr=1e-2, beta1=0.5, beta2=0.7, eps=0.1, weight_decay=0.2))
    reference = torch.optim.AdamW([plain], lr=1e-2, betas=(0.5, 0.7), eps=0.1, weight_decay=0.2)
    for _ in range(3):
        model.weight.grad = torch.randn(8, 8)
        plain.grad = model.weight.grad.clone()
        optimizer.step(torch.tensor(0.0))
        reference.step()
    torch.testing.assert_close(model.weight, plain, rtol=0, atol=1e-6)


def test_mup_divides_rates_and_multiplies_decays_as_the_table_in_the_documentation() -> None:
    check_rates_and_decays_of_mup("adamw", of_matrices=4.0)


def check_rates_and_decays_of_mup(name: str, of_matrices: float) -> None:
    """docs/recipes.md, with m = 4 and l = 3, on top of the factors and decays of groups."""
    model = replace(TINY, n_layers=3, qkv_bias=True, base_dim=TINY.dim // 4, base_layers=1)
    config = OptimizerConfig(
        name=name,
        lr=1e-2,
        weight_decay=0.2,
        hidden=ParameterGroupConfig(lr_factor=0.5),
        no_decay=ParameterGroupConfig(lr_factor=3.0, weight_decay=0.1),
        groups=(ParameterPatternConfig(params="layers.1.*.w3.weight", lr_factor=0.25, weight_decay=0.7),),
    )
    found = {}
    for group in build_optimizer([Transformer(model)], config, model=model).param_groups:
        for parameter in group["param_names"]:
            found[parameter] = group["lr"], group["weight_decay"]
    for parameter, numbers in found.items():
        rate, decay, divisor = (0.5e-2, 0.2, of_matrices)
        if parameter in ("tok_embeddings.weight", "output.weight"):
            rate, decay, divisor = 1e-2, 0.2, 1.0
        elif "norm" in parameter or parameter.endswith("bias"):
            rate, decay, divisor = 3e-2, 0.1, 4.0 if parameter == "norm.weight" else 1.0
        elif parameter == "layers.1.feed_forward.w3.weight":
            rate, decay = 0.25e-2, 0.7
        elif ".wo." in parameter or ".w2." in parameter:
            divisor = 3 * of_matrices
        assert numbers == pytest.approx((rate / divisor, decay * divisor)), parameter


def test_a_model_with_patterns_has_the_updates_of_plain_adamw() -> None:
    torch.manual_seed(0)
    model = Transformer(MODEL)
    patterns = (ParameterPatternConfig(params="*.wq.weight", lr_factor=0.5, weight_decay=0.3),)
    optimizer = build_optimizer([model], OptimizerConfig(lr=1e-2, groups=patterns))
    parameter = model.layers["0"].get_parameter("attention.wq.weight")
    plain = nn.Parameter(parameter.detach().clone())
    reference = torch.optim.AdamW([plain], lr=0.5e-2, betas=(0.9, 0.95), weight_decay=0.3)
    for _ in range(3):
        parameter.grad = torch.randn_like(parameter)
        plain.grad = parameter.grad.clone()
        optimizer.step(torch.tensor(0.0))
        reference.step()
    torch.testing.assert_close(parameter.detach(), plain.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"groups": [{"params": "layers.*.wq.wait"}]},
            r"optimizer.groups\[0\].params = 'layers.\*.wq.wait' matches no parameter; did you mean 'layers.0",
        ),
        ({"groups": [{"params": ""}]}, r"optimizer.groups\[0\].params = '' must name parameters"),
        ({"groups": [{"params": "*", "lr_factor": -1}]}, r"optimizer.groups\[0\].lr_factor = -1.0 must be at least 0"),
        ({"groups": [{"params": "*", "optimizer": "adam"}]}, r"groups\[0\].optimizer = 'adam' .*did you mean 'adamw'"),
        ({"options": {"lion": {"beta1": 0.9}}}, r"optimizer.options.lion is for an optimizer that no parameter group"),
        ({"options": {"adamw": {"beta1": 0.9}}}, r"optimizer.options.adamw.beta1 is not a known key"),
        ({"options": {"adamw": 1}}, r"optimizer.options.adamw = 1 must be a table"),
    ],
)
def test_invalid_groups_and_options_are_rejected(table: dict[str, Any], message: str) -> None:
    parameters = dict(Transformer(MODEL).named_parameters())
    with pytest.raises(ConfigError, match=message):
        check_optimizer(from_toml(OptimizerConfig, table, "optimizer."), parameters, MODEL)
