"""training.sums = "exact": runs are bitwise identical on any number of data-parallel ranks."""

import json
import math
import random
import time
import warnings
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_run import ForkedRun, different_tensors, finish, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, Curve, build, config_of, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

from torchtrain.checkpoint.resume_compatibility import Kind, check_resume_compatibility, kind_of
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.cpu.build import use_cpu_kernels
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.models.llama import TransformerConfig
from torchtrain.models.loss import OutputLoss, exact_nats
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.plugins.exact_sums.exact_sums import (
    HEADROOM_BITS,
    UNKNOWN,
    ExactGradientReducer,
    ExactReduceScatter,
    ExactSums,
    exact_sum,
    row_norms_by_halves,
)
from torchtrain.plugins.float8.options import Float8Config
from torchtrain.trainer import TrainStep

STEPS = 2  # the first is repeated, see below
SHAPE = replace(TINY, n_layers=2)
SCALES = [1e-30, 1e-20, 1e-8, 1.0, 1e8, 1e20, 1e30]


def batch_of_24(step: int, vocab_size: int, seq_len: int) -> Tensor:
    """Tokens of shape (24, seq_len + 1), which 1, 2, 3, 4, 6 and 8 ranks divide."""
    return torch.randint(0, vocab_size, (24, seq_len + 1), generator=torch.Generator().manual_seed(step))


def config_with(
    parallelism: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **changes: dict[str, Any]
) -> JobConfig:
    return config_of(
        parallelism=parallelism or {}, training={"sums": "exact", "local_batch_size": 2, **(training or {})}, **changes
    )


def run(
    gloo: GlooPool,
    ranks: int,
    config: JobConfig,
    shape: TransformerConfig = SHAPE,
    steps: int = STEPS,
) -> Curve:
    """Train; assert that all ranks have the same losses and norms, and merge the tensors of all ranks."""
    function = _train_compiled if config.compile.enable else train
    document_start = 7 if config.data.document_mask else None
    curves: list[Curve] = gloo.run(ranks, function, config, shape, steps, document_start, batch_of_24)
    for curve in curves[1:]:
        assert (curve.losses, curve.grad_norms) == (curves[0].losses, curves[0].grad_norms)
    last, moments = (
        dict(chain.from_iterable(getattr(curve, name).items() for curve in curves)) for name in ("last", "moments")
    )
    return replace(curves[0], last=last, moments=moments)


def _train_compiled(*args: Any) -> Curve:
    torch._dynamo.reset()  # discards what other tests compiled in this process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the compiler
        return train(*args)


def assert_bitwise_identical(curve: Curve, reference: Curve) -> None:
    assert curve.losses == reference.losses
    assert curve.grad_norms == reference.grad_norms
    assert different_tensors(curve.last, reference.last) == []
    assert different_tensors(curve.moments, reference.moments) == []


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Curve:
    """A run of one rank with twelve microbatches per step."""
    return run(gloo, 1, config_with())


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (4, {"data_parallel_replicate_degree": 2}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(6, {"data_parallel_replicate_degree": 6}, marks=pytest.mark.slow),
    ],
)
def test_runs_are_bitwise_identical_on_any_number_of_ranks_and_replicas(
    gloo: GlooPool, reference: Curve, ranks: int, parallelism: dict[str, Any]
) -> None:
    assert_bitwise_identical(run(gloo, ranks, config_with(parallelism)), reference)


def test_both_transports_have_the_same_bits(gloo: GlooPool, reference: Curve) -> None:
    assert_bitwise_identical(run(gloo, 3, config_with(exact_sums={"transport": "ring"})), reference)


