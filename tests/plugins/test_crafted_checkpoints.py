"""Commands that read a checkpoint made by someone who means harm print one line."""

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from test_damaged_checkpoints import CHANGES

from torchtrain import convert, generate


@pytest.mark.parametrize(
    "change",
    [
        *("manifest names '/dev/zero'", "pipe", "link outside", "index is b''", "no dtype"),
        *("no chunks", "a name with an escape sequence", "config is b'garbage \\x1b[31'"),
    ],
)
def test_commands_report_a_crafted_checkpoint_in_one_line(
    trained_run: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(trained_run / "checkpoint", folder)
    shutil.copytree(folder / "step-8", folder / "step-2", dirs_exist_ok=True)
    CHANGES[change](folder / "step-8")
    for command, options in (
        (generate.main, [str(folder / "step-8"), "--prompt", "a"]),
        (convert.main, [str(folder / "step-8"), str(tmp_path / "out")]),
    ):
        assert command(options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "error: " in line
        assert line.isprintable()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert not list(tmp_path.glob("out*"))
