"""Plot the loss of a run whose layout changes: plot_layouts.py PICTURE ONE_RANK CHANGED

Exits with an error if a loss of the run CHANGED has other bits than that of the run ONE_RANK.
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from torchtrain.plugins.report.curves import COLORS

AXES = {"shard": "data", "context": "context", "tensor": "tensor", "pipeline": "pipeline"}
LOSSES = ("loss", "grad_norm", "validation_loss")


def lines_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def values(lines: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """The losses and gradient norms by name and step."""
    return {(name, line["step"]): line[name] for line in lines for name in LOSSES if name in line}


def name_of(layout: dict[str, int]) -> str:
    return ", ".join(f"{AXES.get(axis, axis)} {degree}" for axis, degree in layout.items()) or "one rank"


def main(picture: str, one_rank: str, changed: str) -> None:
    reference, lines = values(lines_of(one_rank)), lines_of(changed)
    found = values(lines)
    if found != reference:
        sys.exit(f"error: {[key for key in reference if found.get(key) != reference[key]]} have other bits")
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    axes = figure.subplots()
    whole = sorted((step, loss) for (name, step), loss in reference.items() if name == "loss")
    axes.plot(*zip(*whole, strict=True), color="#bbbbbb", linewidth=5, label="another run, on one rank", zorder=1)
    starts = [number for number, line in enumerate(lines) if line.get("event") == "start"]
    for number, (begin, end) in enumerate(zip(starts, [*starts[1:], len(lines)], strict=True)):
        own = [(line["step"], line["loss"]) for line in lines[begin:end] if "loss" in line]
        label = f"steps {own[0][0]} to {own[-1][0]}: {name_of(lines[begin]['layout'])}"
        if end < len(lines) and lines[end]["step"] < own[-1][0]:
            label += f", killed; resumed from step {lines[end]['step']}"
        axes.plot(*zip(*own, strict=True), color=COLORS[number], linewidth=1.6, label=label, zorder=2)
        axes.axvline(own[0][0], color=COLORS[number], linewidth=0.8, alpha=0.5)
    axes.set_title("One run whose layout changes: the training loss (nats per token)", loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=150)
    print(f"{len(reference)} losses and gradient norms have the same bits")


if __name__ == "__main__":
    main(*sys.argv[1:])
