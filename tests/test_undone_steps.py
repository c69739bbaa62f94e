"""Steps that are undone, by a rollback or a resume with other options, in metrics.jsonl and in what writers show."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_run import finish, patched_loss, read_metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtrain.config.registry import METRICS_WRITERS
from torchtrain.metrics.history import read_run
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.writers import MetricsWriter, WriterContext, Writers, changes_steps

ROLLBACK = ("--faults.on_nonfinite", "rollback", "--checkpoint.interval", "2", "--training.steps", "6")


def nan_in_step_4() -> Any:
    return patched_loss(lambda call, loss: loss * float("nan") if 3 * 4 < call <= 4 * 4 else loss)


def test_rollback_undoes_steps_in_metrics_and_tensorboard(tmp_path: Path) -> None:
    options = ("--metrics.enable_tensorboard", "--checkpoint.interval", "2")
    finish(tmp_path, *ROLLBACK, *options, ranks=1, hook=nan_in_step_4)
    lines = read_metrics(tmp_path)
    (undone,) = (number for number, line in enumerate(lines) if line.get("event") == "rolled_back")
    assert lines[undone]["step"] == 2
    assert [line["step"] for line in lines[:undone] if "loss" in line and "event" not in line] == [1, 2, 3]
    assert [line["step"] for line in lines[undone:] if "loss" in line] == [3, 4, 5, 6]
    run = read_run(tmp_path)
    assert [line["step"] for line in run.lines] == [1, 2, 3, 4, 5, 6]
    assert run.restarts == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("loss/average")}
    assert shown == pytest.approx({line["step"]: line["loss"] for line in run.lines})
    assert len(events.Scalars("loss/average")) == 6


class Recording(MetricsWriter):
    """Records its calls."""

    label = "calls"
    calls: list[Any] = []  # noqa: RUF012

    def __init__(self, context: WriterContext) -> None:
        self.calls.append(("open", context.start_step, context.undone))

    def write(self, line: dict[str, Any]) -> None:
        self.calls.append(line["step"])

    def undo(self, step: int) -> None:
        self.calls.append(("undo", step))


def test_registered_writer_is_called_when_steps_are_undone(tmp_path: Path) -> None:
    METRICS_WRITERS.register("calls")(Recording)
    config = MetricsConfig(enable_tensorboard=False, writers=("calls",))
    writers = Writers(config, tmp_path, "", 4, "run", undone=True)
    writers.write({"step": 5, "loss": 1.0})
    writers.undo(4)
    assert Recording.calls == [("open", 4, True), 5, ("undo", 4)]
    assert [line.get("event") for line in read_metrics(tmp_path)] == [None, "rolled_back"]


@pytest.mark.parametrize(
    ("lines", "step", "changes"),
    [
        ([("start", 0, "a"), (None, 4, "")], 2, False),  # the same options: the same values again
        ([("start", 0, "b"), (None, 4, "")], 2, True),
        ([("start", 0, "b"), (None, 4, "")], 4, False),  # no later step
        ([("start", 0, "b"), (None, 4, ""), ("start", 2, "a"), (None, 4, "")], 2, False),
        ([("start", 0, "a"), (None, 4, ""), ("start", 4, "b of the next stage"), (None, 6, "")], 2, False),
        ([("start", 0, "b"), (None, 4, ""), ("rolled_back", 2, "")], 2, False),  # undone already
        ([("start", 0, "a"), (None, 4, ""), ("start", 4, "b"), (None, 6, "")], 3, True),  # continued with others
    ],
)
def test_resume_that_changes_steps(tmp_path: Path, lines: list[Any], step: int, changes: bool) -> None:
    events = [
        {"step": at, **({"event": event, "options": options[:1]} if event else {})} for event, at, options in lines
    ]
    for event, (_, _, options) in zip(events, lines, strict=True):
        event |= {"stage": options[5:]} if "stage" in options else {}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert changes_steps(tmp_path / "metrics.jsonl", step, "a") is changes
