"""Plugin: estimate the memory and speed of a run without a GPU (docs/estimate.md)."""