TIED = replace(SHAPE, tied_embeddings=True)
DEEP = replace(SHAPE, n_layers=4)  # for four pipeline stages
BFLOAT16 = {"mixed_precision_param": "bfloat16"}
# For each combination of features, the options that are fixed, and the layouts that vary.
COMBINATIONS: dict[str, tuple[dict[str, Any], TransformerConfig, list[tuple[int, dict[str, Any]]]]] = {
    "bfloat16, tied, recomputed": (
        {"training": BFLOAT16, "activation_checkpoint": {"mode": "full"}},
        TIED,
        [(1, {}), (3, {})],
    ),
    "chunked loss, states in bfloat16, selective, documents": (
        {
            "training": {"loss_chunk_tokens": 8},
            "data": {"document_mask": True},
            "optimizer": {"state_dtype": "bfloat16", "implementation": "foreach"},
            "activation_checkpoint": {"mode": "selective"},
        },
        SHAPE,
        [(1, {}), (3, {})],
    ),
    "context": (
        {"training": {"local_batch_size": 4}},
        SHAPE,
        [(2, {"context_parallel_degree": 2}), (4, {"context_parallel_degree": 2})],
    ),
    "pipeline, several rounds": (
        {"training": {"local_batch_size": 4}},
        SHAPE,
        [
            (2, {"pipeline_parallel_degree": 2}),
            (4, {"pipeline_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
        ],
    ),
}
NOT_BY_DEFAULT = ("bfloat16, tied, recomputed", "pipeline, several rounds")  # a pipeline has a test below
# Slow: each step of DTensor's tensor parallelism, and compilation.
SLOW = {
    "eight ranks, one sequence each": ({"training": {"local_batch_size": 1}}, SHAPE, [(3, {}), (8, {})]),
    "tensor": (
        {},
        SHAPE,
        [(2, {"tensor_parallel_degree": 2}), (4, {"tensor_parallel_degree": 2}), (8, {"tensor_parallel_degree": 2})],
    ),
    "tensor, bfloat16": (
        {"training": BFLOAT16},
        SHAPE,
        [(2, {"tensor_parallel_degree": 2}), (4, {"tensor_parallel_degree": 2})],
    ),
    "context, bfloat16": (
        {"training": BFLOAT16},
        SHAPE,
        [(2, {"context_parallel_degree": 2}), (4, {"context_parallel_degree": 2})],
    ),
    "compiled": ({"compile": {"enable": True}}, SHAPE, [(1, {}), (2, {}), (3, {})]),
    "tied pipeline": (
        {"training": {"local_batch_size": 4}},
        TIED,
        [(2, {"pipeline_parallel_degree": 2}), (4, {"pipeline_parallel_degree": 2})],
    ),
    "interleaved": (
        {"training": {"local_batch_size": 4}},
        DEEP,
        [(ranks, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}) for ranks in (2, 4)],
    ),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 1) for name in COMBINATIONS if name not in NOT_BY_DEFAULT),
        *(pytest.param(name, 20, marks=pytest.mark.slow) for name in COMBINATIONS | SLOW),
    ],
)
def test_runs_are_bitwise_identical_on_any_layout_with(gloo: GlooPool, name: str, steps: int) -> None:
    changes, shape, layouts = (COMBINATIONS | SLOW)[name]
    (ranks, parallelism), *others = layouts
    first = run(gloo, ranks, config_with(parallelism, **changes), shape, steps)
    for ranks, parallelism in others:
        assert_bitwise_identical(run(gloo, ranks, config_with(parallelism, **changes), shape, steps), first)


def test_pipeline_is_bitwise_identical_to_one_rank_with_its_microbatches(gloo: GlooPool) -> None:
    one = run(gloo, 1, config_with(training={"local_batch_size": 1}), steps=1)
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "GPipe"}
    pipeline = run(gloo, 4, config_with(parallelism, training={"local_batch_size": 3}), steps=1)
    assert_bitwise_identical(pipeline, one)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("local_batch_size", [1, 3])
def test_all_layouts_are_bitwise_identical_over_20_steps(gloo: GlooPool, dtype: str, local_batch_size: int) -> None:
    training = {"mixed_precision_param": dtype, "local_batch_size": local_batch_size}
    layouts = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)]
    layouts += [(3, 1), (6, 1), (6, 3)] if local_batch_size == 1 else []
    curves = [
        run(gloo, ranks, config_with({"data_parallel_replicate_degree": replicas}, training), steps=20)
        for ranks, replicas in layouts
    ]
    for curve in curves[1:]:
        assert_bitwise_identical(curve, curves[0])


# The sums


