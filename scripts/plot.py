"""Plot the curves of one or more runs: python scripts/plot.py RUN [RUN ...] -o curves.png

RUN is a run's folder, or its metrics.jsonl. For steps that a restart repeated, the last value is plotted. A dashed line
marks a restart, a cross a fault, each in the color of its run. The axis at the top shows the tokens of the first run.
--x tokens plots over tokens instead, to compare runs with other batches. Needs matplotlib: pip install -e '.[plot]'
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

PANELS = (
    ("loss", "Loss (nats per token)"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_second", "Tokens per second and device"),
    ("memory_gib", "Peak memory (GiB)"),
)
# Okabe and Ito's colors, which the color-blind can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Run:
    name: str
    lines: list[dict[str, Any]]  # numbers by step, ascending, each step once
    restarts: list[int]
    faults: list[tuple[int, str]]  # step, event


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def read_run(path: Path) -> Run:
    """The run in ``path``; exits with a message where there is none."""
    file = path if path.is_file() else path / "metrics.jsonl"
    if not file.is_file():
        fail(f"{path} has no metrics.jsonl; give the folder of a run, such as outputs/debug_model")
    by_step: dict[int, dict[str, Any]] = {}
    restarts, faults = [], []
    try:
        content = file.read_bytes()
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror}")
    for number, text in enumerate(content.splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            print(
                f"{file}: line {number} is cut short, as by a kill, or no line of a run; passed over", file=sys.stderr
            )
            continue
        event = line.get("event")
        if event is None:
            by_step.setdefault(line["step"], {}).update(line)
        elif event == "start":
            if by_step:
                restarts.append(line["step"])
                by_step = {step: own for step, own in by_step.items() if step <= line["step"]}  # later ones are left
        else:
            faults.append((line["step"], event))
    if not by_step:
        fail(f"{file} has no step yet; wait for the first line of the log")
    return Run(file.parent.resolve().name, [by_step[step] for step in sorted(by_step)], restarts, faults)


def tokens_after(run: Run, steps: Sequence[float]) -> list[float]:
    """The tokens of ``run`` up to each of ``steps``, interpolated between its lines."""
    known = [(0, 0), *((line["step"], line["tokens"]) for line in run.lines if isinstance(line.get("tokens"), int))]
    return [float(tokens) for tokens in np.interp(steps, *zip(*known, strict=True))]


def draw(axes: Axes, run: Run, key: str, color: str, over: str) -> None:
    points = [(line["step"], line[key]) for line in run.lines if isinstance(line.get(key), (int, float))]
    steps, values = [step for step, _ in points], [value for _, value in points]

    def positions(steps: Sequence[float]) -> Sequence[float]:
        return tokens_after(run, steps) if over == "tokens" else steps

    marker = "." if len(points) == 1 else ""
    axes.plot(positions(steps), values, color=color, linewidth=1.6, label=run.name, marker=marker)
    for x in positions(run.restarts):
        axes.axvline(x, color=color, linewidth=1, linestyle=(0, (4, 3)), alpha=0.7)
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
    figure, grid = plt.subplots(2, 2, figsize=(12, 7.5), sharex=True, layout="constrained")
    for axes, (key, title) in zip(grid.flat, PANELS, strict=True):
        for run, color in zip(runs, (COLORS * len(runs))[: len(runs)], strict=True):
            draw(axes, run, key, color, over)
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
    handles, names = grid[0, 0].get_legend_handles_labels()
    if any(run.restarts for run in runs):
        handles.append(plt.Line2D([], [], color="#555555", linewidth=1, linestyle=(0, (4, 3))))
        names.append("restart")
    if any(run.faults for run in runs):
        handles.append(plt.Line2D([], [], color="#555555", marker="X", linestyle="", markeredgecolor="white"))
        names.append(", ".join(sorted({event.replace("_", " ") for run in runs for _, event in run.faults})))
    figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 6), frameon=False)
    figure.savefig(output, dpi=130)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves.png"), help="default: curves.png")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="what to plot over; default: step")
    arguments = parser.parse_args(argv)
    formats = Figure().canvas.get_supported_filetypes()
    if arguments.output.suffix[1:].lower() not in formats:
        fail(f"--output {arguments.output} must end in one of {', '.join(sorted(formats))}")
    if not arguments.output.absolute().parent.is_dir():
        fail(f"--output {arguments.output}: its folder does not exist")
    runs = [read_run(path) for path in arguments.runs]
    for run in runs if arguments.x == "tokens" else ():
        if not any("tokens" in line for line in run.lines):
            fail(f"--x tokens: {run.name} was trained by a version that did not write tokens; plot it over steps")
    try:
        plot(runs, arguments.output, arguments.x)
    except OSError as error:
        fail(f"--output {arguments.output} could not be written: {error.strerror}; free space, or name another file")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
