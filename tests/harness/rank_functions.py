"""Functions that tests of the model call on several ranks. Ranks import this module instead of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from parity import TINY, build, config_of, train
from torch import Tensor

from torchtrain.errors import ConfigError
from torchtrain.models.llama import model as llama
from torchtrain.parallelisms import tensor_parallel


def build_without_tensor_parallel_plan(name: str) -> None:
    """Build a model with the entry ``name`` missing from the tensor-parallel plan, which must raise."""
    parallelize = tensor_parallel.parallelize_module

    def without_name(model: Any, mesh: Any, plan: dict[str, Any]) -> Any:
        return parallelize(model, mesh, {key: style for key, style in plan.items() if not key.endswith(name)})

    tensor_parallel.parallelize_module = without_name
    message = r"layers.0.attention.wo.weight is on the mesh \('shard',\), not \('shard', 'tensor'\)"
    try:
        with pytest.raises(ConfigError, match=message):
            build(config_of(parallelism={"tensor_parallel_degree": 2}))
    finally:
        tensor_parallel.parallelize_module = parallelize


@dataclass
class RopeRecord:
    """Records the calls of ``apply_rope``: dtypes of input, tables and result; precision of tables and results."""

    dtypes: set[tuple[torch.dtype, ...]] = field(default_factory=set)
    calls: int = 0
    tables_rounded: bool = False
    """Whether a table's values can be represented in bfloat16, whatever its dtype."""
    error: float = 0.0
    """The largest error of a result relative to the same computation in float64."""


@contextmanager
def recorded_rope() -> Iterator[RopeRecord]:
    record, original = RopeRecord(), llama.apply_rope

    def recorded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = original(x, cos, sin)
        record.calls += 1
        record.dtypes.add((x.dtype, cos.dtype, sin.dtype, out.dtype))
        record.tables_rounded |= bool((sin == sin.bfloat16()).all())
        with torch.no_grad():
            first, second = x.double().chunk(2, dim=-1)
            c, s = cos.double(), sin.double()
            exact = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
            error = (out.double() - exact).abs() / exact.abs().clamp(min=1e-3)
            record.error = max(record.error, error.max().item())
        return out

    with patch.object(llama, "apply_rope", recorded):
        yield record


def rope_in_a_step(parallelism: dict[str, int], checkpointing: str) -> RopeRecord:
    config = config_of(
        training={"mixed_precision_param": "bfloat16"},
        parallelism=parallelism,
        activation_checkpoint={"mode": checkpointing},
    )
    with recorded_rope() as record:
        train(config, replace(TINY, n_layers=2), steps=1)
    return record
