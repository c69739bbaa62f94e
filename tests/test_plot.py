"""scripts/plot.py plots the metrics, restarts and faults in metrics.jsonl."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from disk_faults import DiskFaults
from forked_command import run_command

ROOT = Path(__file__).parent.parent
pytest.importorskip("matplotlib")

from torchtrain.metrics.curves import plot  # noqa: E402
from torchtrain.metrics.history import read_run  # noqa: E402


def write_run(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    return folder


def numbers(step: int, loss: float) -> dict:
    return {"step": step, "loss": loss, "grad_norm": 2 * loss, "tokens_per_second": 100.0, "memory_gib": None}


def test_plot_has_curves_restarts_and_faults(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", [{"step": 0, "event": "start"}, numbers(1, 8.0), numbers(2, 7.0)])
    twice = write_run(
        tmp_path / "twice",
        [
            *({"step": 0, "event": "start"}, numbers(1, 8.5), numbers(2, 7.5), {"step": 1, "event": "start"}),
            *(numbers(2, 7.25), {"step": 2, "event": "bad_step_skip"}, numbers(3, 6.0)),
        ],
    )
    runs = [read_run(plain), read_run(twice / "metrics.jsonl")]
    assert runs[0].restarts == []
    figure = plot(runs, tmp_path / "curves.png")
    loss, grad_norm, *_ = figure.axes
    first, second, restart, fault = (line.get_xydata().tolist() for line in loss.lines)
    assert first == [[1, 8.0], [2, 7.0]]
    assert second == [[1, 8.5], [2, 7.25], [3, 6.0]]
    assert [x for x, _ in restart] == [1, 1]
    assert fault == [[2, 7.25]]
    assert grad_norm.lines[0].get_xydata().tolist() == [[1, 16.0], [2, 14.0]]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["plain", "twice", "restart", "bad step skip"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_shows_tokens_beside_steps_or_over_tokens(tmp_path: Path) -> None:
    lines = [{**numbers(step, 8.0 - step), "tokens": 1000 * max(step, 2 * step - 2)} for step in range(1, 5)]
    run = read_run(write_run(tmp_path / "ramp", lines))  # from step 3 on with twice the batch
    figure = plot([run], tmp_path / "steps.png")
    (top,) = figure.axes[0].child_axes
    labels = {tick: label.get_text() for tick, label in zip(top.get_xticks(), top.get_xticklabels(), strict=True)}
    assert (labels[2], labels[4]) == ("2k", "6k")
    figure = plot([run], tmp_path / "tokens.png", "tokens")
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1000, 2000, 4000, 6000]


def test_plot_marks_stages_and_no_restart_between_them(tmp_path: Path) -> None:
    lines = [{"step": 0, "event": "start", "stage": "main"}, numbers(1, 8.0), numbers(2, 7.0)]
    lines += [{"step": 2, "event": "start", "stage": "long", "same_process": True}, numbers(3, 6.0)]
    lines += [{"step": 2, "event": "start", "stage": "long"}, numbers(3, 6.0)]
    run = read_run(write_run(tmp_path / "staged", lines))
    assert (run.borders, run.restarts) == ([(0, "main"), (2, "long")], [2])
    assert [line["stage"] for line in run.starts] == ["main", "long"]  # of the process, and of its restart
    figure = plot([run], tmp_path / "curves.png")
    assert [text.get_text() for text in figure.axes[0].texts] == [" main", " long"]


def test_restart_at_the_border_of_two_stages_is_a_start(tmp_path: Path) -> None:
    lines = [{"step": 0, "event": "start", "stage": "main"}, numbers(1, 8.0), numbers(2, 7.0)]
    lines += [{"step": 2, "event": "start", "stage": "long"}, numbers(3, 6.0)]
    run = read_run(write_run(tmp_path / "staged", lines))
    assert (run.borders, run.restarts) == ([(0, "main"), (2, "long")], [2])
    assert [line["stage"] for line in run.starts] == ["main", "long"]


def test_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/plot.py", str(tmp_path), "-o", str(tmp_path / "curves.png")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert (
        result.stderr
        == f"error: {tmp_path} has no metrics.jsonl; give the folder of a run, such as outputs/debug_model\n"
    )


def test_unreadable_metrics_file_is_an_error(disk: DiskFaults, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [numbers(1, 8.0)])
    disk.fail("open", run / "metrics.jsonl", errno.EIO)
    found = run_command("scripts/plot.py", str(run))
    assert found.returncode == 2
    assert found.stderr == f"error: {run}/metrics.jsonl cannot be read: Input/output error\n"


def test_plot_of_one_run_has_the_loss_of_each_source(tmp_path: Path) -> None:
    lines = [numbers(1, 8.0) | {"source_loss_web": 7.0}, numbers(2, 6.0) | {"source_loss_code": 5.0}]
    run = read_run(write_run(tmp_path / "mix", lines))
    total, web, code = plot([run], tmp_path / "curves.png").axes[0].lines
    assert [line.get_xydata().tolist() for line in (total, web, code)] == [[[1, 8], [2, 6]], [[1, 7]], [[2, 5]]]
    assert [line.get_label() for line in (web, code)] == ["web", "code"]
    assert len(plot([run, run], tmp_path / "curves.png").axes[0].lines) == 2
