"""Plugin: verify that a model trains the same run on every layout (docs/verify-layouts.md)."""

REQUIRES = ("torchtrain.plugins.comparison", "torchtrain.plugins.exact_sums")  # fingerprints of tensors, and grains
