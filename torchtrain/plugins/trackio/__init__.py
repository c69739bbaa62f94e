"""Plugin: metrics in Trackio (docs/watching.md)."""

from torchtrain.config.registry import METRICS_WRITERS

METRICS_WRITERS.add("trackio", "torchtrain.plugins.trackio.writer:Trackio")
