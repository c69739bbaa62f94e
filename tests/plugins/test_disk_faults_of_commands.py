"""Disk faults in commands of plugins, and in exports."""

import errno
import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from disk_faults import DiskFaults
from forked_command import run_command
from forked_run import TINY
from gloo_pool import GlooPool
from test_disk_faults import check_errors_of_a_path, run_ends_with, use_short_retry_delays

from torchtrain import convert, generate
from torchtrain.checkpoint.local_storage import saved_steps
from torchtrain.distributed.connections import gloo_backend


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_generate_reports_a_full_disk(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.jsonl").symlink_to("/dev/full")
    options = ["--prompt", "a", "--max_new_tokens", "1", "--output_file", str(tmp_path / "out.jsonl")]
    assert generate.main([str(trained_run), *options]) == 2
    dist.destroy_process_group()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("out.jsonl' could not be written: No space left on device; free space, or name another file")


def test_unreadable_hugging_face_weights_are_not_reported_as_missing(disk: DiskFaults, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from torchtrain.plugins.huggingface.safetensors_folder import write_hf_config

    write_hf_config(tmp_path, TINY, "float32", "")
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    disk.fail("open", tmp_path / "model.safetensors", errno.EACCES)
    found = run_command("torchtrain.convert", str(tmp_path), str(tmp_path / "out"), hook=use_short_retry_delays)
    assert found.returncode == 2
    assert "model.safetensors cannot be read: Permission denied, in 4 attempts" in found.stderr


def convert_on_this_rank(source: Path, target: Path, to: str) -> tuple[int, str]:
    dist.destroy_process_group()  # the pool's group: the command initializes its own
    errors = io.StringIO()
    with redirect_stderr(errors), patch.dict(os.environ):
        os.environ.pop("RANK", None)
        code = convert.main([str(source), str(target), "--to", to])
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    return code, errors.getvalue()


@pytest.mark.parametrize("to", ["hf", pytest.param("torchtrain", marks=pytest.mark.slow)])
def test_conversion_to_a_full_disk_leaves_no_files(
    gloo: GlooPool, disk: DiskFaults, trained_run: Path, tmp_path: Path, to: str
) -> None:
    disk.fail("write", f"{tmp_path}/*", errno.ENOSPC)
    ((code, errors),) = gloo.run(1, convert_on_this_rank, trained_run, tmp_path / "out", to)
    assert code == 2
    assert "out could not be written" in errors
    assert len(errors.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_failed_export_keeps_the_checkpoints(disk: DiskFaults, tmp_path: Path) -> None:
    disk.fail("write", f"{tmp_path}/hf*", errno.ENOSPC)
    output = run_ends_with(2, tmp_path, "--huggingface.export", "--training.steps", "2", ranks=1)
    assert "hf could not be written" in output
    assert "Traceback" not in output
    assert saved_steps(tmp_path / "checkpoint") == [2]
    assert not list(tmp_path.glob("hf*"))


@pytest.mark.parametrize(("error", "code"), [pytest.param(errno.EACCES, 2, marks=pytest.mark.slow), (errno.EIO, 74)])
def test_every_command_reports_a_path_that_cannot_be_accessed(
    disk: DiskFaults, tmp_path: Path, error: int, code: int
) -> None:
    path = tmp_path / "shut"
    disk.fail("stat", f"{path}*", error)
    commands = [
        ["generate", path, "--prompt", "a"],
        ["convert", path, tmp_path / "out"],
        ["estimate", "--model.tokenizer_path", path],
        ["compare", path, tmp_path],
    ]
    check_errors_of_a_path(path, commands, error, code)
