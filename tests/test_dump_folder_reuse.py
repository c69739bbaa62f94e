"""Reuse of a dump folder: another run renames the files of the previous one, a resumed run appends to its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_run import ForkedRun, finish, patched_loss

from torchtrain.config.registry import METRICS_WRITERS
from torchtrain.metrics.writers import numbered, rename_files_of_other_run

OFF = ("--checkpoint.no-enable", "--metrics.enable_tensorboard", "--training.steps")
ON = ("--checkpoint.interval", "1000", "--metrics.enable_tensorboard", "--training.steps")


def events(file: Path) -> list[int | str]:
    """Return the logged steps and the names of events, such as "start"."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line.get("event", line["step"]) for line in lines]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"test.toml", "rank-0.log", "checkpoint"}


def names_of_run(number: int | None) -> set[str]:
    return {numbered(name, number or 0) for name in ("config.toml", "metrics.jsonl", "tensorboard")}


def test_each_run_in_a_folder_has_its_own_files(tmp_path: Path) -> None:
    finish(tmp_path, *OFF, "3", "--training.seed", "7", ranks=1)
    first = (tmp_path / "metrics.jsonl").read_bytes()
    (events_file,) = (tmp_path / "tensorboard").iterdir()
    shown = events_file.read_bytes()
    output = finish(tmp_path, *OFF, "2", ranks=1)  # another run without checkpoints
    assert "files of another run: they are renamed to config.1.toml, metrics.1.jsonl, tensorboard.1" in output
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == first
    assert "seed = 7" in (tmp_path / "config.1.toml").read_text()
    assert [path.read_bytes() for path in (tmp_path / "tensorboard.1").iterdir()] == [shown]
    assert events(tmp_path / "metrics.jsonl") == ["start", 1, 2]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert files(tmp_path) == names_of_run(None) | names_of_run(1)

    finish(tmp_path, *ON, "2", ranks=1)  # a run with checkpoints, which is resumed
    finish(tmp_path, *ON, "4", ranks=1)
    assert events(tmp_path / "metrics.jsonl") == ["start", 1, 2, "start", 3, 4]
    assert files(tmp_path) == names_of_run(None) | names_of_run(1) | names_of_run(2)

    finish(tmp_path, *OFF, "1", ranks=1)  # it is resumed again after another run
    assert events(tmp_path / "metrics.3.jsonl") == ["start", 1, 2, "start", 3, 4]
    finish(tmp_path, *ON, "5", ranks=1)
    assert events(tmp_path / "metrics.4.jsonl") == ["start", 1]
    assert events(tmp_path / "metrics.jsonl") == ["start", 1, 2, "start", 3, 4, "start", 5]


def nan_in_step_3() -> Any:
    return patched_loss(lambda call, loss: loss * float("nan") if call > 2 * 4 else loss)


def test_run_that_ended_before_its_first_checkpoint_keeps_its_files(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, *ON, "4", "--faults.on_nonfinite", "stop", ranks=1, hook=nan_in_step_3)
    assert run.wait() == [2]
    finish(tmp_path, *ON, "4", ranks=1)
    assert not (tmp_path / "metrics.1.jsonl").exists()
    assert events(tmp_path / "metrics.jsonl").count("start") == 2


@pytest.mark.parametrize("changed", ["data", pytest.param("options", marks=pytest.mark.slow)])
def test_files_of_another_run_that_saved_no_checkpoint_are_renamed(tmp_path: Path, changed: str) -> None:
    """Also where the other run differs only in the content of its data files."""
    text = tmp_path / "texts" / "text.txt"
    text.parent.mkdir()
    text.write_text("Many words. " * 2000)
    data = ("--data.path", str(text))
    run = ForkedRun(tmp_path, *ON, "4", *data, "--faults.on_nonfinite", "stop", ranks=1, hook=nan_in_step_3)
    assert run.wait() == [2]
    first = (tmp_path / "metrics.jsonl").read_bytes()
    if changed == "data":
        text.write_text("Other words. " * 2000)
    seed = "1" if changed == "options" else "0"
    output = finish(tmp_path, *ON, "4", *data, "--training.seed", seed, ranks=1)
    assert "files of another run: they are renamed to config.1.toml, metrics.1.jsonl" in output
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == first
    assert events(tmp_path / "metrics.jsonl") == ["start", 1, 2, 3, 4]
    assert "starts" not in output
    finish(tmp_path, *ON, "5", *data, "--training.seed", seed, ranks=1)  # this run has a checkpoint
    assert events(tmp_path / "metrics.jsonl") == ["start", 1, 2, 3, 4, "start", 5]


@pytest.mark.parametrize("resumed", [True, False])
def test_files_without_a_run_id_belong_to_the_run_if_it_resumes(tmp_path: Path, resumed: bool) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "event": "start"}\n{"step": 1, "loss": 2.0}\n{"step": 2, "ev')
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces.11").write_text("older")
    (tmp_path / "notes.13.md").write_text("of a user")
    (tmp_path / "tensorboard").mkdir()
    rename_files_of_other_run(tmp_path, "x", resumed)
    kept = {"metrics.jsonl", "traces", "tensorboard"}
    others = {"traces.11", "notes.13.md"}
    assert files(tmp_path) == others | (kept if resumed else {numbered(name, 12) for name in kept})
    rename_files_of_other_run(tmp_path / "new", "x", resumed)
    assert not (tmp_path / "new").exists()


def test_writer_that_cannot_be_imported_does_not_keep_files_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS_WRITERS._entries, "broken", "package_that_is_missing:Writer")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "start", "step": 0, "run": "a"}) + "\n")
    rename_files_of_other_run(tmp_path, "b", resumed=False)
    assert files(tmp_path) == {"metrics.1.jsonl"}
