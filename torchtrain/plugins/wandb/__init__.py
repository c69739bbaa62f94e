"""Plugin: metrics in Weights & Biases (docs/watching.md)."""

from torchtrain.config.registry import METRICS_WRITERS

METRICS_WRITERS.add("wandb", "torchtrain.plugins.wandb.writer:WeightsAndBiases")
