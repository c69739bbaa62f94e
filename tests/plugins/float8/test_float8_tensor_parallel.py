"""Float8 with tensor parallelism, emulated on CPUs, compared with one rank that trains in float8."""

import math
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import forked_run
import pytest
import torch
from emulated_float8 import emulated_float8
from forked_run import finish, logged_losses, saved_tensors
from gloo_pool import GlooPool
from parity import Curve, config_of, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.metrics.hooks import Hook
from torchtrain.models.llama import TransformerConfig
from torchtrain.models.parameters import full_name
from torchtrain.parallelisms.check import check_layout
from torchtrain.trainer import TrainStep

pytest.importorskip("torchao")

SHAPE = TransformerConfig(128, 2, 8, 4, 256, 104, max_seq_len=32)
MODELS = {
    "plain": SHAPE,
    "shallow": replace(SHAPE, n_layers=1),
    "deep": replace(SHAPE, n_layers=4),  # for four pipeline stages
    "biased": replace(SHAPE, n_layers=1, qkv_bias=True),
    "qwen": replace(SHAPE, n_layers=1, qk_norm=True, qkv_bias=True, head_dim=8),
}
T2, T4, S2 = {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 4}, {"data_parallel_shard_degree": 2}
P2, C2, R2 = {"pipeline_parallel_degree": 2}, {"context_parallel_degree": 2}, {"data_parallel_replicate_degree": 2}
NO_SEQUENCE_PARALLEL = {"enable_sequence_parallel": False}
ZERO_BUBBLE = {"pipeline_parallel_schedule": "InterleavedZeroBubble"}
BFLOAT16_GATHER = {"float8": {"enable_fsdp_float8_all_gather": False}}

# Relative errors. A different order of summation changes the first loss by 1e-7, and moves a few numbers to the next
# float8 number, which changes that loss by up to 3e-6, and gradients by up to 1e-2 on average. With scales of shards
# instead of whole tensors, almost all numbers round differently: 3e-4 and 150e-3. In several layers one number moves
# others: with weights that differ by 1e-7 the loss differs by up to 3e-7 in one layer, 4e-5 in two and 1.5e-4 in four.
# So layouts that sum in another order than their reference have one layer.
LOSS_ERROR, GRADIENT_ERROR = 1e-5, 2e-2


class GradientRecord(Hook):
    """Records the full gradients of the first step."""

    def __init__(self, step: TrainStep):
        self.model_parts = step.model.model_parts
        self.gradients: dict[str, Tensor] = {}

    def after_gradients(self) -> None:
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                gradient: Any = parameter.grad
                full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                self.gradients.setdefault(full_name(name), full.clone())


Run = tuple[Curve, dict[str, Tensor]]  # with the gradients of the first step


def train_in_float8(
    config: JobConfig, shape: TransformerConfig, fault: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Run:
    records: list[GradientRecord] = []

    def attach(step: TrainStep) -> None:
        records.append(GradientRecord(step))
        step.hooks.all.append(records[0])

    torch._dynamo.reset()
    graphs = partial(torch.compile, backend="aot_eager_decomp_partition")
    with (
        emulated_float8(),
        fault(),
        patch.object(torch, "compile", graphs),
        torch._dynamo.config.patch(error_on_recompile=True),
        warnings.catch_warnings(),
    ):
        if config.compile.enable:
            warnings.simplefilter("ignore")  # the compiler's own warnings, which would be errors here
        curve = train(config, shape, steps=2, attach=attach)
    return curve, records[0].gradients


def run(
    gloo: GlooPool,
    recipe: str,
    parallelism: dict[str, Any],
    model: str = "plain",
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **sections: dict[str, Any],
) -> list[Run]:
    """Train on a layout. Microbatches have one row on every layout: a scale is that of a microbatch."""
    sections = {"training": {}, "float8": {}, **sections}
    sections["float8"] = {"recipe": recipe, **sections["float8"]}
    rows = 2 if "pipeline_parallel_degree" in parallelism else 1
    sections["training"] = {"local_batch_size": rows, "seq_len": SHAPE.max_seq_len, **sections["training"]}
    ranks = math.prod(degree for name, degree in parallelism.items() if name.endswith("_degree"))
    config = config_of(parallelism=parallelism, **sections)
    return gloo.run(ranks, train_in_float8, config, MODELS[model], fault)


@pytest.fixture(scope="module")
def one_rank(gloo: GlooPool) -> Callable[[str, str], Run]:
    """Return a function from a recipe and a model to the run of one rank."""
    return cache(lambda recipe, model: run(gloo, recipe, {}, model)[0])


def gradient_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((g - expected[name]).norm() / expected[name].norm()).item() for name, g in found.items()}


