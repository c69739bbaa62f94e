"""Collectives per layer and axis are those that docs/parallelism.md lists."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY, build, config_of, global_batch
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.models.loss import cross_entropy_sum
from torchtrain.parallelisms.context_parallel import local_sequence

BS, SEQ, DIM = 2, TINY.max_seq_len, TINY.dim
KV_DIM = TINY.n_kv_heads * TINY.head_size
# Projections, feed-forward and two norms.
LAYER = 2 * DIM * DIM + 2 * DIM * KV_DIM + 3 * DIM * TINY.ffn_dim + 2 * DIM


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by name and bytes: those of the full tensor, gathered or not yet scattered."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        names = {
            "all_gather_into_tensor": "all-gather",
            "_allgather_base_": "all-gather",
            "reduce_scatter_tensor": "reduce-scatter",
            "_reduce_scatter_base_": "reduce-scatter",
            "alltoall_base_": "reduce-scatter",  # FSDP's on a CPU, with the same number of bytes
            "all_reduce": "all-reduce",
            "allreduce_": "all-reduce",
        }
        if name in names:
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            largest = max(x.numel() * x.element_size() for x in tensors)
            self.seen[names[name], largest * (self.ranks if name == "all_gather_into_tensor" else 1)] += 1
        return func(*args, **(kwargs or {}))


def _collectives(parallelism: dict[str, Any], n_layers: int, mode: str) -> list[Counter[tuple[str, int]]]:
    """Collectives of one forward, of one backward, and of the end of a step. ``mode``: of activation checkpointing."""
    config = config_of(parallelism=parallelism, training={"local_batch_size": BS}, activation_checkpoint={"mode": mode})
    model = build(config, replace(TINY, n_layers=n_layers))
    windows = global_batch(1, TINY.vocab_size, SEQ)[:BS]
    tokens, labels, positions = (
        local_sequence(x, model.mesh.context) for x in (windows[:, :-1], windows[:, 1:], torch.arange(SEQ)[None])
    )
    ranks = torch.distributed.get_world_size()
    with loss_parallel():
        with CollectiveCounter(ranks) as forward:
            loss = cross_entropy_sum(model.model_parts[0](tokens, positions), labels)
        with CollectiveCounter(ranks) as backward:
            loss.backward()
    with CollectiveCounter(ranks) as once:
        assert model.finish_gradients()
    return [forward.seen, backward.seen, once.seen]


def _of_two_and_three_layers(parallelism: dict[str, Any], mode: str) -> list[list[Counter[tuple[str, int]]]]:
    return [_collectives(parallelism, n_layers, mode) for n_layers in (2, 3)]


HIDDEN = 4 * BS * SEQ * DIM  # bytes, in float32
PARAMETERS = 4 * LAYER
KEYS_VALUES = 4 * 2 * BS * SEQ * KV_DIM


NORMS = {("all-reduce", 4 * DIM * (2 * 2 + 1)): -1, ("all-reduce", 4 * DIM * (2 * 3 + 1)): 1}  # 3 layers instead of 2
TENSOR = {"tensor_parallel_degree": 2}
NO_SEQUENCE_PARALLEL = {**TENSOR, "enable_sequence_parallel": False}
CONTEXT = {"context_parallel_degree": 2, "fsdp_reshard_after_forward": "always"}
GATHERS, SCATTERS = ("all-gather", HIDDEN), ("reduce-scatter", HIDDEN)
REDUCTIONS = ("all-reduce", HIDDEN)
KEYS_VALUES_GATHERS = ("all-gather", KEYS_VALUES)
FSDP_BACKWARD = {("all-gather", PARAMETERS): 1, ("reduce-scatter", PARAMETERS): 1}


@pytest.mark.parametrize(
    ("parallelism", "mode", "forward", "backward", "once"),
    [
        pytest.param(
            {"data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "always"},
            "none",
            {("all-gather", PARAMETERS): 1},
            FSDP_BACKWARD,
            {},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(TENSOR, "none", {GATHERS: 2, SCATTERS: 2}, {GATHERS: 2, SCATTERS: 2}, NORMS), marks=pytest.mark.slow
        ),
        # All-gathers run again in recomputation, because their outputs are larger than their inputs. Sums are saved.
        (TENSOR, "selective", {GATHERS: 2, SCATTERS: 2}, {GATHERS: 4, SCATTERS: 2}, NORMS),
        pytest.param(  # the last output is not used
            *(TENSOR, "full", {GATHERS: 2, SCATTERS: 2}, {GATHERS: 4, SCATTERS: 3}, NORMS), marks=pytest.mark.slow
        ),
        (NO_SEQUENCE_PARALLEL, "none", {REDUCTIONS: 2}, {REDUCTIONS: 2}, NORMS),
        pytest.param(*(NO_SEQUENCE_PARALLEL, "full", {REDUCTIONS: 2}, {REDUCTIONS: 3}, NORMS), marks=pytest.mark.slow),
        pytest.param(
            CONTEXT,
            "none",
            {KEYS_VALUES_GATHERS: 1, ("all-gather", PARAMETERS): 1},
            {("reduce-scatter", KEYS_VALUES): 1, **FSDP_BACKWARD},
            {},
            marks=pytest.mark.slow,
        ),
        (
            CONTEXT,
            "selective",
            {KEYS_VALUES_GATHERS: 1, ("all-gather", PARAMETERS): 1},
            {KEYS_VALUES_GATHERS: 1, ("reduce-scatter", KEYS_VALUES): 1, **FSDP_BACKWARD},
            {},
        ),
    ],
)
def test_collectives_per_additional_layer(
    gloo: GlooPool,
    parallelism: dict[str, Any],
    mode: str,
    forward: dict[tuple[str, int], int],
    backward: dict[tuple[str, int], int],
    once: dict[tuple[str, int], int],
) -> None:
    fewer, more = gloo.run(2, _of_two_and_three_layers, parallelism, mode)[0]
    for a, b, expected in zip(fewer, more, (forward, backward, once), strict=True):
        b.subtract(a)
        assert {call: count for call, count in b.items() if count} == expected
