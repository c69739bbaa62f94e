"""RoPE is computed in float32 in every block, on any layout."""

import pytest
import torch
from gloo_pool import GlooPool
from rank_functions import rope_in_a_step

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one rank": (1, {}),
    "shard": (2, {}),
    "replicate": (2, {"data_parallel_replicate_degree": 2}),
    "tensor": (2, {"tensor_parallel_degree": 2}),
    "context": (2, {"context_parallel_degree": 2}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
}
ONE_ROUNDING = 1.01 * 2**-8  # error of rounding the result to bfloat16
FLOAT32_TABLES = {(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)}


@pytest.mark.parametrize(
    "layout",
    [name if name in ("shard", "tensor") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_tables_are_float32_in_every_block_of_a_bfloat16_step(gloo: GlooPool, layout: str) -> None:
    ranks, parallelism = LAYOUTS[layout]
    for rope in gloo.run(ranks, rope_in_a_step, parallelism, "full" if layout == "shard" else "none"):
        assert rope.dtypes == FLOAT32_TABLES
        assert rope.calls >= 2 * (1 if layout == "pipeline" else 2)  # of queries and keys, in two layers
        assert not rope.tables_rounded
        assert rope.error < ONE_ROUNDING