def heavy_tailed(summands: int, elements: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randn(summands, elements, generator=generator).mul(3)
    return (torch.randn(summands, elements, generator=generator) * exponents.exp2() * scale).float()


def sums_for(largest: float, summands: int) -> ExactSums:
    sums = ExactSums(torch.device("cpu"))
    sums.exponent = math.frexp(largest)[1]
    sums.begin(summands)
    return sums


@pytest.mark.parametrize("scale", SCALES)
def test_sums_do_not_depend_on_the_order_at_any_scale(scale: float) -> None:
    values = heavy_tailed(64, 1000, scale)
    sums = sums_for(values.abs().max().item(), 64)
    total = torch.stack([sums.rounded(row) for row in values]).sum(dim=0)
    for seed in range(5):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        parts = [sum(sums.rounded(row) for row in values[indices]) for indices in order.split([1, 20, 43])]
        assert torch.equal(sum(parts), total)  # type: ignore[arg-type]
    exact = values.double().sum(dim=0)
    error = (total.double() * 2.0**sums.spacing - exact).abs()
    assert error.max() <= 64 * 2.0**sums.spacing / 2
    # Within the range of float32, this is more precise than float32.
    assert scale < 1e-20 or error.max() <= 2.0**-40 * values.abs().max()


@pytest.mark.parametrize("scale", SCALES)
def test_largest_accepted_sum_does_not_overflow(scale: float) -> None:
    limit = math.ldexp(1.0, math.frexp(scale)[1] + HEADROOM_BITS)
    value = torch.tensor([limit, -limit]).nextafter(torch.zeros(2))
    for summands in (1, 3, 64, 1000):
        sums = sums_for(scale, summands)
        total = sums.rounded(value) * summands
        torch.testing.assert_close(total.double() * 2.0**sums.spacing, value.double() * summands, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_summand_beyond_the_limit_is_detected_with_either_sign(gloo: GlooPool, sign: int) -> None:
    largest = math.ldexp(1.0, HEADROOM_BITS)  # the smallest that is too large after a step with 1
    beyond = torch.tensor([0.5, -0.5, sign * largest, sign * 0.25])
    assert gloo.run(1, _is_accepted, beyond) == [False]
    assert gloo.run(1, _is_accepted, beyond.nextafter(torch.zeros(4))) == [True]


def _is_accepted(summands: Tensor) -> bool:
    sums = sums_for(0.9, 2)
    sums.see(summands)
    model = nn.Linear(4, 1, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
    model.weight.grad = torch.zeros_like(model.weight)
    return sums.finish([model])


def _spacing(config: JobConfig) -> int:
    model = build(config)
    assert isinstance(model.reducer, ExactGradientReducer)
    model.reducer.sums.exponent = 0
    model.begin_gradients(8)
    return model.reducer.sums.spacing


def test_sums_have_headroom_for_the_norms_of_all_tensor_parallel_ranks(gloo: GlooPool) -> None:
    one, two = (
        gloo.run(n, _spacing, config_of(training={"sums": "exact"}, parallelism={"tensor_parallel_degree": n}))[0]
        for n in (1, 2)
    )
    assert two == one + 1


def _finish(summands: list[float]) -> list[Any]:
    """Whether a step with this rank's summand is accepted, its gradient and exponent, for two identical steps."""
    sums = ExactSums(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = nn.Linear(1, 2, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    found: list[Any] = []
    for _ in range(2):
        sums.begin(2)
        summand = torch.full((2, 1), summands[torch.distributed.get_rank()])
        sums.see(summand)
        total = sums.rounded(summand).float() if sums.limit > UNKNOWN // 2 else torch.zeros(2, 1)
        model.weight.grad = DTensor.from_local(total[:1], mesh, [torch.distributed.tensor.Shard(0)])
        found += [sums.finish([model]), model.weight.grad.to_local().item(), sums.exponent]
    return found


@pytest.mark.parametrize(
    ("summands", "accepted", "exponent"),
    [
        ([0.25, 3.0], [False, True], 2),
        ([0.25, -3.0], [False, True], 2),  # the largest may have either sign
        ([0.0, 0.0], [True, True], UNKNOWN),
        ([1e30, -1e-30], [False, True], 100),
        ([1e-30, -1e30], [False, True], 100),
    ],
)
def test_step_beyond_the_range_is_rejected_by_all_ranks_and_repeated(
    gloo: GlooPool, summands: list[float], accepted: list[bool], exponent: int
) -> None:
    for rank, found in enumerate(gloo.run(2, _finish, summands)):
        assert found[0::3] == accepted
        assert found[-1] == exponent
        assert found[4] == pytest.approx(summands[rank], abs=2.0**-22 * max(map(abs, summands)))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_summands_give_non_finite_gradients(gloo: GlooPool, bad: float) -> None:
    for found in gloo.run(2, _finish, [1.0, bad]):
        assert found[0] is True
        assert math.isnan(found[1])


def test_concurrent_stages_do_not_overwrite_each_others_largest_summand() -> None:
    sums = sums_for(1.0, 2)
    sums.see(torch.tensor([3.0]))
    versions = [(tensor, tensor._version) for tensor in sums.largest]
    sums.see(torch.tensor([2.0]))
    assert [tensor._version for tensor, _ in versions] == [version for _, version in versions]


def _train_with_growth(config: JobConfig) -> tuple[Curve, list[int]]:
    """Train with a loss that grows 4096 times at step 3; returns the curve and the steps that were repeated."""
    step, repeated = 0, []
    call, loss, finish = TrainStep.__call__, OutputLoss.__call__, ExactSums.finish

    def counted(self: TrainStep, number: int, batch: Any) -> Any:
        nonlocal step
        step = number
        return call(self, number, batch)

    def grown(*args: Any, **options: Any) -> Tensor:
        return loss(*args, **options) * (4096 if step >= 3 else 1)

    def recorded(self: ExactSums, parts: Any) -> bool:
        fits = finish(self, parts)
        repeated.extend([] if fits else [step])
        return fits

    with (
        patch.object(TrainStep, "__call__", counted),
        patch.object(OutputLoss, "__call__", grown),
        patch.object(ExactSums, "finish", recorded),
    ):
        return train(config, SHAPE, steps=3, batch=batch_of_24), repeated


def test_step_with_sudden_growth_is_repeated(gloo: GlooPool) -> None:
    (one, repeated), *_ = gloo.run(1, _train_with_growth, config_with())
    assert repeated == [1, 3]  # before the first step, the magnitude of gradients is unknown
    for curve, steps in gloo.run(2, _train_with_growth, config_with()):
        assert_bitwise_identical(curve, one)
        assert steps == repeated
    fast = gloo.run(1, _train_with_growth, config_with(training={"sums": "fast"}))[0][0]
    torch.testing.assert_close(one.grad_norms, fast.grad_norms, rtol=1e-5, atol=0)


def _expected_summands(config: JobConfig) -> list[int]:
    with patch.object(ExactSums, "begin", autospec=True, side_effect=ExactSums.begin) as begin:
        train(config, SHAPE, steps=1, batch=batch_of_24)
    return [call.args[1] for call in begin.call_args_list]


@pytest.mark.parametrize(
    ("ranks", "parallelism", "summands"),
    [(2, {"context_parallel_degree": 2}, 48), pytest.param(2, {}, 24, marks=pytest.mark.slow)],
    ids=str,
)
def test_headroom_is_for_one_summand_per_row_and_context_rank(
    gloo: GlooPool, ranks: int, parallelism: dict[str, Any], summands: int
) -> None:
    config = config_with(parallelism, {"global_batch_size": 24})
    assert gloo.run(ranks, _expected_summands, config) == [[summands] * 2] * ranks  # repeated


def _errors(config: JobConfig) -> list[tuple[Tensor, Tensor]]:
    """The relative errors of the gradient's elements, by step: of exact sums and of float32 sums."""
    summands: list[Tensor] = []
    see, finish = ExactSums.see, ExactSums.finish
    errors: list[tuple[Tensor, Tensor]] = []

    def record(self: ExactSums, values: Tensor) -> None:
        summands.append(values.clone())
        see(self, values)

    def compare(self: ExactSums, parts: Any) -> bool:
        fits = finish(self, parts)
        if fits:
            truth = torch.stack(summands).double().sum(dim=0)
            fast = torch.zeros_like(truth, dtype=torch.float32)
            for summand in summands:
                fast += summand
            exact = sum(self.rounded(summand) for summand in summands).float() * 2.0**self.spacing  # type: ignore[union-attr]
            own = torch.cat([p.grad.to_local().flatten() for p in parts[0].parameters()])  # type: ignore[union-attr]
            assert torch.equal(own.sort().values, exact.sort().values)
            errors.append(tuple((value - truth).abs() / truth.abs().clamp(min=1e-30) for value in (exact, fast)))  # type: ignore[arg-type]
        summands.clear()
        return fits

    with patch.object(ExactSums, "see", record), patch.object(ExactSums, "finish", compare):
        train(config, SHAPE, steps=2, batch=batch_of_24)
    return errors


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_exact_gradients_are_more_accurate_than_float32_sums(gloo: GlooPool, dtype: str) -> None:
    config = config_with(training={"local_batch_size": 1, "mixed_precision_param": dtype})
    for exact, fast in gloo.run(1, _errors, config)[0]:
        assert exact.square().mean() <= fast.square().mean()
        for quantile in (0.5, 0.9, 0.99, 0.999):
            assert exact.quantile(quantile) <= fast.quantile(quantile), quantile


# Other sums and the optimizer


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_update_of_an_element_does_not_depend_on_its_shard(implementation: str, state_dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(250, generator=generator) for _ in range(4))

    def updated(sizes: list[int]) -> Tensor:
        model = nn.ParameterList([nn.Parameter(part.clone()) for part in values.split(sizes)])
        config = OptimizerConfig(implementation=implementation, state_dtype=state_dtype, lr=0.1)  # type: ignore[arg-type]
        optimizer = build_optimizer([model], config)
        use_cpu_kernels(optimizer)
        for gradient in gradients:
            for parameter, part in zip(model, gradient.split(sizes), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in model])

    unsharded = updated([250])
    assert not torch.equal(unsharded, values)
    for size in (1, 3, 7, 61, 100):
        assert torch.equal(updated([size] * (250 // size) + [250 % size] * (250 % size > 0)), unsharded), size


def _sum_over_ranks(values: Tensor, sizes: list[int]) -> float:
    return exact_sum(values.split(sizes)[torch.distributed.get_rank()]).item()


def test_sum_over_ranks_is_bitwise_identical_in_any_order(gloo: GlooPool) -> None:
    for scale in (1e-60, 1.0, 1e60):
        values = heavy_tailed(1, 3000, 1.0)[0].double().square() * scale
        truth = math.fsum(values.tolist())
        shuffled = values[torch.randperm(3000, generator=torch.Generator().manual_seed(1))]
        found = {
            *gloo.run(1, _sum_over_ranks, values, [3000]),
            *gloo.run(3, _sum_over_ranks, values, [1000, 1, 1999]),
            *gloo.run(2, _sum_over_ranks, shuffled, [1500, 1500]),
        }
        assert len(found) == 1
        assert found.pop() == pytest.approx(truth, rel=1e-14)
    for bad in (math.inf, math.nan):
        assert gloo.run(2, _sum_over_ranks, torch.tensor([1.0, bad], dtype=torch.float64), [1, 1]) == [math.inf] * 2


@pytest.mark.parametrize("width", [1, 2, 5, 64, 100])
def test_row_norms_equal_those_of_float64(width: int) -> None:
    gradient = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
    with patch("torchtrain.plugins.exact_sums.exact_sums.FLOAT64_ELEMENTS", 3 * width):
        found = row_norms_by_halves(gradient)
    torch.testing.assert_close(found, gradient.double().norm(dim=-1))


def test_sum_of_losses_is_bitwise_identical_in_any_order() -> None:
    losses = exact_nats(heavy_tailed(1, 1000, 100.0)[0].abs())
    torch.testing.assert_close(losses, heavy_tailed(1, 1000, 100.0)[0].abs().double(), rtol=0, atol=2.0**-20)
    assert losses.sum().item() == sum(losses.flip(0).tolist()) == math.fsum(losses.tolist())
    assert exact_nats(torch.tensor(math.nan)).isnan()


# The trainer

EXACT = ("--training.sums", "exact", "--training.global_batch_size", "12", "--training.steps", "14")


def losses_and_norms(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; if a step was logged more than once, the last."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in found if "event" not in line}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(folder, *EXACT, ranks=1)
    return folder


@pytest.mark.slow  # test_stages.py has a run that is killed between stages, and resumes on another number of ranks
@pytest.mark.parametrize("seed", range(10))
def test_run_killed_and_resumed_on_other_ranks_is_bitwise_identical(
    tmp_path: Path, uninterrupted: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for ranks in (2, 3):
        killed = ForkedRun(tmp_path, *EXACT, ranks=ranks)
        before = max(losses_and_norms(tmp_path), default=0) if (tmp_path / "metrics.jsonl").exists() else 0
        killed.wait_for(
            lambda: (tmp_path / "metrics.jsonl").exists() and max(losses_and_norms(tmp_path), default=0) > before + 1  # noqa: B023
        )
        time.sleep(rng.random() * 0.2)
        killed.kill(rng.randrange(ranks))
        killed.end()
    finish(tmp_path, *EXACT, ranks=1)
    assert losses_and_norms(tmp_path) == losses_and_norms(uninterrupted)
    assert different_tensors(*(saved_tensors(folder, 14) for folder in (tmp_path, uninterrupted))) == []


def test_run_may_resume_with_exact_sums_if_allowed(tmp_path: Path) -> None:
    finish(tmp_path, "--training.steps", "2")
    allow = ("--checkpoint.allow_changes", "training.sums")
    assert "resumed from" in finish(tmp_path, "--training.sums", "exact", "--training.steps", "4", *allow)
    assert "sums.exponent" in saved_tensors(tmp_path, 4)


def test_change_of_sums_is_checked_on_resume() -> None:
    fast, exact = JobConfig(), JobConfig(training=TrainingConfig(sums="exact"))
    with pytest.raises(CheckpointError, match=r"training.sums = 'exact' \(checkpoint: 'fast'\)"):
        check_resume_compatibility(to_toml(fast), to_toml(exact), ())
    assert kind_of("exact_sums.transport") is Kind.HARMLESS


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            ParallelismConfig(fsdp_gradient_accumulation="unsharded"),
            "set parallelism.fsdp_gradient_accumulation = 'sharded'",
        ),
        (
            ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule="ZBVZeroBubble"),
            "set parallelism.pipeline_parallel_schedule = '1F1B', not a zero-bubble schedule",
        ),
    ],
)
def test_options_with_other_reductions_are_rejected(section: ParallelismConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JobConfig(parallelism=section, training=TrainingConfig(sums="exact"))


def test_reducing_in_bfloat16_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"set training.mixed_precision_reduce = 'float32'"):
        JobConfig(training=TrainingConfig(sums="exact", mixed_precision_reduce="bfloat16"))


def test_all_gather_of_float8_weights_is_rejected() -> None:
    """One rank rounds the bfloat16 weights to float8, several ranks round the float32 weights."""
    exact = TrainingConfig(sums="exact")
    with pytest.raises(ConfigError, match=r"set float8.enable_fsdp_float8_all_gather = false"):
        JobConfig(training=exact, plugins={"float8": Float8Config(recipe="tensorwise")})
    for allowed in (
        Float8Config(recipe="tensorwise", enable_fsdp_float8_all_gather=False),
        Float8Config(recipe="rowwise"),
    ):
        JobConfig(training=exact, plugins={"float8": allowed})


def _transports(transport: str) -> list[bool]:
    from parity import build

    model = build(config_with(exact_sums={"transport": transport}))
    comms = [m._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm for m in model.model_parts[0].layers.values()]  # type: ignore[operator]
    assert [comm for comm in comms if not isinstance(comm, ExactReduceScatter)] == []
    return [comm.all_to_all for comm in comms]


@pytest.mark.parametrize(("transport", "all_to_all"), [("auto", True), ("ring", False), ("all_to_all", True)])
def test_transport_option_selects_all_to_all_or_ring(gloo: GlooPool, transport: str, all_to_all: bool) -> None:
    assert gloo.run(2, _transports, transport)[0] == [all_to_all] * TINY.n_layers
