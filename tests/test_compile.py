"""One compilation serves all blocks for a whole run, and the compiled run is the eager one."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gloo_pool import GlooPool
from parity import STEPS, TINY, Curve, assert_same_run, config_of, train
from torch._dynamo.utils import counters

from torchtrain.config.schema import JobConfig
from torchtrain.models.llama import TransformerConfig

SHAPE = replace(TINY, n_layers=2)
TRAINING = {"loss_chunk_tokens": 8, "local_batch_size": 4}  # two microbatches
DOCUMENT_START = 7  # a token of TINY's vocabulary of 100: here and there in the random rows
# The C++ of a graph takes most of the time. A plain block and a tensor-parallel one have theirs compiled. What else
# there is changes the graphs that Inductor would get, which are made and cut in two as for it, and run as they are.
GRAPHS = "aot_eager_decomp_partition"


def by_both(*case: Any) -> list[Any]:
    return [pytest.param(*case, GRAPHS), pytest.param(*case, "inductor", marks=pytest.mark.slow)]


def train_and_count(
    config: JobConfig, shape: TransformerConfig = SHAPE, document_start: int | None = None, backend: str = "inductor"
) -> tuple[Curve, dict[str, Any]]:
    """Any compilation after the first of its kind raises."""
    torch._dynamo.reset()
    counters.clear()
    # The compiler warns of what it does itself, and shows it to nobody unless warnings are errors.
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


@pytest.mark.parametrize(("mode", "backend"), [("none", "inductor"), *by_both("selective"), *by_both("full")])
def test_one_graph_for_all_blocks_and_one_for_the_loss(gloo: GlooPool, eager: Curve, mode: str, backend: str) -> None:
    config = config_of(training=TRAINING, compile={"enable": True}, activation_checkpoint={"mode": mode})
    [(compiled, counts)] = gloo.run(1, train_and_count, config, SHAPE, None, backend)
    assert counts == {"graphs": 2, "breaks": {}}
    assert_same_run([compiled], eager)


@pytest.mark.parametrize("backend", by_both())
def test_one_graph_where_documents_are_kept_apart(gloo: GlooPool, eager: Curve, backend: str) -> None:
    config = config_of(training=TRAINING, compile={"enable": True})
    [(compiled, counts)] = gloo.run(1, train_and_count, config, SHAPE, DOCUMENT_START, backend)
    assert counts == {"graphs": 2, "breaks": {}}
    [apart] = gloo.run(1, train, config_of(training={"local_batch_size": 4}), SHAPE, STEPS, DOCUMENT_START)
    assert_same_run([compiled], apart)
    assert apart.losses != eager.losses


@pytest.mark.parametrize("backend", by_both())
def test_one_graph_on_ranks_of_a_context_parallel_group(gloo: GlooPool, eager: Curve, backend: str) -> None:
    config = config_of(training=TRAINING, parallelism={"context_parallel_degree": 2}, compile={"enable": True})
    found = gloo.run(2, train_and_count, config, SHAPE, None, backend)
    assert [counts for _, counts in found] == [{"graphs": 2, "breaks": {}}] * 2
    assert_same_run([compiled for compiled, _ in found], eager)


def test_one_graph_on_ranks_of_a_tensor_parallel_group(gloo: GlooPool) -> None:
    shape = replace(SHAPE, head_dim=6, qk_norm=True, norm_eps=1e-6, rope_theta=1e6, tied_embeddings=True)  # of Qwen3
    config = config_of(
        training={"local_batch_size": 4}, parallelism={"tensor_parallel_degree": 2}, compile={"enable": True}
    )
    [eager] = gloo.run(1, train, config_of(training={"local_batch_size": 4}), shape, STEPS)
    for compiled, counts in gloo.run(2, train_and_count, config, shape):
        assert counts == {"graphs": 1, "breaks": {}}  # the loss of split logits is not compiled
        assert_same_run([compiled], eager)
