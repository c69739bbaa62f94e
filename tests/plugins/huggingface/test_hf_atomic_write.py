"""Exports and conversions to Hugging Face's files are atomic."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_command import run_command, start_command
from parity import TINY
from plugin_rank_functions import export

from torchtrain.distributed.connections import gloo_backend
from torchtrain.models.llama import Transformer


def hang_while_converting() -> None:
    from torchtrain.plugins.huggingface import conversion

    def wait(*_: object) -> None:
        time.sleep(600)

    conversion.finite = wait  # type: ignore[assignment]
    from torchtrain.plugins.huggingface import safetensors_folder

    safetensors_folder.finite = wait  # type: ignore[assignment]


@pytest.mark.parametrize("to", ["hf", "torchtrain"])
def test_leftovers_of_a_killed_convert_are_removed_by_the_next(trained_run: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "folder/out"
    (tmp_path / "logs").mkdir()
    arguments = ("torchtrain.convert", str(trained_run), str(out), "--to", to)
    (process,), files = start_command(tmp_path / "logs", *arguments, hook=hang_while_converting)
    deadline = time.monotonic() + 100
    while not list(out.parent.glob("out.*.partial")):
        assert process.is_alive(), files[1].read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    assert list(out.parent.glob("out.*.partial"))
    found = run_command(*arguments)
    assert found.returncode == 0, found.stderr
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_old_export_is_complete_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, complete = os.rename, []

    def recorded(source: object, target: object, **options: object) -> None:
        rename(source, target, **options)  # type: ignore[arg-type,call-overload]
        complete.append([path.name for path in tmp_path.iterdir() if (path / "config.json").exists()])

    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torchtrain.checkpoint.states import ModelState
        from torchtrain.plugins.huggingface.safetensors_folder import save_hf

        model = Transformer(TINY)
        export(model, tmp_path / "hf")
        monkeypatch.setattr(os, "rename", recorded)
        save_hf(ModelState([model]).state_dict(), tmp_path / "hf", TINY, "float32", "", replace_old=True)
    finally:
        dist.destroy_process_group()
    assert [names for names in complete if not names] == []
    assert [len(names) for names in complete[-2:]] == [2, 2]  # the old export is removed last
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_conversion_to_a_dangling_link_is_rejected_before_converting(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    found = run_command("torchtrain.convert", str(trained_run), str(tmp_path / "out"))
    assert found.returncode == 2
    assert f"{tmp_path}/out exists; give a folder that does not" in found.stderr
