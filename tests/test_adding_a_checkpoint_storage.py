"""The code of docs/adding-a-checkpoint-storage.md, as a user's module: checkpoints in an SQLite database."""

import importlib
import re
import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from forked_run import ForkedRun, finish, logged_losses, slow_steps

from torchtrain.checkpoint.format import read_manifest, verify
from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.storage import CheckpointStorage, open_storage
from torchtrain.config.registry import CHECKPOINT_STORAGES
from torchtrain.errors import ConfigError, SupersededError

PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-checkpoint-storage.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(code)


def register_module_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of the page, which is also registered in this process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(CHECKPOINT_STORAGES, "_entries", dict(CHECKPOINT_STORAGES._entries))
    (tmp_path / "sqlite_storage.py").write_text(block("python"))
    monkeypatch.delitem(sys.modules, "sqlite_storage", raising=False)
    importlib.import_module("sqlite_storage")
    return tmp_path


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return register_module_of_the_page(tmp_path, monkeypatch)


def use_module_of(folder: Path, slow: bool = False) -> Any:
    sys.path.insert(0, str(folder))
    return slow_steps() if slow else None


def options_of_the_page(folder: Path) -> tuple[str, ...]:
    assert 'import = ["sqlite_storage"]' in block("toml")
    assert 'folder = "sqlite://checkpoints.db"' in block("toml")
    return ("--job.import", "sqlite_storage", "--checkpoint.folder", f"sqlite://{folder}/checkpoints.db")


def hashes(storage: CheckpointStorage, step: int) -> dict[str, Any]:
    """The hash of each tensor of a checkpoint, after all its files have been verified."""
    checkpoint = storage.open(step)
    manifest = read_manifest(checkpoint)
    verify(checkpoint, manifest.files)
    return {record.name: record.pieces for record in manifest.files if record.pieces}


def test_killed_run_in_the_database_ends_like_one_in_a_folder(module: Path, tmp_path: Path) -> None:
    finish(tmp_path / "local", "--training.steps", "10")
    folder, options = tmp_path / "run", options_of_the_page(tmp_path)
    storage = open_storage(options[-1])
    killed = ForkedRun(folder, *options, hook=partial(use_module_of, module, slow=True))
    killed.wait_for(lambda: 4 in storage.steps())
    killed.end()
    assert "resumed from" in finish(folder, *options, hook=partial(use_module_of, module))
    assert not (folder / "checkpoint").exists()
    assert storage.steps() == [2, 4, 6, 8]
    for step in (2, 8):
        assert hashes(storage, step) == hashes(LocalStorage(str(tmp_path / "local/checkpoint")), step)
    with sqlite3.connect(tmp_path / "checkpoints.db") as database:
        ids = {id for (id,) in database.execute("SELECT id FROM files")}
        assert ids == {id for (id,) in database.execute("SELECT id FROM checkpoints")}  # nothing is left of the kill

        # A flipped bit: the checkpoint before is loaded, the damaged one set aside.
        (content,) = database.execute("SELECT content FROM files WHERE file LIKE '__1%' AND id LIKE '8.%'").fetchone()
        changed = content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]
        database.execute("UPDATE files SET content = ? WHERE file LIKE '__1%' AND id LIKE '8.%'", (changed,))
    output = finish(folder, *options, "--training.steps", "10", hook=partial(use_module_of, module))
    assert f"resumed from {storage}/step-6" in output
    assert storage.steps() == [2, 4, 6, 8, 10]
    assert "step-8.damaged" in " ".join(storage.names())
    assert hashes(storage, 10) == hashes(LocalStorage(str(tmp_path / "local/checkpoint")), 10)
    assert logged_losses(folder) == logged_losses(tmp_path / "local")


def test_of_two_simultaneous_starts_one_wins(module: Path, tmp_path: Path) -> None:
    first, second = (open_storage(f"sqlite://{module}/checkpoints.db") for _ in range(2))
    lease = first.acquire_lease(None)
    first.check_lease(lease)
    before = second.read_lease()
    taken = first.acquire_lease(None)
    with pytest.raises(SupersededError, match="another start of this run has just acquired the lease"):
        second.write_lease(type(lease)(before.generation + 1, "late", before.run))
    first.check_lease(taken)
    with pytest.raises(SupersededError, match=r"generation 2 of this run, on .* now saves to sqlite://.*generation 1"):
        second.check_lease(lease)
    assert tmp_path == module


def test_unknown_scheme_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"the scheme of checkpoint.folder = 'absent' must be one of 'file'"):
        CheckpointConfig(folder="absent://bucket/run")
