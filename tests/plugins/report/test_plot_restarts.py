"""Plots leave out the steps that a run has repeated."""

import importlib.util
from pathlib import Path

from test_plot import numbers, write_run

ROOT = Path(__file__).parents[3]


def test_plot_leaves_out_steps_before_a_restart_from_scratch(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("plot", ROOT / "scripts" / "plot.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    start = {"step": 0, "event": "start"}
    run = write_run(tmp_path / "run", [start, *(numbers(n, 8.0) for n in (1, 2, 3)), start, numbers(1, 9.0)])
    assert [(line["step"], line["loss"]) for line in script.read_run(run).lines] == [(1, 9.0)]
