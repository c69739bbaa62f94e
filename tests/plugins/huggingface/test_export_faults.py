"""Exports at the end of a run that is stopped or killed."""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from forked_run import (
    ForkedRun,
    finish,
)
from test_faults import resume_after_interrupted_validations
from test_validation import options_of_little_data

from torchtrain.checkpoint.local_storage import saved_steps
from torchtrain.errors import StoppedError


@contextmanager
def slow_export() -> Any:
    """Rank 0's export takes until the file ``end_export`` is in the dump folder."""
    from torchtrain.plugins.huggingface import export

    save = export.save_hf

    def save_slowly(tensors: Any, folder: Path, *args: Any, **options: Any) -> None:
        if os.environ["RANK"] == "0":
            (folder.parent / "exporting").touch()
            while not (folder.parent / "end_export").exists():
                time.sleep(0.02)
        save(tensors, folder, *args, **options)

    with patch.object(export, "save_hf", save_slowly):
        yield


def test_stop_during_the_export_waits_for_it_or_leaves_it_to_the_next_start(tmp_path: Path) -> None:
    options = ["--training.steps", "2", "--huggingface.export"]
    run = ForkedRun(tmp_path, *options, "--faults.stop_grace_seconds", "1", hook=slow_export)
    run.wait_for((tmp_path / "exporting").exists)
    run.kill(number=signal.SIGTERM)
    assert run.wait() == [StoppedError.exit_code] * 2, run.output()
    output = run.output()
    assert output.count("SIGTERM received: completing the export to hf/, for which 1 s are left; a second signal") == 1
    assert output.count("the export to hf/ exceeds the grace period: start the run again to export") == 1
    assert "Traceback" not in output
    assert "stopping before the next step" not in output
    assert saved_steps(tmp_path / "checkpoint") == [2]

    (tmp_path / "exporting").unlink()
    run = ForkedRun(tmp_path, *options, hook=slow_export)
    run.wait_for((tmp_path / "exporting").exists)
    run.kill(number=signal.SIGTERM)
    run.wait_for(lambda: "completing the export" in run.output())
    (tmp_path / "end_export").touch()
    assert run.wait() == [0, 0], run.output()
    assert f"wrote {tmp_path}/hf" in run.output()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("hf")) == ["hf", "hf_made_from.json"]
    assert "the run is complete" in finish(tmp_path, *options, ranks=1)


@pytest.mark.slow  # test_faults.py interrupts validations, and the test above an export
def test_interrupted_validation_and_export_are_repeated_on_resume(tmp_path: Path) -> None:
    """The validation after a saved step, and the export of the last step."""
    folder, options = resume_after_interrupted_validations(tmp_path, "--huggingface.export")
    (ours,), (theirs,) = (list(f.glob("hf/*.safetensors")) for f in (folder, tmp_path / "reference"))
    ours_before = ours.read_bytes()
    assert ours_before == theirs.read_bytes()
    before = (folder / "hf").stat()
    assert "the run is complete" in finish(folder, *options, ranks=1)
    assert before == (folder / "hf").stat()
    assert "wrote" in finish(folder, *options, "--huggingface.export_dtype", "float32", ranks=1)
    assert next(folder.glob("hf/*.safetensors")).stat().st_size > 1.9 * len(ours_before)


def test_run_that_ends_with_its_data_is_exported_once(tmp_path: Path) -> None:
    options = [*options_of_little_data(tmp_path), "--huggingface.export"]
    assert "the data end" in finish(tmp_path / "run", *options, ranks=2)
    hf = (tmp_path / "run/hf").stat()
    finish(tmp_path / "run", *options, ranks=1)  # nothing is left to do
    assert (tmp_path / "run/hf").stat().st_ino == hf.st_ino
    assert ForkedRun(tmp_path / "none", *options, "--training.global_batch_size", "64", ranks=1).wait() == [2]
    assert not (tmp_path / "none/hf").exists()
