"""Functions that tests of the model call on several ranks. Ranks import this module instead of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parity import Curve, build, config_of, train
from torch import Tensor

from torchtrain.checkpoint.states import ModelState
from torchtrain.checkpoint.weights import load_weights
from torchtrain.config.registry import import_modules
from torchtrain.config.schema import ActivationCheckpointConfig, JobConfig, ParallelismConfig, TrainingConfig
from torchtrain.distributed.mesh import Mesh, ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.initialization import layout_independent_init
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama import model as llama
from torchtrain.parallelisms import tensor_parallel
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain.plugins.evaluation.generation import Sampling, generate
from torchtrain.plugins.huggingface.safetensors_folder import save_hf


def export(model: Transformer, folder: Path, dtype: str = "float32") -> None:
    save_hf(ModelState([model], model.config.tied_embeddings).state_dict(), folder, model.config, dtype, "")


def shard(shape: TransformerConfig, parallelism: ParallelismConfig) -> Transformer:
    mesh = Mesh(torch.device("cpu"), resolve_parallel_dims(parallelism, dist.get_world_size()))
    with torch.device("meta"):
        model = Transformer(shape)
    parallelize_llama(
        model,
        mesh,
        JobConfig(
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        ),
    )
    model.to_empty(device="cpu")
    model.init_buffers()
    return model


def load_and_export_sharded(
    source: Path, target: Path, shape: TransformerConfig, parallelism: ParallelismConfig
) -> int:
    model = shard(shape, parallelism)
    load_weights([model], source, shape)
    export(model, target)
    return max(parameter.to_local().numel() for parameter in model.parameters())  # type: ignore[attr-defined]


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


def generate_greedily(shape: TransformerConfig, ranks: int) -> list[int | None]:
    """Tokens that a randomly initialized model generates on ``ranks`` tensor-parallel ranks."""
    mesh = Mesh(torch.device("cpu"), ParallelDims(tensor=ranks))
    with torch.device("meta"):
        model = Transformer(shape)
    if ranks > 1:
        tensor_parallel.apply_tensor_parallel(model, mesh.tensor, sequence_parallel=False)
    model.to_empty(device="cpu")
    with layout_independent_init([model], 3), torch.no_grad():
        model.init_weights()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.2)
    return [token for (token,) in generate(model.requires_grad_(False), [[1, 2, 3]], Sampling(), max_new_tokens=12)]


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
        train(config, steps=1)
    return record


def train_example_family(config: JobConfig, shape: TransformerConfig, document_start: int | None = None) -> Curve:
    """``train`` a model of the package in ``scripts/families``."""
    import_modules(["torchtrain_families"])
    return train(config, shape, document_start=document_start)
