"""Plugin: verify that a model trains the same run on every layout (docs/verify-layouts.md)."""

REQUIRES = ("torchtrain.plugins.comparison",)  # the fingerprints of tensors
