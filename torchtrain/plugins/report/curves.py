"""Plot the curves of runs. It needs matplotlib, which is optional: import this module only where curves are drawn."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from torchtrain.config.tokens import format_tokens
from torchtrain.metrics.history import Run

SOURCE_LOSS = re.compile("source_loss_")
VALIDATION_LOSS = re.compile(r"validation_(?:ema_)?loss(?:_|$)")
SCORES = re.compile(r"validation_(?:ema_)?task_")
PANELS: Mapping[str, str] = {
    "loss": "Loss (nats per token)",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second and device",
    "memory_gib": "Peak memory (GiB)",
    "scores": "Scores of tasks",
}
SMOOTHED = ("loss", "grad_norm", "tokens_per_second")
MIN_POINTS_SMOOTHED = 40
# Okabe and Ito's colors, which the color-blind can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GRAY = "#555555"
LINE_STYLES: tuple[Any, ...] = ((0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
LINE_WIDTH = 1.6
# GitHub shows a picture about 830 pixels wide, so that the letters have the size of those of the page.
WIDTH_INCHES, HEIGHT_INCHES = 8.5, 2.7
LEGEND_CHARACTERS = 90  # in a row of the legend


def points_of(run: Run, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric; values that were not finite are left out."""
    points = [(line["step"], line[key]) for line in run.lines if isinstance(line.get(key), (int, float))]
    return [step for step, _ in points], [value for _, value in points]


def tokens_after(run: Run, steps: Sequence[float]) -> list[float]:
    """The tokens of ``run`` up to each of ``steps``, interpolated between its lines."""
    known = [(0, 0), *((line["step"], line["tokens"]) for line in run.lines if isinstance(line.get("tokens"), int))]
    return [float(tokens) for tokens in np.interp(steps, [step for step, _ in known], [count for _, count in known])]