def assert_same_numbers(runs: list[Run], reference: Run) -> None:
    expected, expected_gradients = reference
    gradients: dict[str, Tensor] = {}
    for curve, of_rank in runs:
        assert curve.losses == runs[0][0].losses
        assert curve.losses[0] == pytest.approx(expected.losses[0], rel=LOSS_ERROR)
        assert curve.losses == pytest.approx(expected.losses, rel=3e-3)
        assert curve.grad_norms == pytest.approx(expected.grad_norms, rel=1e-2)
        gradients |= of_rank
    assert gradients.keys() == expected_gradients.keys()
    errors = gradient_errors(gradients, expected_gradients)
    assert mean(errors.values()) < GRADIENT_ERROR
    biases = [error for name, error in errors.items() if name.endswith("bias")]
    assert not biases or mean(biases) < GRADIENT_ERROR


slow = pytest.mark.slow


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=slow)])
@pytest.mark.parametrize(
    ("parallelism", "model", "sections"),
    [
        pytest.param(T2, "shallow", {}, id="T2"),
        pytest.param({**T2, **S2}, "shallow", {}, id="S2 T2", marks=slow),
        pytest.param(T2, "qwen", {}, id="T2 qwen", marks=slow),
        pytest.param(T4, "shallow", {}, id="T4", marks=slow),
        pytest.param({**T2, **R2}, "shallow", {}, id="R2 T2", marks=slow),
        pytest.param({**T2, **S2, **NO_SEQUENCE_PARALLEL}, "shallow", {}, id="S2 T2 no sequence", marks=slow),
        pytest.param({**T2, **S2}, "shallow", BFLOAT16_GATHER, id="S2 T2 gathered in bfloat16", marks=slow),
        *(
            pytest.param(
                T2,
                "shallow",
                {"activation_checkpoint": {"mode": mode}, "compile": {"enable": compiled}},
                id=f"T2 {mode} {'compiled' if compiled else 'eager'}",
                marks=slow,
            )
            for mode in ("none", "selective", "full", "memory_budget")
            for compiled in (False, True)
            if (mode, compiled) not in (("none", False), ("memory_budget", False))
        ),
    ],
)
def test_tensor_parallel_ranks_round_to_the_numbers_of_one_rank(
    gloo: GlooPool,
    one_rank: Callable[[str, str], Run],
    recipe: str,
    parallelism: dict[str, Any],
    model: str,
    sections: dict[str, Any],
) -> None:
    assert_same_numbers(run(gloo, recipe, parallelism, model, **sections), one_rank(recipe, model))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("schedule", "model"), [({}, "plain"), (ZERO_BUBBLE, "deep")], ids=["1F1B", "zero bubble"])
def test_stages_round_to_the_numbers_of_tensor_parallel_ranks(
    gloo: GlooPool, recipe: str, schedule: dict[str, Any], model: str
) -> None:
    reference, _ = run(gloo, recipe, T2, model)
    assert_same_numbers(run(gloo, recipe, {**T2, **P2, **schedule}, model), reference)


