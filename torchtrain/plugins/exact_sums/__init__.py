"""Plugin: the same bits on any number of data-parallel ranks, ``training.sums = "exact"`` (docs/parallelism.md)."""

from torchtrain.config.registry import GRADIENT_REDUCERS

GRADIENT_REDUCERS.add("exact", "torchtrain.plugins.exact_sums.exact_sums:ExactGradientReducer")
