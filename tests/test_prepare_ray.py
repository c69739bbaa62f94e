"""Preparing data on a local Ray cluster."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_samples import DOCUMENTS, write_jsonl
from forked_command import checked_command

ROOT = Path(__file__).parents[1]


class LocalRay:
    """The functions of ray that the script uses, which run each task at once."""

    class Task:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.remote = function

    def init(self, **_: object) -> None: ...

    def remote(self, **_: object) -> "type[LocalRay.Task]":
        return self.Task

    def get(self, results: Any) -> Any:
        return results


def test_last_task_requires_the_manifest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", LocalRay())
    script = runpy.run_path(str(ROOT / "scripts/prepare_ray.py"))
    started: list[list[str]] = []

    def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        started.append([env["RANK"], env["WORLD_SIZE"], *command[3:]])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    script["main"](["--tasks", "2", "--", "--prepare.output", "out"])
    options = ["--prepare.output", "out", "--prepare.processes", "1"]
    assert started == [["0", "2", *options], ["1", "2", *options], ["0", "1", *options]]
    with pytest.raises(SystemExit, match="2"):
        script["main"](["--tasks", "0"])
    assert "--tasks: must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_tasks_write_the_same_bytes_as_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray")
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
