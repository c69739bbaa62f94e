"""Atomic writes: temporary names, links that others have created, leftovers of killed processes, unusable folders."""

import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked_command import run_command, start_command
from forked_run import ForkedRun
from parity import TINY
from rank_functions import export

from torchtrain import files
from torchtrain.checkpoint.local_storage import LocalNewCheckpoint
from torchtrain.datasets.cache_folder import locked
from torchtrain.datasets.tokenize_text import alone
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import ConfigError
from torchtrain.files import PARTIAL_SUFFIX, atomic_write, partial_folder
from torchtrain.models.llama import Transformer
from torchtrain.plugins.comparison.fingerprints import FILE, StepFingerprints


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


def test_fingerprints_are_not_written_through_a_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / f"{FILE}.partial").symlink_to(secret)
    StepFingerprints({}, torch.zeros(1, 2, 3, dtype=torch.int32).numpy()).save(tmp_path)
    assert secret.read_text() == "of another user"
    assert (tmp_path / FILE).is_file()


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
        found = run_command("torchtrain.generate", str(parent / name), "--prompt", "a")
        assert found.returncode == 2
        assert f"{parent / link} is a link to '/mnt/scratch/not mounted', which does not exist" in found.stderr


def test_checkpoint_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").write_text("")
    run = ForkedRun(tmp_path / "run", ranks=1)
    assert run.wait() == [2], run.output()
    assert f"{tmp_path}/run/checkpoint cannot be used: File exists; name another folder" in run.output()


def test_conversion_to_a_dangling_link_is_rejected_before_converting(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    found = run_command("torchtrain.convert", str(trained_run), str(tmp_path / "out"))
    assert found.returncode == 2
    assert f"{tmp_path}/out exists; give a folder that does not" in found.stderr
