"""Plugin: estimate the memory and speed of a run without a GPU (docs/estimate.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS

CONFIG_SECTIONS.add("estimate", "torchtrain.plugins.planner.options:EstimateConfig")
