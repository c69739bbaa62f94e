"""Plugin: metrics in MLflow (docs/watching.md)."""

from torchtrain.config.registry import METRICS_WRITERS

METRICS_WRITERS.add("mlflow", "torchtrain.plugins.mlflow.writer:MLflow")
