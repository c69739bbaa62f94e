"""scripts/first_hour.sh runs its parts on a CPU, and keeps the results of a run that is cut short."""

import json
import os
import re
import subprocess
from pathlib import Path

import gpu_parts
import pytest
from gpu_parts import Part

ROOT = Path(__file__).parents[2]
PARTS = ["machine", "steps", "documents", "benchmark", "experts", "grains", "tests", "configs", "models"]


@pytest.mark.parametrize(
    "parts", [["machine", "tests", "models"], pytest.param(PARTS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_dry_run_writes_the_results_of_each_part(
    forked_ranks: dict[str, str], tmp_path: Path, parts: list[str]
) -> None:
    environment = {"PYTHON": forked_ranks["PYTHON_EXEC"], "OUT": str(tmp_path), "WHEELS": "", "OMP_NUM_THREADS": "1"}
    environment["PYTEST_ADDOPTS"] = "--assert=plain"  # the forked process has already imported modules of plugins
    command = ["bash", "scripts/first_hour.sh", "--dry-run", "--only", *parts]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, text=True, capture_output=True)
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert result.returncode == 0, summary + result.stderr
    rows = {
        name: (outcome, cell)
        for name, outcome, cell in re.findall(r"^\| (\w+) \| (.*?) \| \d+ \| (.*) \|$", summary, re.M)
    }
    assert list(rows) == PARTS
    assert {name: outcome for name, (outcome, _) in rows.items()} == {
        name: "pass" if name in parts else "not run" for name in PARTS
    }
    assert "tests collected" in rows["tests"][1]
    step = r"[\d,]+ tokens/s, [\d.]+ GiB \(planned [\d,]+, [\d.]+, [\d.]+\)"
    assert re.fullmatch(f"8B-selective: {step}", rows["models"][1])
    calibration = json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))
    assert {row["kind"] for row in calibration["rows"]} == {"memory", "launch", "product", "attention"}
    files = {"summary.md", "parts.json", "calibration.json", *(f"{part}.txt" for part in parts)}
    if parts == PARTS:
        files.add("compiled-profile.tar")
        assert rows["configs"][1].startswith("loss: identical in 10 steps up to step ")
        assert re.fullmatch(f"compiled: {step}; eager: {step}", rows["steps"][1])
        first = r"; first step: whole-sequences [\d.]+ s, masked [\d.]+ s"
        assert re.fullmatch(f"whole-sequences: {step}; masked: {step}{first}", rows["documents"][1])
        assert rows["experts"][1].startswith("loss: identical in 5 steps ")
        assert re.fullmatch(
            r"step of [\d.]+ s, times exact .*; the same bits in 8 steps of a second run", rows["grains"][1]
        )
        assert [row["planned"]["fits"] for row in calibration["steps"]] == [True, True]
        assert "tokens/s" in rows["benchmark"][1]
    assert [row["planned"]["fits"] for row in calibration["models"]] == [True]
    assert {path.name for path in tmp_path.iterdir()} == files


def test_a_part_ends_at_its_time_limit_or_at_a_command_that_fails(tmp_path: Path) -> None:
    hanging = Part("hanging", 1, [["sh", "-c", "echo begun; sleep 60 & wait"], ["echo", "later"]])
    failing = Part("failing", 9, [["sh", "-c", "exit 3"], ["echo", "later"]])
    missing = Part("missing", 9, [["no-such-program"]], figures=lambda output: output[99])
    for part in (hanging, failing, missing):
        part.run(tmp_path)
    assert hanging.result == "FAIL (time limit)"
    assert hanging.seconds < 30
    assert failing.result == "FAIL (exit code 3)"
    assert missing.result.startswith("FAIL ([Errno 2]")
    assert missing.cell.startswith("no figures: IndexError")
    assert "begun" in (tmp_path / "hanging.txt").read_text()
    for name in ("hanging", "failing"):
        assert "$ echo later" not in (tmp_path / f"{name}.txt").read_text()
    assert "| failing | FAIL (exit code 3) | 0 |  |" in gpu_parts.summary("", [hanging, failing])


def test_results_are_limited_in_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "MAX_BYTES", 10)
    part = Part("long", 9, [["echo", "the last line"]], lambda out: (out / "trace.gz").write_bytes(bytes(11)))
    part.run(tmp_path)
    assert (tmp_path / "long.txt").read_text() == "last line\n"
    assert not (tmp_path / "trace.gz").exists()
