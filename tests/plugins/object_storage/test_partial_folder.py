"""Folders that are written under another name: those of other processes, and of killed ones."""

import fcntl
from pathlib import Path

import pytest

from torchtrain.plugins.object_storage.partial_folder import partial_folder


def test_partial_folder_of_a_running_process_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("out.0123abcd", f"out.{'4' * 32}"):  # left by dead processes: of this version, and of earlier ones
        (tmp_path / f"{name}.partial").mkdir()
        (tmp_path / f"{name}.partial/model.safetensors").write_bytes(bytes(9))
    (tmp_path / "out.0123abcd.lock").touch()
    (tmp_path / "out.89abcdef.lock").touch()
    others = {"out.v2.0123abcd.partial", "out.partial", "about.0123abcd.partial"}
    for name in others:
        (tmp_path / name).mkdir()
    with partial_folder(target) as running:
        running.mkdir()
        (running / "model.safetensors").write_bytes(b"weights")
        with partial_folder(target) as second:
            assert {path.name for path in tmp_path.iterdir()} == {
                *others,
                running.name,
                *(path.with_suffix(".lock").name for path in (running, second)),
            }
        assert (running / "model.safetensors").read_bytes() == b"weights"
        running.rename(target)
    assert {path.name for path in tmp_path.iterdir()} == {*others, "out"}


def test_partial_folder_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with partial_folder(tmp_path / "out") as running:
        running.mkdir()
        with partial_folder(tmp_path / "out"):
            assert running.exists()  # whether its process runs is unknown, but it has a lock file