def scales_of_shards() -> AbstractContextManager[Any]:
    """A fault: a rank scales a tensor by the largest value of its shard."""
    from torchao.float8 import float8_scaling_utils

    scale_of = float8_scaling_utils.tensor_to_scale

    def scale_of_shard(x: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(x, DTensor):
            return scale_of(x, *args, **options)
        scale = scale_of(x.to_local(), *args, **options)
        return DTensor.from_local(scale, x.device_mesh, [Replicate()], run_check=False)

    return patch.object(float8_scaling_utils, "tensor_to_scale", scale_of_shard)


@pytest.mark.slow
def test_scales_of_shards_are_detected(gloo: GlooPool, one_rank: Callable[[str, str], Run]) -> None:
    expected, expected_gradients = one_rank("tensorwise", "plain")
    [(curve, gradients), _] = run(gloo, "tensorwise", T2, "plain", scales_of_shards)
    assert abs(curve.losses[0] / expected.losses[0] - 1) > 20 * LOSS_ERROR
    assert mean(gradient_errors(gradients, expected_gradients).values()) > 5 * GRADIENT_ERROR


def styles_of_torchao() -> AbstractContextManager[Any]:
    """A fault: the gradient of a bias is computed from the float8 gradient of the output."""
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel

    from torchtrain.plugins.float8 import tensor_parallel

    styles = replace(tensor_parallel.FLOAT8_STYLES, colwise=Float8ColwiseParallel)
    return patch.object(tensor_parallel, "FLOAT8_STYLES", styles)


def random_biases() -> AbstractContextManager[Any]:
    """Biases that are not initialized to zeros, so that the loss depends on them."""
    constant = nn.init.constant_

    def init(tensor: Tensor, val: float) -> Tensor:
        return nn.init.normal_(tensor, std=0.5) if val == 0 else constant(tensor, val)

    return patch.object(nn.init, "constant_", init)


@pytest.mark.slow
def test_biases_have_the_gradients_of_one_rank(gloo: GlooPool) -> None:
    [reference] = run(gloo, "tensorwise", {}, "biased", random_biases)
    curve, gradients = reference
    biases = [name for name in gradients if name.endswith("bias")]
    assert len(biases) == 3
    assert [name for name in biases if not (curve.first[name].abs().max() > 1)] == []
    assert_same_numbers(run(gloo, "tensorwise", T2, "biased", random_biases), reference)


@pytest.mark.slow
def test_gradients_of_biases_from_float8_are_detected(gloo: GlooPool, one_rank: Callable[[str, str], Run]) -> None:
    [(_, gradients), _] = run(gloo, "tensorwise", T2, "qwen", styles_of_torchao)
    errors = gradient_errors(gradients, one_rank("tensorwise", "qwen")[1])
    assert mean(error for name, error in errors.items() if name.endswith("bias")) > 2 * GRADIENT_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_context_parallel_ranks_scale_their_part_of_the_sequence(gloo: GlooPool, recipe: str) -> None:
    """So the reference is context parallelism alone."""
    context = run(gloo, recipe, C2, "shallow")
    assert_same_numbers(run(gloo, recipe, {**T2, **C2}, "shallow"), context[0])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_bfloat16_losses_are_close_to_those_without_float8(gloo: GlooPool, recipe: str) -> None:
    bfloat16 = {"mixed_precision_param": "bfloat16"}
    one = config_of(training={"local_batch_size": 1, "seq_len": 32, **bfloat16})
    [reference] = gloo.run(1, partial(train, steps=2), one, SHAPE)
    for curve, _ in run(gloo, recipe, {**T2, **S2}, training=bfloat16):
        assert curve.losses != reference.losses
        assert curve.losses == pytest.approx(reference.losses, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_exact_sums_are_bitwise_identical_on_any_number_of_shards(gloo: GlooPool, recipe: str) -> None:
    exact = {"training": {"sums": "exact"}, **BFLOAT16_GATHER}
    [(reference, _), _] = run(gloo, recipe, T2, **exact)
    for curve, _ in run(gloo, recipe, {**T2, **S2}, **exact):
        assert (curve.losses, curve.grad_norms) == (reference.losses, reference.grad_norms)
        assert [name for name, tensor in curve.last.items() if not torch.equal(tensor, reference.last[name])] == []


@pytest.mark.slow
def test_checkpoint_of_tensor_parallel_ranks_resumes_on_one_rank(tmp_path: Path) -> None:
    """Its first loss shows that the initial weights have the scales of whole tensors, not those of their shards."""
    shape = replace(forked_run.TINY, dim=32, n_kv_heads=2, ffn_dim=64)
    options = ("--float8.recipe", "tensorwise", "--training.steps", "3")
    layout = ("--parallelism.tensor_parallel_degree", "2")
    finish(tmp_path / "one", *options, ranks=1, hook=emulated_float8, shape=shape)
    finish(tmp_path / "two", *options, *layout, ranks=2, hook=emulated_float8, shape=shape)
    expected, losses = logged_losses(tmp_path / "one"), logged_losses(tmp_path / "two")
    assert losses[1] == pytest.approx(expected[1], rel=LOSS_ERROR)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert {type(tensor) for tensor in saved_tensors(tmp_path / "two", 2).values()} == {Tensor}
    shutil.rmtree(tmp_path / "two/checkpoint/step-3")
    finish(tmp_path / "two", *options, ranks=1, hook=emulated_float8, shape=shape)
    resumed = logged_losses(tmp_path / "two")
    assert resumed[3] == pytest.approx(losses[3], rel=LOSS_ERROR)


GPU, HOPPER = torch.device("cuda", 0), (9, 0)


@pytest.mark.parametrize(
    ("model", "degrees", "message"),
    [
        (SHAPE, ParallelDims(tensor=4), None),
        (SHAPE, ParallelDims(shard=8, tensor=2), None),
        (replace(SHAPE, n_kv_heads=8), ParallelDims(tensor=8), None),
        (replace(SHAPE, n_kv_heads=8, head_dim=8), ParallelDims(tensor=8), r"attention.wq is 8 x 128 on each of 8 te"),
        (
            replace(SHAPE, ffn_dim=96),
            ParallelDims(tensor=4),
            r"feed_forward.w1 is 24 x 128 .*or lower parallelism.tens",
        ),
        (SHAPE, ParallelDims(shard=3, tensor=2), r"3 shards, which .*wq has 64 on each of 2 tensor-parallel ranks"),
    ],
)
def test_dimensions_on_a_rank_are_checked(model: TransformerConfig, degrees: ParallelDims, message: str | None) -> None:
    config = config_of(training={"seq_len": 32}, float8={"recipe": "tensorwise"})
    if message is None:
        check_layout(config, GPU, degrees, model, HOPPER)
        return
    with pytest.raises(ConfigError, match=message):
        check_layout(config, GPU, degrees, model, HOPPER)
