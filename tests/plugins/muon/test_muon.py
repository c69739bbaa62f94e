"""Muon: the updates of torch.optim.Muon on one rank, the same on every layout, with its work balanced over ranks."""

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from benchmark_muon import WAYS, make
from gloo_pool import GlooPool
from parity import TINY, Curve, assert_same_run, build, config_of, train
from test_exact_sums import assert_bitwise_identical, config_with
from test_exact_sums import run as run_exact_sums
from test_parallelism import LAYOUTS, MODELS, run
from test_resume_on_other_layouts import SAVED, bytes_of_tensors, run_layout
from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.cpu.build import use_cpu_kernels
from torchtrain.distributed.mesh import local
from torchtrain.models.llama import Transformer
from torchtrain.optimizers.groups import build_optimizer, group_of
from torchtrain.optimizers.options import OptimizerConfig, ParameterGroupConfig
from torchtrain.plugins.muon.muon import BUCKET_BYTES, assign_owners, iteration_cost

MUON = {"optimizer": {"name": "muon", "lr": 3e-3}}
# The ranks do not divide the rows of these matrices: one of eight ranks has no row of wk and wv.
ODD = replace(TINY, n_layers=2, head_dim=6, ffn_dim=54)
MUON_LAYOUTS = [*LAYOUTS, ("S8", "odd matrices"), ("S2 C2 T2", "odd matrices"), ("S2 T2", "odd matrices")]
# The other layouts take as long as all of tests/test_parallelism.py; they are marked slow.
FAST = {("P2 Interleaved1F1B", "deep-tied"), ("S2 T2", "odd matrices")}  # exact sums have one with replicas


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Callable[[str], Curve]:
    """Return a function from a model's name to the curve of one rank with the batch in one microbatch."""
    models = {**MODELS, "odd matrices": ODD}

    @cache
    def one_rank(model: str) -> Curve:
        curve: Curve = gloo.run(1, train, config_of(training={"local_batch_size": 8}, **MUON), models[model])[0]
        return curve

    return one_rank


@pytest.mark.parametrize(
    ("text", "model"), [pytest.param(*one, marks=() if one in FAST else pytest.mark.slow) for one in MUON_LAYOUTS]
)
def test_every_layout_matches_one_rank(
    gloo: GlooPool, reference: Callable[[str], Curve], text: str, model: str
) -> None:
    expected, curves = reference(model), run(gloo, text, MODELS.get(model, ODD), **MUON)
    assert_same_run(curves, expected)
    for name, weights in chain.from_iterable(curve.last.items() for curve in curves):
        if group_of(name, weights) == "hidden":
            moved = (expected.last[name] - expected.first[name]).norm()
            assert (weights - expected.last[name]).norm() <= 1e-4 * moved, name


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_exact_sums_are_bitwise_identical_on_any_number_of_ranks(gloo: GlooPool, ranks: int, replicas: int) -> None:
    one = run_exact_sums(gloo, 1, config_with(**MUON))
    config = config_with({"data_parallel_replicate_degree": replicas}, **MUON)
    assert_bitwise_identical(run_exact_sums(gloo, ranks, config), one)


