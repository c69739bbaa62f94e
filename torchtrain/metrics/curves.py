"""Plot the curves of runs. It needs matplotlib, which is optional: import this module only where curves are drawn."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from torchtrain.metrics.history import Run

SOURCE_LOSS = "source_loss_"
PANELS = (
    ("loss", "Loss (nats per token)"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_second", "Tokens per second and device"),
    ("memory_gib", "Peak memory (GiB)"),
)
# Okabe and Ito's colors, which the color-blind can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def tokens_after(run: Run, steps: Sequence[float]) -> list[float]:
    """The tokens of ``run`` up to each of ``steps``, interpolated between its lines."""
    known = [(0, 0), *((line["step"], line["tokens"]) for line in run.lines if isinstance(line.get("tokens"), int))]
    return [float(tokens) for tokens in np.interp(steps, [step for step, _ in known], [count for _, count in known])]


def draw_sources(axes: Axes, run: Run, over: str) -> None:
    """Draw the loss of each source of the data, where the run has recorded it, with a legend in the panel."""
    keys = dict.fromkeys(key for line in run.lines for key in line if key.startswith(SOURCE_LOSS))
    for key, color in zip(keys, COLORS[1:], strict=False):
        points = [(line["step"], line[key]) for line in run.lines if isinstance(line.get(key), (int, float))]
        steps, values = [step for step, _ in points], [value for _, value in points]
        x = tokens_after(run, steps) if over == "tokens" else steps
        axes.plot(x, values, color=color, linewidth=1, label=key.removeprefix(SOURCE_LOSS), zorder=1.5)
    if keys:
        axes.legend(loc="lower left", fontsize=8, frameon=False)


def draw(axes: Axes, run: Run, key: str, color: str, over: str) -> None:
    points = [(line["step"], line[key]) for line in run.lines if isinstance(line.get(key), (int, float))]
    steps, values = [step for step, _ in points], [value for _, value in points]

    def positions(steps: Sequence[float]) -> Sequence[float]:
        return tokens_after(run, steps) if over == "tokens" else steps

    marker = "." if len(points) == 1 else ""
    axes.plot(positions(steps), values, color=color, linewidth=1.6, label=run.name, marker=marker)
    for x in positions(run.restarts):
        axes.axvline(x, color=color, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
    for x, (_, name) in zip(positions([step for step, _ in run.borders]), run.borders, strict=True):
        axes.axvline(x, color=color, linewidth=1, linestyle=(0, (1, 2)), alpha=0.7)
        place = axes.get_xaxis_transform()  # x in data, y as a fraction of the axes
        axes.text(x, 0.98, f" {name}", color=color, fontsize=8, rotation=90, va="top", transform=place)
    for step, _ in run.faults if points else ():
        nearest = min(points, key=lambda point: abs(point[0] - step))
        (x,) = positions([step])
        axes.plot(x, nearest[1], color=color, marker="X", markersize=8, markeredgecolor="white", linestyle="")


def add_token_axis(axes: Axes, run: Run) -> None:
    """Label the top of ``axes``, which has steps, with the tokens of ``run``."""
    top = axes.secondary_xaxis("top")
    steps = [step for step in axes.get_xticks() if axes.get_xlim()[0] <= step <= axes.get_xlim()[1] and step >= 0]
    top.set_xticks(steps, [EngFormatter(sep="").format_eng(tokens) for tokens in tokens_after(run, steps)])
    top.tick_params(labelsize=8, colors="#555555", length=2)
    top.set_xlabel("Tokens", fontsize=8, color="#555555")


def plot(runs: Sequence[Run], output: Path, over: str = "step") -> Figure:
    """Write the picture, in the format of the name's ending; also returns it. ``over``: "step" or "tokens"."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")  # without pyplot, which would keep it in memory
    grid = figure.subplots(2, 2, sharex=True)
    for axes, (key, title) in zip(grid.flat, PANELS, strict=True):
        for run, color in zip(runs, (COLORS * len(runs))[: len(runs)], strict=True):
            draw(axes, run, key, color, over)
        if key == "loss" and len(runs) == 1:
            draw_sources(axes, runs[0], over)
        axes.set_title(title, loc="left", fontsize=11, pad=6)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if over == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if key in ("tokens_per_second", "memory_gib"):
            axes.margins(y=0.1)
            axes.set_ylim(bottom=0)
    for axes in grid[1]:
        axes.set_xlabel("Step" if over == "step" else "Tokens")
    if over == "step" and any("tokens" in line for line in runs[0].lines):
        for axes in grid[0]:
            add_token_axis(axes, runs[0])
    handles, names = grid[0, 1].get_legend_handles_labels()
    if any(run.restarts for run in runs):
        handles.append(Line2D([], [], color="#555555", linewidth=1, linestyle=(0, (4, 3))))
        names.append("restart")
    if any(run.faults for run in runs):
        handles.append(Line2D([], [], color="#555555", marker="X", linestyle="", markeredgecolor="white"))
        names.append(", ".join(sorted({event.replace("_", " ") for run in runs for _, event in run.faults})))
    figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 6), frameon=False)
    figure.savefig(output, dpi=130)
    return figure
