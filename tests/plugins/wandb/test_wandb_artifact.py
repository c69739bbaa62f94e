"""The export of a run as an artifact in Weights & Biases, in its offline mode."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from forked_run import CONFIG, ForkedRun, finish
from wandb_records import wandb_records

pytest.importorskip("wandb.sdk")  # this folder is a module wandb, too
OPTIONS = ("--metrics.writers", "wandb", "--huggingface.export")


def config_in(folder: Path) -> tuple[str, ...]:
    """The options of a run whose config has ``log_export``."""
    file = folder / "run.toml"
    file.write_text(f"{CONFIG}\n[metrics.options.wandb]\nlog_export = true\n")
    return ("--job.config_file", str(file), *OPTIONS)


def offline() -> None:
    os.environ["WANDB_MODE"] = "offline"


def without_artifacts() -> None:
    import wandb

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no connection")

    offline()
    wandb.Artifact.add_dir = fail


def artifacts(folder: Path) -> list[tuple[str, Any]]:
    """The artifacts that were logged, each with the id of its W&B run."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "artifact":
                found.append((record.artifact.run_id, record.artifact))
    return found


def test_export_is_an_artifact_of_the_run(tmp_path: Path) -> None:
    folder, options = tmp_path / "my run", config_in(tmp_path)
    output = finish(folder, *options, "--training.steps", "2", ranks=1, hook=offline)
    assert "as the artifact my-run-hf" in output
    deadline = time.monotonic() + 30  # W&B's own process may write late
    while not artifacts(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ((run_id, artifact),) = artifacts(folder)
    assert run_id == (folder / "wandb_id").read_text()
    assert (artifact.name, artifact.type, set(artifact.aliases)) == ("my-run-hf", "model", {"latest", "step-2"})
    metadata = json.loads(artifact.metadata)
    assert (metadata["step"], metadata["dtype"], metadata["weights"]) == (2, "bfloat16", "trained")
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert files == {path.name: path for path in (folder / "hf").iterdir()}
    assert "config.json" in files

    finish(folder, *options, "--training.steps", "2", ranks=1, hook=offline)  # is complete
    assert len(artifacts(folder)) == 1


@pytest.mark.slow
def test_failure_does_not_end_the_run_and_the_next_start_logs_the_artifact(tmp_path: Path) -> None:
    options = (*config_in(tmp_path), "--training.steps", "2")
    output = finish(tmp_path, *options, ranks=1, hook=without_artifacts)
    assert "the artifact in Weights & Biases: no connection; training continues without it" in output
    assert (tmp_path / "hf/config.json").exists()
    exported = (tmp_path / "hf/config.json").stat().st_mtime_ns
    output = finish(tmp_path, *options, ranks=1, hook=offline)
    assert "as the artifact" in output
    assert (tmp_path / "hf/config.json").stat().st_mtime_ns == exported


def test_artifact_needs_an_export(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, *config_in(tmp_path), "--huggingface.export", "false", ranks=1, hook=offline)
    assert run.wait() == [2]
    assert "metrics.options.wandb.log_export = true needs an export to log: set huggingface.export" in run.output()
