"""Preparing data on a local Ray cluster."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from data_samples import DOCUMENTS, write_jsonl
from forked_command import checked_command

pytest.importorskip("ray")

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_tasks_write_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", [text * 300 for text in DOCUMENTS])  # 1.2 MB, in several shards
    checked_command("torchtrain.prepare", "--data.path", texts, "--prepare.output", str(tmp_path / "alone"))
    command = [sys.executable, "scripts/prepare_ray.py", "--tasks", "3", "--"]
    options = ["--data.path", texts, "--prepare.output", str(tmp_path / "ray")]
    # Ray's own limit for its start is 30 s, and it would store a token in the home folder.
    environment = {**os.environ, "RAY_raylet_start_wait_time_s": "200", "RAY_AUTH_MODE": "disabled"}
    run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=250)
    result = run([*command, *options])
    assert result.returncode == 0, result.stdout + result.stderr

    def contents(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.name != ".lock"}

    assert len(contents("alone")) > 6
    assert contents("ray") == contents("alone")
    failed = run([*command, *options, "--data.path", str(tmp_path / "missing.jsonl")])
    assert failed.returncode != 0
    assert "ended with exit code 2" in failed.stderr
