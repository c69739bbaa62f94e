"""Initial weights are a function of (seed, name, shape) alone, on any layout."""

import math
from dataclasses import replace

import pytest
import torch
from gloo_pool import GlooPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtrain.models.initialization import BLOCK, fill_parameter, layout_independent_init, normal_quantile
from torchtrain.models.llama import Transformer
from torchtrain.models.model_config import flavor_config


class OneMatrix(nn.Module):
    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


def filled(seed: int, rows: int = 300, columns: int = 500, name: str = "weight") -> Tensor:
    matrix = torch.empty(rows, columns)
    fill_parameter(matrix, normal_quantile, seed, name)
    return matrix


def test_values_differ_by_seed_name_and_shape() -> None:
    base = filled(0).flatten()
    for other in (filled(1), filled(0, name="other"), filled(0, 500, 300)):
        correlation = (base * other.flatten()).mean()
        assert abs(correlation) < 5 / math.sqrt(base.numel())
    assert torch.equal(base, filled(0).flatten())


def test_blocks_of_a_parameter_are_uncorrelated() -> None:
    blocks = filled(0, 4, BLOCK)
    assert (torch.corrcoef(blocks) - torch.eye(4)).abs().max() < 5 / math.sqrt(BLOCK)


def test_distributions_are_those_of_torch_init() -> None:
    model = OneMatrix(1000, 1000)
    n = model.weight.numel()

    def fraction_below(bound: float) -> float:
        return (model.weight < bound).double().mean().item()

    def check(cdf_at: dict[float, float]) -> None:
        for bound, fraction in cdf_at.items():
            assert abs(fraction_below(bound) - fraction) < 5 * math.sqrt(fraction * (1 - fraction) / n) + 1e-9

    with layout_independent_init([model], seed=3):
        nn.init.normal_(model.weight, mean=1.0, std=2.0)
        check({-1.0: 0.158655, 1.0: 0.5, 3.0: 0.841345, 5.0: 0.977250})
        nn.init.uniform_(model.weight, -1.0, 3.0)
        check({-1.0: 0.0, 0.0: 0.25, 2.0: 0.75, 3.0: 1.0})
        nn.init.trunc_normal_(model.weight, std=0.02, a=-0.04, b=0.04)
        inside = 0.954500
        check({-0.04: 0.0, -0.02: (0.158655 - 0.022750) / inside, 0.0: 0.5, 0.02: (0.841345 - 0.022750) / inside})
        assert model.weight.abs().max() <= 0.04
        nn.init.ones_(model.weight)
        assert (model.weight == 1).all()


def test_extreme_uniform_values_give_finite_normal_values() -> None:
    extremes = torch.tensor([0.5, 2.0**23 - 0.5]) * 2.0**-23
    assert normal_quantile(extremes).isfinite().all()


def test_other_init_functions_are_rejected() -> None:
    model = OneMatrix(4, 4)
    with layout_independent_init([model], 0), pytest.raises(NotImplementedError, match="layout"):
        nn.init.xavier_uniform_(model.weight)
    nn.init.xavier_uniform_(model.weight)  # works outside of the context


def _filled_sharded(dims: tuple[int, ...], placements: list[Shard], rows: int, columns: int) -> Tensor:
    mesh = init_device_mesh("cpu", dims)
    parameter = distribute_tensor(torch.zeros(rows, columns), mesh, placements)
    fill_parameter(parameter, normal_quantile, 7, "layers.0.w")
    return parameter.full_tensor()


@pytest.mark.parametrize(
    ("dims", "placements"),
    [((2,), [Shard(0)]), ((4,), [Shard(0)]), ((4,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)])],
)
def test_sharded_parameter_has_the_values_of_one_rank(
    gloo: GlooPool, dims: tuple[int, ...], placements: list[Shard]
) -> None:
    rows, columns = 2 * BLOCK // 1000 + 7, 1001  # blocks end within rows, and shards are uneven
    expected = filled(7, rows, columns, "layers.0.w")
    for full in gloo.run(math.prod(dims), _filled_sharded, dims, placements, rows, columns):
        assert torch.equal(full, expected)


def test_standard_deviation_depends_on_depth_for_residual_outputs() -> None:
    config = replace(flavor_config("llama3", "debugmodel"), vocab_size=512, max_seq_len=16)
    model = Transformer(config)
    with layout_independent_init([model], seed=0):
        model.init_weights()
    truncated = 0.98658  # standard deviation of a standard normal truncated at 3
    for layer_id, block in model.layers.items():
        depth = int(layer_id) + 1
        for name, std in (("attention.wq", 0.02), ("attention.wo", 0.02 / math.sqrt(2 * depth))):
            weight = block.get_submodule(name).weight
            assert weight.std().item() == pytest.approx(truncated * std, rel=0.02)
    assert model.output is not None
    assert model.output.weight.std().item() == pytest.approx(truncated / math.sqrt(config.dim), rel=0.02)


@pytest.mark.parametrize(("base_dim", "base_layers"), [(None, None), (64, None), (None, 2), (64, 2)])
def test_standard_deviations_with_mup_are_those_of_the_table_in_the_documentation(
    base_dim: int | None, base_layers: int | None
) -> None:
    """docs/recipes.md; Llama's own where there is no base model. Each parameter, in each layer."""
    m, depth = 256 / (base_dim or 256), 6 / (base_layers or 6)
    base = replace(flavor_config("qwen2", "debugmodel"), vocab_size=512, max_seq_len=16)
    model = Transformer(replace(base, base_dim=base_dim, base_layers=base_layers))
    with layout_independent_init([model], seed=0):
        model.init_weights()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            value = 0.0 if name.endswith("bias") else 1 / m if name == "norm.weight" else 1.0
            assert (parameter == value).all(), name
            continue
        std = 0.02 / math.sqrt(m)
        if name == "tok_embeddings.weight":
            std = 0.02
        elif name == "output.weight":
            std = 1 / math.sqrt(256 / m)  # as in the narrow model
        elif ".wo." in name or ".w2." in name:
            layer = int(name.split(".")[1]) / depth  # of the shallow model
            std = 0.02 / math.sqrt(m) / math.sqrt(2 * (layer + 1)) / depth
        assert parameter.std().item() == pytest.approx(0.98658 * std, rel=0.02), name
        assert parameter.abs().max() <= 3.001 * std, name


def test_values_do_not_depend_on_the_blocks_filled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = filled(0)
    monkeypatch.setattr("torchtrain.models.initialization.BLOCKS_IN_FLIGHT", 1)  # 65 of 300 rows at a time
    assert torch.equal(filled(0), expected)


def test_values_do_not_depend_on_the_default_dtype() -> None:
    expected = filled(0)
    torch.set_default_dtype(torch.float64)
    try:
        found = filled(0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype is torch.float64
    assert torch.equal(found, expected.double())


def test_blocks_share_few_values() -> None:
    blocks = filled(0, 4, BLOCK)
    assert len(blocks.unique()) > 0.95 * blocks.numel()  # there are 2^23 values, so that a few occur twice


@pytest.mark.parametrize("threads", [2, 3, 5, 16])
def test_values_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = filled(0, 21, BLOCK)
        torch.set_num_threads(threads)
        assert torch.equal(filled(0, 21, BLOCK), expected)
    finally:
        torch.set_num_threads(before)
