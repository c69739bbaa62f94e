"""training.sums = "exact": one run to the bit, on any number of data-parallel ranks."""

from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY, Curve, config_of, train
from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.models.llama import TransformerConfig

STEPS = 4


def batch_of_24(step: int, vocab_size: int, seq_len: int) -> Tensor:
    """Tokens (24, seq_len + 1), which 1, 2, 3, 4, 6 and 8 ranks divide."""
    return torch.randint(0, vocab_size, (24, seq_len + 1), generator=torch.Generator().manual_seed(step))


def config_with(
    parallelism: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **changes: dict[str, Any]
) -> JobConfig:
    return config_of(
        parallelism=parallelism or {}, training={"sums": "exact", "local_batch_size": 1, **(training or {})}, **changes
    )


def run(gloo: GlooPool, ranks: int, config: JobConfig, shape: TransformerConfig = TINY, steps: int = STEPS) -> Curve:
    curves: list[Curve] = gloo.run(ranks, train, config, shape, steps, None, batch_of_24)
    for curve in curves[1:]:
        assert_same_bits(curve, curves[0])
    return curves[0]


def assert_same_bits(curve: Curve, reference: Curve) -> None:
    assert curve.losses == reference.losses
    assert curve.grad_norms == reference.grad_norms
    for ours, theirs in ((curve.last, reference.last), (curve.moments, reference.moments)):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Curve:
    return run(gloo, 1, config_with())


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (2, {}),
        (3, {}),
        (4, {"fsdp_exact_transport": "ring"}),
        (4, {"data_parallel_replicate_degree": 2}),
        (4, {"data_parallel_replicate_degree": 4}),
        (6, {"data_parallel_replicate_degree": 2}),
        (8, {}),
    ],
)
def test_any_layout(gloo: GlooPool, reference: Curve, ranks: int, parallelism: dict[str, Any]) -> None:
    assert_same_bits(run(gloo, ranks, config_with(parallelism)), reference)
