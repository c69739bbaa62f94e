"""torchtrain.prepare when its input fails or changes, when its disk is full, and when earlier work is damaged."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_samples import DOCUMENTS, TOKENIZER, write_jsonl
from disk_faults import DiskFaults
from forked_command import run_command

from torchtrain import prepare as command
from torchtrain.datasets import local_files, text_input, tokenize_text
from torchtrain.datasets.builtin_sources import Files
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.token_folder import MANIFEST, LocalFolder, TokenManifest
from torchtrain.datasets.tokenize_text import tokenize
from torchtrain.errors import DataError, StorageError
from torchtrain.files import hash_of


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1)
    monkeypatch.setattr(local_files, "_WHOLE_BYTES", 100)  # larger files are identified by three blocks
    monkeypatch.setattr(local_files, "_BLOCK_BYTES", 10)


def use_small_shards() -> None:
    """A hook: shards are as small as possible."""
    text_input.MIN_SHARD_BYTES = 1


@pytest.fixture
def source(tmp_path: Path) -> SourceConfig:
    return SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))


def share(source: SourceConfig, folder: Path, rank: int = 0, world_size: int = 1, verify_bytes: float = 0) -> bool:
    """Tokenize the share of a process as the command does; returns whether the manifest was written."""
    text = Files.open_text(source, SourceContext("data", TOKENIZER, verify_bytes=verify_bytes))
    folder.mkdir(exist_ok=True)
    manifest = tokenize(text, TOKENIZER, LocalFolder(folder), processes=1, rank=rank, world_size=world_size)
    return manifest is not None


def contents(folder: Path) -> dict[str, str]:
    """Hash of each file."""
    return {path.name: hash_of(path) for path in folder.iterdir() if path.name != ".lock"}


def change_a_byte(path: Path, text: bytes) -> None:
    """Change a byte in ``text``, but not the size and the times of the file."""
    content, stat = path.read_bytes(), path.stat()
    assert content.count(text) == 1
    path.write_bytes(content.replace(text, text.upper()))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("failures", [2, 99])
def test_errors_of_the_input_are_retried_and_then_a_storage_error(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    share(source, tmp_path / "whole")
    documents, left = text_input.documents_in_range, [failures]

    def fail(*arguments: Any) -> Iterator[str | None]:
        for text in documents(*arguments):
            yield text
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(text_input, "documents_in_range", fail)
    monkeypatch.setattr(tokenize_text, "PAUSES_SECONDS", (0, 0))
    if failures == 2:
        assert share(source, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    else:
        with pytest.raises(StorageError, match=r"a.jsonl cannot be read: Input/output error, in 3 attempts"):
            share(source, tmp_path / "out")


def test_input_that_changed_above_verify_gib_is_not_mixed_with_earlier_work(
    source: SourceConfig, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    before = local_files.identify([file], 0).text
    assert not share(source, tmp_path / "out", 0, 2)
    change_a_byte(file, b"document 0 ")  # of the first shard
    assert local_files.identify([file], 0).text == before
    with pytest.raises(DataError, match="content of its files has changed since"):
        share(source, tmp_path / "out", 0, 2)


def test_work_continues_with_another_verify_gib(source: SourceConfig, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert [share(source, folder, rank, 2, verify) for rank, verify in ((0, 0), (1, 1 << 30))] == [False, True]
    assert share(source, folder, verify_bytes=1 << 30)


def test_damaged_shards_are_written_again_by_their_process(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "out"
    share(source, whole)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_text, "_finish", lambda *_: "a manifest")  # killed before its end
        share(source, folder)
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    lost = folder / "shard-00003.tokens"  # of process 1 of 2
    lost.write_bytes(bytes(lost.stat().st_size))
    assert share(source, folder, 1, 2)
    assert contents(folder) == contents(whole)
    kept = {name: time for name, time in written.items() if name != lost.name}
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept


def test_column_without_text_in_a_part_of_a_file_only(tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", [5] * 20 + DOCUMENTS[:3]))
    assert share(source, tmp_path / "out")
    expected = [TOKENIZER.encode(text, bos=True, eos=True) for text in DOCUMENTS[:3]]
    manifest = TokenManifest.read(LocalFolder(tmp_path / "out"), "")
    assert sum(shard.tokens for shard in manifest.shards) == sum(map(len, expected))
    assert sum(shard.skipped for shard in manifest.shards) == 20
    numbers = SourceConfig(path=write_jsonl(tmp_path / "numbers.jsonl", [5] * 20))
    with pytest.raises(DataError, match=r"numbers.jsonl: the column 'text' \(text_column\) holds int, not text"):
        share(numbers, tmp_path / "numbers")
    with pytest.raises(DataError, match=r"it has no column 'other' \(text_column\); its columns are text, n"):
        share(SourceConfig(path=numbers.path, text_column="other"), tmp_path / "other")


def test_input_of_most_bytes_has_at_most_so_many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "MAX_SHARDS", 64)
    monkeypatch.setattr(text_input, "MAX_SHARD_BYTES", 10)
    assert len(text_input.split_files([64 * 10 + 63], [True])) == 64


def test_output_that_does_not_answer_is_a_storage_error(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(tokenize_text, "_write_shard", fail)
    with pytest.raises(StorageError, match=r"out cannot be written: Stale file handle\. What is complete is kept"):
        share(source, tmp_path / "out")


def test_file_of_another_process_is_not_replaced_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalFolder(tmp_path)

    def no_link(_: Path, target: Path) -> None:
        if target.name == "first.json":  # another process was faster
            target.write_bytes(b"other")
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_link)
    assert [folder.create(name, b"own") for name in ("first.json", "second.json")] == [False, True]
    assert [folder.read(name) for name in ("first.json", "second.json")] == [b"other", b"own"]


def test_output_by_a_file_url_is_a_local_folder(source: SourceConfig, tmp_path: Path) -> None:
    for output in (str(tmp_path / "path"), (tmp_path / "new/url").as_uri()):
        assert command.main(["--data.path", str(source.path), "--prepare.output", output]) == 0
    assert contents(tmp_path / "new/url") == contents(tmp_path / "path")


def test_second_of_two_processes_that_finish_at_once_accepts_the_manifest_of_the_first(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalFolder.write

    @contextmanager
    def write_after_another(folder: LocalFolder, name: str) -> Iterator[Any]:
        with write(folder, name) as file:
            yield file
        if name == MANIFEST:
            raise FileNotFoundError(errno.ENOENT, "its partial file was removed")

    monkeypatch.setattr(LocalFolder, "write", write_after_another)
    assert share(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / MANIFEST).read_bytes())["shard_count"] > 1


def test_second_run_of_many_processes_changes_nothing(source: SourceConfig, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert [share(source, folder, rank, 3) for rank in range(3)] == [False, False, True]
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert [share(source, folder, rank, 3) for rank in (2, 0, 1)] == [True, True, True]
    assert [share(source, folder, rank, 5) for rank in range(5)] == [True] * 5
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_command_resumes_after_a_full_disk(disk: DiskFaults, source: SourceConfig, tmp_path: Path) -> None:
    output = tmp_path / "out"
    options = ("torchtrain.prepare", "--data.path", str(source.path), "--prepare.output", str(output))
    options += ("--prepare.processes", "1")  # else it may fail before another process has written shard 2
    disk.fail("write", f"{output}/shard-00003*", errno.ENOSPC)
    for _ in range(2):
        result = run_command(*options, hook=use_small_shards)
        assert result.returncode == 2
        assert f"error: {output} cannot be written: No space left on device. Make room, or give it" in result.stderr
        assert "the same command continues from there" in result.stderr
        assert "Traceback" not in result.stderr
    assert (output / "shard-00002.json").exists()
    disk.heal()
    assert run_command(*options, hook=use_small_shards).returncode == 0
    share(source, tmp_path / "uninterrupted")
    for path in (tmp_path / "uninterrupted").glob("shard-*"):
        assert (output / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("world_size", [1, 2])
def test_disk_without_room_for_the_tokens_that_are_left_is_an_error_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """What is left is estimated from the complete shards, also those of other processes."""
    documents = [f"document {number:02}" + " words" * 50 for number in range(64)]
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", documents))
    folder, rank = tmp_path / "out", world_size - 1
    share(source, tmp_path / "whole")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").glob("shard-*")}
    whole = sum(sizes.values())
    if world_size == 2:  # the other one has written half of them
        share(source, folder, 0, 2)
    before = len(list(folder.glob("shard-*.json")))
    for number, free in enumerate((0.9 * whole / world_size, whole // 4), 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with pytest.raises(DataError, match=r"need about 0\.0 GiB more in .*/out, and its disk has 0\.0 GiB free\. M"):
            share(source, folder, rank, world_size)
        assert len(list(folder.glob("shard-*.json"))) == before + number
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.1 * whole / world_size))
    assert share(source, folder, rank, world_size)
    assert contents(folder) == contents(tmp_path / "whole")
