"""W&B shows the losses of metrics.jsonl after a rollback, and after a resume with other options."""

import time
from pathlib import Path

import pytest
from test_metrics import CONFIG
from wandb_records import wandb_records

from torchtrain.metrics.history import read_run
from torchtrain.metrics.options import MetricsConfig
from torchtrain.metrics.writers import Writers, changes_steps


def wandb_losses(folder: Path) -> list[dict[int, float]]:
    """The losses by step of each W&B run in ``folder``, in the order in which they began."""
    from wandb.proto import wandb_internal_pb2

    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        losses: dict[int, float] = {}
        for content in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss/average" in values:
                losses[int(values["_step"])] = float(values["loss/average"])
        runs.append(losses)
    return runs


def written(folder: Path, last: dict[int, float]) -> list[dict[int, float]]:
    """The losses by W&B run, when the last one has those of ``last``; W&B's own process may write them late."""
    deadline = time.monotonic() + 30
    while (found := wandb_losses(folder))[-1] != last:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def open_writers(folder: Path, start_step: int, options: str) -> Writers:
    undone = changes_steps(folder / "metrics.jsonl", start_step, options)
    config = MetricsConfig(enable_tensorboard=False, writers=("wandb",))
    writers = Writers(config, folder, CONFIG, start_step, "run", undone)
    writers.write({"step": start_step, "event": "start", "options": options, "run": "run"})
    return writers


def test_wandb_has_the_losses_of_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback, after a resume with the same options, and after one with others."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "wandb_id").touch()  # empty, as after a write to a full disk
    writers = open_writers(folder, 0, "a")
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0)):
        writers.write({"step": step, "loss": loss})
    writers.undo(1)
    for step, loss in ((2, 4.0), (3, 7.0)):
        writers.write({"step": step, "loss": loss})
    writers.close()
    assert written(folder, {1: 5.0, 2: 4.0, 3: 7.0})[:-1] == [{1: 5.0, 2: 4.0, 3: 9.0}]
    newest = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert b"training.steps" in newest.read_bytes()
    assert (folder / "wandb_id").read_text() in newest.name
    for options in ("a", "b"):
        writers = open_writers(folder, 2, options)
        writers.write({"step": 3, "loss": 7.0 if options == "a" else 2.0})
        writers.close()
    written(folder, {1: 5.0, 2: 4.0, 3: 2.0})
    assert {line["step"]: line["loss"] for line in read_run(folder).lines} == {1: 5.0, 2: 4.0, 3: 2.0}
