"""A source may have the name of another part of the report."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_metrics import CONFIG

from torchtrain.config.schema import JobConfig
from torchtrain.logging import BestEffort
from torchtrain.metrics.history import Run
from torchtrain.metrics.hooks import RunResults
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.run_description import RunDescription
from torchtrain.metrics.writers import TensorBoard, WriterContext
from torchtrain.plugins.report.report import write_report


def test_source_named_samples_is_not_taken_for_generated_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated = [{"prompt": "Once", "text": "upon a time"}]
    line = {"step": 4, "source_loss_samples": 3.0, "validation_samples": generated}
    TensorBoard(WriterContext(MetricsConfig(), tmp_path, CONFIG)).write(line)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("source/loss_samples")] == [(4, 3.0)]
    monkeypatch.setattr("torchtrain.plugins.report.report.importlib.util.find_spec", lambda _: None)  # no curves
    run = Run("run", [line], [], [], [])
    write_report(tmp_path, RunResults(JobConfig(), run, RunDescription("", [], {}), [], []), BestEffort(""))
    report = (tmp_path / "report.md").read_text()
    assert report.count("## Samples after step 4") == 1
    assert "upon a time" in report
