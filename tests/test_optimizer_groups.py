"""Parameter groups by name, each with its weight decay and learning-rate factor."""

from dataclasses import replace

import pytest
import torch
from parity import TINY
from torch import nn

from torchtrain.config.schema import LRSchedulerConfig, OptimizerConfig, ParameterGroupConfig
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer
from torchtrain.optimizers.groups import build_optimizer, group_of, update
from torchtrain.optimizers.lr_schedule import LRSchedule

MODEL = replace(TINY, n_layers=1, qkv_bias=True, qk_norm=True)


def test_parameters_are_grouped_by_name() -> None:
    groups: dict[str, set[str]] = {"matrices": set(), "embeddings": set(), "vectors": set()}
    for name, parameter in Transformer(MODEL).named_parameters():
        groups[group_of(name, parameter)].add(name.removeprefix("layers.0.").removesuffix(".weight"))
    assert groups["embeddings"] == {"tok_embeddings", "output"}
    assert groups["matrices"] == {f"attention.w{x}" for x in "qkvo"} | {f"feed_forward.w{x}" for x in "123"}
    norms = {"norm", "attention_norm", "ffn_norm", "attention.q_norm", "attention.k_norm"}
    assert groups["vectors"] == norms | {f"attention.w{x}.bias" for x in "qkv"}


def test_weight_decay_and_learning_rate_of_each_group_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    model, plain = Transformer(MODEL), Transformer(MODEL)
    plain.load_state_dict(model.state_dict())
    config = OptimizerConfig(
        lr=1e-2,
        weight_decay=0.2,
        matrices=ParameterGroupConfig(lr_factor=0.5),
        embeddings=ParameterGroupConfig(lr_factor=3.0, weight_decay=0.0),
        vectors=ParameterGroupConfig(weight_decay=0.3),
    )
    expected = {"matrices": (0.5, 0.2), "embeddings": (3.0, 0.0), "vectors": (1.0, 0.3)}
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
        update(optimizer, torch.tensor(0.0))
        reference.step()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7, msg=name)


def test_negative_lr_factor_raises_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.vectors.lr_factor = -1.0 must be at least 0"):
        OptimizerConfig(vectors=ParameterGroupConfig(lr_factor=-1.0))


def test_betas_and_epsilon_equal_torch_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    plain = nn.Parameter(model.weight.detach().clone())
    optimizer = build_optimizer([model], OptimizerConfig(lr=1e-2, beta1=0.5, beta2=0.7, eps=0.1, weight_decay=0.2))
    reference = torch.optim.AdamW([plain], lr=1e-2, betas=(0.5, 0.7), eps=0.1, weight_decay=0.2)
    for _ in range(3):
        model.weight.grad = torch.randn(8, 8)
        plain.grad = model.weight.grad.clone()
        update(optimizer, torch.tensor(0.0))
        reference.step()
    torch.testing.assert_close(model.weight, plain, rtol=0, atol=1e-6)
