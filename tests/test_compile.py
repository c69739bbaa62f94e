"""All blocks share one compiled graph for the whole run, and a compiled run equals the eager one."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_run import finish
from gloo_pool import GlooPool
from parity import STEPS, TINY, Curve, assert_same_run, config_of, train
from torch._dynamo.utils import counters

from torchtrain.config.schema import JobConfig
from torchtrain.metrics.validation import Validator
from torchtrain.models.llama import TransformerConfig

SHAPE = replace(TINY, n_layers=2)
TRAINING = {"loss_chunk_tokens": 8, "local_batch_size": 4}  # two microbatches
DOCUMENT_START = 7  # a token of TINY's vocabulary of 100, which occurs in the random rows
# Compiling C++ takes most of the time. The default tests build and partition the graphs that Inductor would get, and
# run them uncompiled.
GRAPHS = "aot_eager_decomp_partition"


def both_backends(*case: Any) -> list[Any]:
    return [pytest.param(*case, GRAPHS), pytest.param(*case, "inductor", marks=pytest.mark.slow)]


def train_and_count(
    config: JobConfig, shape: TransformerConfig = SHAPE, document_start: int | None = None, backend: str = "inductor"
) -> tuple[Curve, dict[str, Any]]:
    """Train with recompilation as an error; returns the curve, and the numbers of graphs and graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    # The compiler emits warnings about its own operation, which would be errors here.
    with (
        warnings.catch_warnings(),
        torch._dynamo.config.patch(error_on_recompile=True),
        patch.object(torch, "compile", partial(torch.compile, backend=backend)),
    ):
        warnings.simplefilter("ignore")
        curve = train(config, shape, STEPS, document_start)
    return curve, {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}


@pytest.fixture(scope="module")
def eager(gloo: GlooPool) -> Curve:
    return gloo.run(1, train, config_of(training={"local_batch_size": 4}), SHAPE, STEPS)[0]  # type: ignore[no-any-return]


@pytest.mark.slow  # the next test has the same with document masks
@pytest.mark.parametrize("backend", [GRAPHS, "inductor"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_blocks_share_one_graph_and_the_loss_has_one(gloo: GlooPool, eager: Curve, mode: str, backend: str) -> None:
    config = config_of(training=TRAINING, compile={"enable": True}, activation_checkpoint={"mode": mode})
    [(compiled, counts)] = gloo.run(1, train_and_count, config, SHAPE, None, backend)
    assert counts == {"graphs": 2, "breaks": {}}
    assert_same_run([compiled], eager)


@pytest.mark.parametrize("backend", both_backends())
def test_document_masks_do_not_add_graphs(gloo: GlooPool, eager: Curve, backend: str) -> None:
    config = config_of(training=TRAINING, compile={"enable": True}, activation_checkpoint={"mode": "selective"})
    [(compiled, counts)] = gloo.run(1, train_and_count, config, SHAPE, DOCUMENT_START, backend)
    assert counts == {"graphs": 2, "breaks": {}}
    [masked] = gloo.run(1, train, config_of(training={"local_batch_size": 4}), SHAPE, STEPS, DOCUMENT_START)
    assert_same_run([compiled], masked)
    assert masked.losses != eager.losses


@pytest.mark.slow
@pytest.mark.parametrize("backend", both_backends())
def test_context_parallel_ranks_compile_one_graph(gloo: GlooPool, eager: Curve, backend: str) -> None:
    config = config_of(training=TRAINING, parallelism={"context_parallel_degree": 2}, compile={"enable": True})
    found = gloo.run(2, train_and_count, config, SHAPE, None, backend)
    assert [counts for _, counts in found] == [{"graphs": 2, "breaks": {}}] * 2
    assert_same_run([compiled for compiled, _ in found], eager)


@pytest.mark.parametrize("backend", both_backends())
def test_tensor_parallel_ranks_compile_one_graph(gloo: GlooPool, backend: str) -> None:
    shape = replace(SHAPE, head_dim=6, qk_norm=True, norm_eps=1e-6, rope_theta=1e6, tied_embeddings=True)  # as Qwen3
    config = config_of(
        training={"local_batch_size": 4}, parallelism={"tensor_parallel_degree": 2}, compile={"enable": True}
    )
    [eager] = gloo.run(1, train, config_of(training={"local_batch_size": 4}), shape, STEPS)
    for compiled, counts in gloo.run(2, train_and_count, config, shape, None, backend):
        assert counts == {"graphs": 1, "breaks": {}}  # the loss of sharded logits is not compiled
        assert_same_run([compiled], eager)


@contextmanager
def counted_graphs() -> Iterator[None]:
    """Compile with a backend that does nothing, and write the number of graphs after each step and its validation."""
    counters.clear()
    validate = Validator.maybe_run

    def counted(*args: Any, **options: Any) -> None:
        validate(*args, **options)
        sys.stdout.write(f"graphs: {counters['stats']['unique_graphs']}\n")

    with (
        patch.object(torch, "compile", partial(torch.compile, backend="eager")),
        patch.object(Validator, "maybe_run", counted),
    ):
        yield


def graphs_after_steps(folder: Path, *options: str) -> list[int]:
    """The number of graphs after each step of a run with validations, whose last batch is not full."""
    folder.mkdir()
    held_out = folder / "held_out.txt"
    held_out.write_text("some words that nobody has trained on\n" * 11)
    options = ("--compile.enable", "--validation.enable", f"--validation.path={held_out}", *options)
    output = finish(folder, *options, "--validation.interval=2", ranks=1, hook=counted_graphs)
    return [int(number) for number in re.findall(r"graphs: (\d+)", output)]


def graphs_with_validations(folder: Path, *options: str) -> int:
    """The number of graphs of such a run."""
    return graphs_after_steps(folder, *options)[-1]


def test_number_of_graphs_does_not_grow_with_validations(tmp_path: Path) -> None:
    graphs = graphs_after_steps(tmp_path / "run", "--training.steps=4")
    assert len(graphs) == 4
    assert 0 < graphs[1] <= 4  # of blocks and of the loss, with gradients and without
    assert graphs[3] == graphs[1]