def smoothed(values: Sequence[float]) -> list[float]:
    """Moving average over about a tenth of the values, centered, so that it does not lag; near the ends over fewer."""
    sums, half = np.concatenate(([0.0], np.cumsum(values))), max(1, len(values) // 20)
    means = []
    for i in range(len(values)):
        first, last = i - min(half, i), i + min(half, i, len(values) - 1 - i)
        means.append(float(sums[last + 1] - sums[first]) / (last + 1 - first))
    return means


def coincide(a: Run, b: Run, key: str) -> bool:
    """Whether a plot hardly shows a difference between two curves: on average at most 0.5% of the range of values."""
    (steps, values), (others, other_values) = points_of(a, key), points_of(b, key)
    first, last = (max(steps[0], others[0]), min(steps[-1], others[-1])) if steps and others else (1, 0)
    if first >= last:
        return False
    at = [step for step in sorted({*steps, *others}) if first <= step <= last]
    x, y = np.interp(at, steps, values), np.interp(at, others, other_values)
    return bool(np.abs(x - y).mean() <= 0.005 * (max(x.max(), y.max()) - min(x.min(), y.min())))


class Panel:
    """One metric of all runs, in one pair of axes."""

    def __init__(self, axes: Axes, key: str, over: str) -> None:
        """``over``: "step" or "tokens"."""
        self.axes, self.key, self.over = axes, key, over
        self.named: dict[str, Line2D] = {}  # entries of the legend of this panel
        axes.set_title(PANELS[key], loc="left", fontsize=11, pad=6)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if over == "tokens":
            axes.xaxis.set_major_formatter(lambda tokens, _: format_tokens(round(tokens)))
        if key == "lr":
            axes.yaxis.set_major_formatter(lambda rate, _: f"{rate:.3g}")

    def x(self, run: Run, steps: Sequence[float]) -> Sequence[float]:
        return tokens_after(run, steps) if self.over == "tokens" else steps

    def draw(self, run: Run, color: str, width: float, *, smooth: bool, key: str = "") -> None:
        """Draw the curve, and mark restarts, stages and faults.

        Args:
            smooth: a curve of many points.
            key: the metric, if it is not that of the panel.
        """
        self.mark(run, color)
        steps, values = points_of(run, key or self.key)
        if not steps:
            return
        x = self.x(run, steps)
        if smooth and self.key in SMOOTHED and len(steps) >= MIN_POINTS_SMOOTHED:
            self.axes.plot(x, values, color=color, linewidth=0.8, alpha=0.35)
            self.axes.plot(x, smoothed(values), color=color, linewidth=width)
        else:
            marker = "." if len(steps) == 1 else ""
            self.axes.plot(x, values, color=color, linewidth=width, marker=marker, solid_capstyle="butt")
        for step, _ in run.faults:
            value = values[min(range(len(steps)), key=lambda i: abs(steps[i] - step))]
            place = self.x(run, [step])
            self.axes.plot(place, value, color=color, marker="X", markersize=8, markeredgecolor="white", linestyle="")

    def mark(self, run: Run, color: str) -> None:
        """Mark restarts and the beginnings of stages."""
        for x in self.x(run, run.restarts):
            self.axes.axvline(x, color=color, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
        for x, (_, name) in zip(self.x(run, [step for step, _ in run.borders]), run.borders, strict=True):
            self.axes.axvline(x, color=color, linewidth=1, linestyle=(0, (1, 2)), alpha=0.7)
            place = self.axes.get_xaxis_transform()  # x in data, y as a fraction of the axes
            self.axes.text(
                *(x, 0.98, f" {name}"),
                color=color,
                fontsize=8,
                rotation=90,
                va="top",
                transform=place,
                bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5},
            )

    def draw_named(self, run: Run, curves: Mapping[str, str], color: str, legend_color: str = "") -> None:
        """Draw other curves of ``run``, with labels by name of the metric, and add them to the legend of the panel.

        ``color``: that of the run, and each curve has a line style. Empty: each has a color of its own.
        """
        for i, (key, label) in enumerate(curves.items()):
            steps, values = points_of(run, key)
            style: Any = LINE_STYLES[i % len(LINE_STYLES)] if color else "-"
            own = color or COLORS[1:][i % len(COLORS[1:])]
            marker = "." if len(steps) < MIN_POINTS_SMOOTHED and key.startswith("validation_") else ""
            self.axes.plot(self.x(run, steps), values, color=own, linestyle=style, linewidth=1.2, marker=marker)
            shown = legend_color or own
            self.named[label] = Line2D([], [], color=shown, linestyle=style, linewidth=1.2, marker=marker)

    def finish(self) -> None:
        """Set the limits of the axes when all curves are drawn, and add the legend of the panel."""
        self.axes.margins(y=0.06)
        if self.key in ("tokens_per_second", "memory_gib"):
            self.axes.set_ylim(0, 1.08 * self.axes.get_ylim()[1])
        if self.named:
            self.axes.legend(self.named.values(), self.named.keys(), loc="best", fontsize=9, framealpha=0.7)

    def add_token_axis(self, run: Run) -> None:
        """Label the top of the axes, which have steps, with the tokens of ``run``."""
        low, high = self.axes.get_xlim()
        top = self.axes.secondary_xaxis("top")
        steps = [step for step in self.axes.get_xticks() if low <= step <= high and step >= 0]
        top.set_xticks(steps, [format_tokens(round(tokens)) for tokens in tokens_after(run, steps)])
        top.tick_params(labelsize=9, colors=GRAY, length=2)
        top.set_xlabel("Tokens", fontsize=9, color=GRAY)


def names_of(run: Run, pattern: re.Pattern[str]) -> dict[str, str]:
    """Labels of the metrics that begin with ``pattern``, by name."""
    names = dict.fromkeys(key for line in run.lines for key in line if pattern.match(key))
    parts = ("source_loss_", "validation_task_")
    return {
        name: re.sub("|".join(parts), "", name.replace("_ema_task_", "_task_ema_")).replace("_", " ") for name in names
    }


def panels_of(runs: Sequence[Run]) -> list[str]:
    """The panels for which one of ``runs`` has values."""
    found = [key for key in PANELS if any(points_of(run, key)[0] for run in runs)]
    return [*found, "scores"] if any(names_of(run, SCORES) for run in runs) else found


def plot(runs: Sequence[Run], output: Path | IO[bytes], over: str = "step", panels: Sequence[str] = ()) -> Figure:
    """Write the picture, in the format of the name's ending, or as PNG to a binary file; also returns it.

    Of runs whose curves coincide, the earlier ones are drawn as wider lines, so that each can be seen.

    Args:
        over: "step" or "tokens".
        panels: keys of ``PANELS``; by default those for which a run has values.
    """
    chosen = list(panels or panels_of(runs))
    # Of an odd number of panels, the first one has a row of its own.
    has_wide = len(chosen) % 2 == 1
    rows = (len(chosen) + 1) // 2
    # Without pyplot, which would keep it in memory.
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES * max(rows, 1.4)), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    cells: list[Axes] = []
    for number in range(len(chosen)):
        is_wide = has_wide and number == 0
        row, column = divmod(number + (has_wide and number > 0), 2)
        where = grid[0, :] if is_wide else grid[row, column]
        cells.append(figure.add_subplot(where, sharex=cells[0] if cells else None))
        cells[-1].tick_params(labelsize=9, labelbottom=is_wide or row == rows - 1)
    top, bottom = cells[: 1 if has_wide else 2], cells[-2:]
    colors = (COLORS * len(runs))[: len(runs)]
    for axes, key in zip(cells, chosen, strict=True):
        panel = Panel(axes, key, over)
        pairs = [(i, j) for i, j in combinations(range(len(runs)), 2) if coincide(runs[i], runs[j], key)]
        for i, (run, color) in enumerate(zip(runs, colors, strict=True)):
            width = LINE_WIDTH + 2.2 * sum(i == earlier for earlier, _ in pairs)
            # Beside losses by source, which are means since the line before, the loss is that mean, too.
            has_mean = key == "loss" and len(runs) == 1 and any("loss_mean" in line for line in run.lines)
            smooth = not any(i in pair for pair in pairs)
            panel.draw(run, color, width, smooth=smooth, key="loss_mean" if has_mean else "")
            if key == "loss":
                panel.draw_named(run, names_of(run, VALIDATION_LOSS), color, GRAY if len(runs) > 1 else "")
            if key == "scores":
                panel.draw_named(run, names_of(run, SCORES), *((color, GRAY) if len(runs) > 1 else ("",)))
        if key == "loss" and len(runs) == 1:
            panel.draw_named(runs[0], names_of(runs[0], SOURCE_LOSS), "")
        panel.finish()
        if axes in bottom:
            axes.set_xlabel("Step" if over == "step" else "Tokens")
        if axes in top and over == "step" and any("tokens" in line for line in runs[0].lines):
            panel.add_token_axis(runs[0])
    add_legend(figure, runs, colors)
    figure.savefig(output, dpi=200)
    return figure


def add_legend(figure: Figure, runs: Sequence[Run], colors: Sequence[str]) -> None:
    """Add the legend of runs and marks above all panels."""
    handles = [Line2D([], [], color=color, linewidth=2) for color in colors]
    names = [run.name for run in runs]
    if any(run.restarts for run in runs):
        handles.append(Line2D([], [], color=GRAY, linewidth=1, linestyle=(0, (4, 3))))
        names.append("restart")
    if any(run.faults for run in runs):
        handles.append(Line2D([], [], color=GRAY, marker="X", linestyle="", markeredgecolor="white"))
        names.append(", ".join(sorted({event.replace("_", " ") for run in runs for _, event in run.faults})))
    columns = min(len(names), max(1, LEGEND_CHARACTERS // (6 + max(map(len, names)))))
    figure.legend(handles, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
