"""Each axis sends what docs/parallelism.md says."""

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

from torchtrain.loss import cross_entropy_sum
from torchtrain.parallelisms.context_parallel import local_sequence

BS, SEQ, DIM = 2, TINY.max_seq_len, TINY.dim
KV_DIM = TINY.n_kv_heads * TINY.head_size
# Projections, feed-forward and two norms.
LAYER = 2 * DIM * DIM + 2 * DIM * KV_DIM + 3 * DIM * TINY.ffn_dim + 2 * DIM


class CollectiveCounter(TorchDispatchMode):
    """Notes the name and the bytes of each collective: of the whole tensor, gathered or not yet scattered."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        kinds = {
            "all_gather_into_tensor": "all-gather",
            "_allgather_base_": "all-gather",
            "reduce_scatter_tensor": "reduce-scatter",
            "_reduce_scatter_base_": "reduce-scatter",
            "alltoall_base_": "reduce-scatter",  # FSDP's on a CPU, with as many bytes
            "all_reduce": "all-reduce",
        }
        if name in kinds:
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            largest = max(x.numel() * x.element_size() for x in tensors)
            self.seen[kinds[name], largest * (self.ranks if name == "all_gather_into_tensor" else 1)] += 1
        return func(*args, **(kwargs or {}))


def _collectives(parallelism: dict[str, Any], n_layers: int) -> list[Counter[tuple[str, int]]]:
    """Of one forward, and of one backward."""
    config = config_of(parallelism=parallelism, training={"local_batch_size": BS})
    model = build(config, replace(TINY, n_layers=n_layers))
    windows = global_batch(1, TINY.vocab_size, SEQ)[:BS]
    tokens, labels, positions = (
        local_sequence(x, model.mesh.context) for x in (windows[:, :-1], windows[:, 1:], torch.arange(SEQ)[None])
    )
    ranks = torch.distributed.get_world_size()
    with loss_parallel():
        with CollectiveCounter(ranks) as forward:
            loss = cross_entropy_sum(model.parts[0](tokens, positions), labels)
        with CollectiveCounter(ranks) as backward:
            loss.backward()
    return [forward.seen, backward.seen]


HIDDEN = 4 * BS * SEQ * DIM  # bytes, in float32
PARAMETERS = 4 * LAYER
KEYS_VALUES = 4 * 2 * BS * SEQ * KV_DIM
NORM = 4 * DIM


@pytest.mark.parametrize(
    ("parallelism", "forward", "backward"),
    [
        (
            {"data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "always"},
            {("all-gather", PARAMETERS): 1},
            {("all-gather", PARAMETERS): 1, ("reduce-scatter", PARAMETERS): 1},
        ),
        (
            {"tensor_parallel_degree": 2},
            {("all-gather", HIDDEN): 2, ("reduce-scatter", HIDDEN): 2},
            {("all-gather", HIDDEN): 2, ("reduce-scatter", HIDDEN): 2, ("all-reduce", NORM): 2},
        ),
        (
            {"tensor_parallel_degree": 2, "enable_sequence_parallel": False},
            {("all-reduce", HIDDEN): 2},
            {("all-reduce", HIDDEN): 2, ("all-reduce", NORM): 2},
        ),
        (
            {"context_parallel_degree": 2, "fsdp_reshard_after_forward": "always"},
            {("all-gather", KEYS_VALUES): 1, ("all-gather", PARAMETERS): 1},
            {("reduce-scatter", KEYS_VALUES): 1, ("all-gather", PARAMETERS): 1, ("reduce-scatter", PARAMETERS): 1},
        ),
    ],
    ids=["shard", "tensor", "tensor without sequence", "context"],
)
def test_a_layer_more_sends_so_much_more(
    gloo: GlooPool,
    parallelism: dict[str, Any],
    forward: dict[tuple[str, int], int],
    backward: dict[tuple[str, int], int],
) -> None:
    fewer, more = (gloo.run(2, _collectives, parallelism, n_layers)[0] for n_layers in (2, 3))
    assert [b - a for a, b in zip(fewer, more, strict=True)] == [forward, backward]
