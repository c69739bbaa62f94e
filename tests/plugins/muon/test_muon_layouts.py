"""Muon: every layout trains like one rank, and muP is the same at any width."""

from typing import Any

import pytest
from gloo_pool import GlooPool
from parity import Curve
from test_learning import assert_layout_trains_like_one_rank, check_coordinates_over_widths, run_of_one_rank


@pytest.fixture(scope="module")
def references(gloo: GlooPool) -> dict[tuple[str, str], Curve]:
    return {(model, "muon"): run_of_one_rank(gloo, model, "muon") for model in ("plain", "tied")}


# As in test_learning.py: ranks, model, rows per rank, tokens per chunk of the loss, optimizer, [parallelism].
LAYOUTS: dict[str, tuple[int, str, int, int, str, dict[str, Any]]] = {
    "shard": (2, "tied", 4, 0, "muon", {}),
    "all": (
        8,
        "plain",
        8,
        8,
        "muon",
        {
            "tensor_parallel_degree": 2,
            "context_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_microbatches": 2,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_like_one_rank(
    gloo: GlooPool, references: dict[tuple[str, str], Curve], layout: str
) -> None:
    assert_layout_trains_like_one_rank(gloo, references, LAYOUTS[layout])


@pytest.mark.slow
def test_activation_changes_do_not_depend_on_width_with_mup(gloo: GlooPool) -> None:
    check_coordinates_over_widths(gloo, "muon", growth=2)
