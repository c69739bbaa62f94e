"""Plot the loads of experts in runs: plot_experts.py PICTURE RUN [RUN ...]

RUN is "TITLE=FOLDER". A line is the load of one expert number, the mean over layers; the band is from the least to the
most loaded expert of any layer. 1 is a perfect balance.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

from torchtrain.plugins.report.curves import COLORS


def main(picture: str, *runs: str) -> None:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, runs, strict=True):
        title, _, folder = run.rpartition("=")
        text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if "experts/load_0" in line]
        steps = [line["step"] for line in lines]
        least, most = ([line[f"experts/load_{name}"] for line in lines] for name in ("min", "max"))
        axes.fill_between(steps, least, most, color="#eeeeee")
        numbers = sum(key.removeprefix("experts/load_").isdecimal() for key in lines[0])
        for number in range(numbers):
            loads = [line[f"experts/load_{number}"] for line in lines]
            axes.plot(steps, loads, color=COLORS[number % len(COLORS)], linewidth=1.4)
        axes.axhline(1, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("load, relative to the mean")
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
