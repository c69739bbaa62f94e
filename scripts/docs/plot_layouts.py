"""Plot validation losses, and their differences to those of the first run: plot_layouts.py PICTURE RUN [RUN ...]"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from torchtrain.metrics.history import read_run
from torchtrain.plugins.report.curves import COLORS, points_of

MARKERS = "osD^v"


def main(picture: str, *folders: str) -> None:
    runs = [read_run(Path(folder)) for folder in folders]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    losses.set_title("Validation loss (nats per token)", loc="left", fontsize=11)
    differences.set_title("Difference to one rank (millionths)", loc="left", fontsize=11)
    _, reference = points_of(runs[0], "validation_loss")
    for number, run in enumerate(runs):
        steps, values = points_of(run, "validation_loss")
        style = {"color": COLORS[number], "marker": MARKERS[number], "markersize": 5}
        # The curves coincide: each has its markers at other points.
        losses.plot(steps, values, label=run.name.replace("_", " "), markevery=(number, len(runs)), **style)
        millionths = [1e6 * (value - other) for value, other in zip(values, reference, strict=True)]
        differences.plot(steps, millionths, linewidth=1, **{**style, "markersize": 3.5})
        every = [abs(a - b) for a, b in zip(points_of(run, "loss")[1], points_of(runs[0], "loss")[1], strict=True)]
        print(f"{run.name}: validation {max(map(abs, millionths)):.3f}, training {1e6 * max(every):.3f} millionths")
    for axes in (losses, differences):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(frameon=False)
    largest = max(1.0, *map(abs, differences.get_ylim()))
    differences.set_ylim(-largest, largest)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
