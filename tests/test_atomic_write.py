"""Atomic writes: temporary names, links that others have created, leftovers of killed processes, unusable folders."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_run import ForkedRun

from torchtrain import files
from torchtrain.checkpoint.local_storage import LocalNewCheckpoint
from torchtrain.datasets.cache_folder import locked
from torchtrain.datasets.tokenize_text import alone
from torchtrain.errors import ConfigError
from torchtrain.files import PARTIAL_SUFFIX, atomic_write


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("of another user")
    return path


@pytest.mark.parametrize("kind", ["symlink", "hard link", "dangling"])
def test_partial_file_is_not_written_through_a_link(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = tmp_path / "config.toml"
    # Links at two names: one with the process id, and the random one, which nobody can predict.
    monkeypatch.setattr(files, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0123456789")))
    for name in (os.getpid(), "01234567"):
        link = tmp_path / f"config.toml.{name}{PARTIAL_SUFFIX}"
        if kind == "hard link":
            os.link(secret, link)
        else:
            link.symlink_to(secret if kind == "symlink" else tmp_path / "nothing")
    with pytest.raises(FileExistsError), atomic_write(file) as output:
        output.write(b"ours")
    monkeypatch.undo()
    with atomic_write(file) as output:
        output.write(b"ours")
    assert file.read_bytes() == b"ours"
    assert secret.read_text() == "of another user"
    assert not (tmp_path / "nothing").exists()


def test_checkpoint_file_is_not_written_through_a_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to(secret)
    with pytest.raises(FileExistsError):
        LocalNewCheckpoint(tmp_path / "step-1", tmp_path).create("__0_0.distcp")
    assert secret.read_text() == "of another user"


@pytest.mark.parametrize("kind", ["symlink", "dangling", "pipe", "folder"])
def test_lock_file_that_is_not_a_regular_file_raises_a_config_error(tmp_path: Path, secret: Path, kind: str) -> None:
    lock = tmp_path / "tokens" / ".lock"
    lock.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(secret if kind == "symlink" else tmp_path / "nothing")
    for locking in (alone(lock.parent, is_shared=False), locked(lock)):
        with pytest.raises(ConfigError, match=r"tokens/\.lock must be a regular file.*remove it"), locking:
            pass
    assert secret.read_text() == "of another user"
    assert not (tmp_path / "nothing").exists()


def test_content_of_a_lock_file_is_kept(tmp_path: Path) -> None:
    lock = tmp_path / "tokens/.lock"
    lock.parent.mkdir()
    lock.write_text("content")
    for locking in (alone(lock.parent, is_shared=False), locked(lock)):
        with locking:
            assert lock.read_text() == "content"
    assert lock.read_text() == "content"


def test_checkpoint_folder_that_is_a_dangling_link(tmp_path: Path) -> None:
    for number, (name, link) in enumerate((("run", "run/checkpoint"), ("away", "away"))):
        parent = tmp_path / str(number)
        (parent / link).parent.mkdir(parents=True, exist_ok=True)
        (parent / link).symlink_to("/mnt/scratch/not mounted")
        run = ForkedRun(parent / "log", "--job.dump_folder", str(parent / name), ranks=1)
        assert run.wait() == [2], run.output()
        (error,) = [line for line in run.output().splitlines() if "error:" in line]
        assert f"{parent / link} is a link to '/mnt/scratch/not mounted', which does not exist" in error
        assert "Traceback" not in run.output()


def test_checkpoint_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").write_text("")
    run = ForkedRun(tmp_path / "run", ranks=1)
    assert run.wait() == [2], run.output()
    assert f"{tmp_path}/run/checkpoint cannot be used: File exists; name another folder" in run.output()