@pytest.mark.parametrize(
    ("saved_on", "others"),
    [
        ("shard 2", []),
        pytest.param("tensor 2 x shard 2", ["shard 4", "pipeline 2, interleaved"], marks=pytest.mark.slow),
    ],
)
def test_resume_is_bitwise_identical_on_the_same_layout_and_close_on_others(
    gloo: GlooPool, tmp_path: Path, saved_on: str, others: list[str]
) -> None:
    optimizer = OptimizerConfig(name="muon", lr=3e-3)
    losses, _ = run_layout(gloo, tmp_path, saved_on, True, optimizer)
    saved = bytes_of_tensors(tmp_path / "checkpoint")
    states = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.layers.0.attention.wq.")}
    assert states == {"momentum_buffer"}
    assert run_layout(gloo, tmp_path, saved_on, True, optimizer)[0] == losses[SAVED:]
    for layout in others:
        resumed, _ = run_layout(gloo, tmp_path, layout, True, optimizer)
        torch.testing.assert_close(resumed, losses[SAVED:], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_equal_torch_muon(dtype: Any) -> None:
    torch.manual_seed(0)
    shape = replace(TINY, n_layers=1)  # square, tall and wide matrices; fewer key/value heads than query heads
    model = Transformer(shape)
    half = ParameterGroupConfig(lr_factor=0.5)
    options = {"muon": {"dtype": dtype, "momentum": 0.8, "iterations": 4}}
    config = OptimizerConfig(name="muon", lr=1e-2, options=options, hidden=half)
    optimizer = build_optimizer([model], config)
    matrices = {n: p for n, p in model.named_parameters() if group_of(n, p) == "hidden"}
    plain = {name: parameter.detach().clone() for name, parameter in matrices.items()}
    reference = torch.optim.Muon(
        plain.values(), lr=5e-3, weight_decay=0.1, momentum=0.8, ns_steps=4, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            if name in plain:
                with torch.no_grad():
                    if step < 4:
                        parameter.zero_()  # so that no bits of the update are lost; step 4 includes the weight decay
                    plain[name].copy_(parameter)
                plain[name].grad = parameter.grad.clone()
        optimizer.step(torch.tensor(0.0))
        with ExitStack() as patches:
            if dtype == "float32":  # torch.optim.Muon iterates in bfloat16 only
                patches.enter_context(patch.object(Tensor, "bfloat16", Tensor.clone))
                patches.enter_context(patch.object(torch, "bfloat16", torch.float32))  # since 2.15
            reference.step()
        for name, parameter in matrices.items():
            tolerance = 1e-6 if dtype == "float32" else 2e-2
            rate = 5e-3 * 0.2 * max(parameter.shape) ** 0.5
            rtol = 0 if step < 4 else 1e-6
            torch.testing.assert_close(parameter.detach(), plain[name], rtol=rtol, atol=tolerance * rate, msg=name)


def benchmark_updates_are_equal() -> bool:
    optimizers = [make(way, Namespace(width=64, layers=1, vocab=8, replicas=1))[0] for way in WAYS]
    for optimizer in optimizers:
        optimizer.step()
    updated = ([local(p) for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers)
    return all(torch.equal(ours, theirs) for ours, theirs in zip(*updated, strict=True))


def test_both_variants_of_the_benchmark_make_the_same_update(gloo: GlooPool) -> None:
    assert gloo.run(2, benchmark_updates_are_equal) == [True, True]


def sent_bytes(config: JobConfig, steps: int) -> int:
    """Return the bytes that this rank sends to others in ``steps`` updates."""
    model = build(config, replace(TINY, n_layers=2))
    optimizer = build_optimizer(model.model_parts, config.optimizer, model.mesh)
    use_cpu_kernels(optimizer)
    exchange, sent = dist.all_to_all_single, 0

    def counted(output: Tensor, input: Tensor, receives: Any, sends: Any, *args: Any, **options: Any) -> Any:
        nonlocal sent
        sent += (sum(sends) - sends[dist.get_rank()]) * input.itemsize
        return exchange(output, input, receives, sends, *args, **options)

    with patch.object(dist, "all_to_all_single", counted):
        for _ in range(steps):
            for part in model.model_parts:
                for parameter in part.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step(torch.tensor(0.0))
    return sent


@pytest.mark.parametrize("replicas", [1, 2])
def test_bytes_sent_are_those_of_the_documentation(gloo: GlooPool, replicas: int) -> None:
    """The formula of docs/performance.md, for 4 ranks."""
    dim, kv, ffn = TINY.dim, TINY.dim // 2, TINY.ffn_dim
    elements = 2 * (2 * dim * dim + 2 * dim * kv + 3 * dim * ffn)
    shards = 4 // replicas
    config = config_of(parallelism={"data_parallel_replicate_degree": replicas}, **MUON)
    sent = gloo.run(4, sent_bytes, config, 3)
    assert sum(sent) == 3 * 4 * elements * (1 + replicas - 2 / shards)


def test_work_is_balanced_over_ranks() -> None:
    blocks = [torch.empty(shape, device="meta") for shape in [(4096, 4096)] * 2 + [(1024, 4096)] * 2]
    blocks += [torch.empty(shape, device="meta") for shape in [(14336, 4096)] * 2 + [(4096, 14336)]]
    matrices = [block.clone() for block in blocks * 32]
    for ranks in (1, 2, 8, 24, 32):
        buckets = assign_owners(matrices, ranks, itemsize=2)
        owned = [list(chain.from_iterable(bucket[rank] for bucket in buckets)) for rank in range(ranks)]
        assert len({id(matrix) for matrix in chain.from_iterable(owned)}) == len(matrices)
        work_of_ranks = [sum(map(iteration_cost, some)) for some in owned]
        assert max(work_of_ranks) < 1.1 * sum(work_of_ranks) / ranks, ranks
        for some in chain.from_iterable(buckets):
            assert len(some) <= 1 or 2 * sum(matrix.numel() for matrix in some) <= BUCKET_BYTES
