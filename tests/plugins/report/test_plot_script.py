"""scripts/plot.py: steps that a run repeated, invalid lines and invalid output files."""

import importlib.util
import json
from pathlib import Path
from subprocess import CompletedProcess

from forked_command import run_command
from test_plot import numbers, write_run

ROOT = Path(__file__).parents[3]


def test_plot_leaves_out_steps_before_a_restart_from_scratch(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("plot", ROOT / "scripts" / "plot.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    start = {"step": 0, "event": "start"}
    run = write_run(tmp_path / "run", [start, *(numbers(n, 8.0) for n in (1, 2, 3)), start, numbers(1, 9.0)])
    assert [(line["step"], line["loss"]) for line in script.read_run(run).lines] == [(1, 9.0)]


def test_plot_skips_invalid_lines_and_rejects_invalid_output_files(tmp_path: Path) -> None:
    good = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "tokens_per_second": 5.0, "memory_gib": 0.1}
    lines = [json.dumps(good), "[]", "null", '{"loss": 3}', '{"step": "two"}', '{"step": 2, "lo']
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")

    def draw(name: str) -> "CompletedProcess[str]":
        return run_command("scripts/plot.py", str(tmp_path), "-o", str(tmp_path / name))

    result = draw("curves.svg")
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 6
    for name, why in (("curves.xyz", "must end in one of"), ("nowhere/curves.png", "its folder does not exist")):
        failed = draw(name)
        assert (failed.returncode, len(failed.stderr.splitlines())) == (2, 1), failed.stderr
        assert why in failed.stderr
    (tmp_path / "full.png").symlink_to("/dev/full")
    failed = draw("full.png")
    assert (failed.returncode, failed.stderr.splitlines()[6:]) == (
        2,
        [
            f"error: --output {tmp_path}/full.png could not be written: No space left on device; free space, or name "
            "another file"
        ],
    )
