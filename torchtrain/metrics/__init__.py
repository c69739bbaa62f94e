"""What a run reports, and where to."""

from torchtrain.metrics.recorder import MetricsRecorder

__all__ = ["MetricsRecorder"]
