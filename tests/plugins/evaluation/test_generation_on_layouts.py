"""Tensor-parallel ranks generate what one rank does."""

from dataclasses import replace

from gloo_pool import GlooPool
from parity import TINY
from plugin_rank_functions import generate_greedily


def test_tensor_parallel_ranks_generate_what_one_rank_does(gloo: GlooPool) -> None:
    shape = replace(TINY, head_dim=12, qk_norm=True, qkv_bias=True)
    (expected,) = gloo.run(1, generate_greedily, shape, 1)
    assert gloo.run(2, generate_greedily, shape, 2) == [expected, expected]
    assert len(set(expected)) > 2
