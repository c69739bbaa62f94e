"""Plugin: the same bits on any number of data-parallel ranks, ``training.sums = "exact"`` (docs/parallelism.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS, GRADIENT_REDUCERS

CONFIG_SECTIONS.add("exact_sums", "torchtrain.plugins.exact_sums.options:ExactSumsConfig")
GRADIENT_REDUCERS.add("exact", "torchtrain.plugins.exact_sums.exact_sums:ExactGradientReducer")
