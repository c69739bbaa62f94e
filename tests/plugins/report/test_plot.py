"""scripts/plot.py plots the metrics, restarts and faults in metrics.jsonl."""

import errno
import json
from pathlib import Path

import pytest
from disk_faults import DiskFaults
from forked_command import run_command

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from torchtrain.metrics.history import read_run
from torchtrain.plugins.report.curves import PANELS, plot


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
    first, restart, second, fault = (line.get_xydata().tolist() for line in loss.lines)
    assert first == [[1, 8.0], [2, 7.0]]
    assert second == [[1, 8.5], [2, 7.25], [3, 6.0]]
    assert [x for x, _ in restart] == [1, 1]
    assert fault == [[2, 7.25]]
    assert grad_norm.lines[0].get_xydata().tolist() == [[1, 16.0], [2, 14.0]]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["plain", "twice", "restart", "bad step skip"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [2, 5, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3, 6))])
def test_panels_fill_the_picture_and_letters_can_be_read_on_a_page(tmp_path: Path, count: int) -> None:
    """At a width of 830 pixels, which GitHub shows, no letter is smaller than 10 pixels."""
    run = read_run(write_run(tmp_path / "run", [numbers(1, 8.0), numbers(2, 7.0)]))
    figure = plot([run], tmp_path / "curves.png", panels=list(PANELS)[:count])
    spans = [axes.get_subplotspec().colspan for axes in figure.axes]
    assert len(spans) == count
    assert sum(len(span) for span in spans) == 2 * -(-count // 2)
    pixels_per_point = 830 / figure.get_size_inches()[0] / 72
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) * pixels_per_point >= 10


def test_plot_shows_tokens_beside_steps_or_over_tokens(tmp_path: Path) -> None:
    lines = [{**numbers(step, 8.0 - step), "tokens": 1000 * max(step, 2 * step - 2)} for step in range(1, 5)]
    run = read_run(write_run(tmp_path / "ramp", lines))  # from step 3 on with twice the batch
    figure = plot([run], tmp_path / "steps.png")
    (top,) = figure.axes[0].child_axes
    labels = {tick: label.get_text() for tick, label in zip(top.get_xticks(), top.get_xticklabels(), strict=True)}
    assert (labels[2], labels[4]) == ("2K", "6K")
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
    result = run_command("scripts/plot.py", str(tmp_path), "-o", str(tmp_path / "curves.png"))
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
    loss = plot([run], tmp_path / "curves.png").axes[0]
    total, web, code = loss.lines
    assert [line.get_xydata().tolist() for line in (total, web, code)] == [[[1, 8], [2, 6]], [[1, 7]], [[2, 5]]]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["web", "code"]
    assert len(plot([run, run], tmp_path / "curves.png").axes[0].lines) == 2
    means = [line | {"loss_mean": line["loss"] + 1} for line in lines]
    loss = plot([read_run(write_run(tmp_path / "means", means))], tmp_path / "curves.png").axes[0]
    assert loss.lines[0].get_xydata().tolist() == [[1, 9], [2, 7]]


def test_plot_has_validations_and_scores(tmp_path: Path) -> None:
    """Of several runs each result has a line style, of one run each has a color."""
    results = {"validation_loss": 7.5, "validation_loss_wiki": 7.0, "validation_perplexity": 1808.0}
    results |= {"validation_ema_loss": 7.25, "validation_ema_loss_wiki": 6.5}
    scores = {"validation_task_choice_acc": 0.25, "validation_ema_task_choice_acc": 0.5}
    lines = [numbers(1, 8.0) | {"lr": 1e-3}, numbers(2, 7.0) | {"lr": 2e-3}, {"step": 2, **results, **scores}]
    run = read_run(write_run(tmp_path / "run", lines))
    panels = {axes.get_title(loc="left"): axes for axes in plot([run], tmp_path / "curves.png").axes}
    loss, rate, tasks = (panels[title] for title in ("Loss (nats per token)", "Learning rate", "Scores of tasks"))
    assert rate.lines[0].get_ydata().tolist() == [1e-3, 2e-3]
    assert [line.get_xydata().tolist() for line in loss.lines] == [
        *([[1, 8], [2, 7]], [[2, 7.5]], [[2, 7.0]], [[2, 7.25]], [[2, 6.5]])
    ]
    labels = ["loss", "loss wiki", "ema loss", "ema loss wiki"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [f"validation {name}" for name in labels]
    assert [line.get_xydata().tolist() for line in tasks.lines] == [[[2, 0.25]], [[2, 0.5]]]
    assert [text.get_text() for text in tasks.get_legend().get_texts()] == ["choice acc", "ema choice acc"]
    assert tasks.lines[0].get_color() != tasks.lines[1].get_color()
    twice = plot([run, run], tmp_path / "curves.png").axes[-1]
    assert twice.lines[0].get_color() == twice.lines[1].get_color() != twice.lines[2].get_color()
    assert len(plot([run], tmp_path / "curves.png", panels=["loss", "lr"]).axes) == 2


def test_long_curves_are_smoothed_and_equal_ones_are_seen_one_inside_the_other(tmp_path: Path) -> None:
    values = [8.0 - step / 20 + step % 2 for step in range(1, 101)]
    lines = [numbers(step, value) for step, value in enumerate(values, 1)]
    run = read_run(write_run(tmp_path / "run", lines))
    raw, smooth = plot([run], tmp_path / "curves.png").axes[0].lines
    assert raw.get_ydata().tolist() == values
    means = smooth.get_ydata().tolist()
    assert means[50] == pytest.approx(sum(values[45:56]) / 11)
    assert (means[0], means[1]) == (values[0], pytest.approx(sum(values[:3]) / 3))
    assert means[-1] == pytest.approx(sum(values[-6:]) / 6)
    other = read_run(write_run(tmp_path / "other", [numbers(step, value + 1) for step, value in enumerate(values, 1)]))
    below, _, of_other, above = plot([run, other, run], tmp_path / "curves.png").axes[0].lines
    assert below.get_ydata().tolist() == above.get_ydata().tolist() == values
    assert below.get_linewidth() > 2 * above.get_linewidth() == 2 * of_other.get_linewidth()
