"""torchtrain.prepare when its input fails or changes, and when earlier work was not flushed to disk."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from data_samples import DOCUMENTS, TOKENIZER, write_jsonl

from torchtrain import prepare as command
from torchtrain.config.schema import SourceConfig
from torchtrain.datasets import local_files
from torchtrain.errors import DataError, StorageError
from torchtrain.plugins.prepared_data import data_folder, input_splits, tokenize_dataset
from torchtrain.plugins.prepared_data.open_folder import open_folder
from torchtrain.plugins.prepared_data.tokenize_dataset import prepare
from torchtrain.plugins.prepared_data.tokenized import MANIFEST, PreparedManifest


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_splits, "MIN_SHARD_BYTES", 1)
    monkeypatch.setattr(local_files, "_WHOLE_BYTES", 100)  # larger files are identified by three blocks
    monkeypatch.setattr(local_files, "_BLOCK_BYTES", 10)


@pytest.fixture
def source(tmp_path: Path) -> SourceConfig:
    return SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))


def share(
    source: SourceConfig, folder: Path | str, rank: int = 0, world_size: int = 1, verify_bytes: float = 0
) -> bool:
    manifest = prepare(source, "data", "", folder, 1, verify_bytes, rank=rank, world_size=world_size)
    return manifest is not None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


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
    documents_of, left = input_splits.documents_of, [failures]

    def fail(*arguments: Any) -> Iterator[str | None]:
        for text in documents_of(*arguments):
            yield text
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.EIO, "Input/output error", str(arguments[0]))

    monkeypatch.setattr(input_splits, "documents_of", fail)
    monkeypatch.setattr(tokenize_dataset, "PAUSES_SECONDS", (0, 0))
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


def test_input_that_changes_while_it_is_read_raises_a_data_error(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents_of = input_splits.documents_of

    def touch(*arguments: Any) -> Iterator[str | None]:
        yield from documents_of(*arguments)
        os.utime(arguments[0], ns=(1, 1))

    monkeypatch.setattr(input_splits, "documents_of", touch)
    with pytest.raises(DataError, match=r"a.jsonl changed while it was prepared"):
        share(source, tmp_path / "out")


def test_text_file_that_changes_while_it_is_read_raises_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some words " * 50)
    run = tokenize_dataset._run

    def change_after(*arguments: Any) -> None:
        run(*arguments)
        os.utime(file, ns=(1, 1))

    monkeypatch.setattr(tokenize_dataset, "_run", change_after)
    with pytest.raises(DataError, match=r"a.txt changed while it was prepared"):
        share(SourceConfig(path=str(file)), tmp_path / "out")


def test_work_continues_with_another_verify_gib(source: SourceConfig, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert [share(source, folder, rank, 2, verify) for rank, verify in ((0, 0), (1, 1 << 30))] == [False, True]
    assert share(source, folder, verify_bytes=1 << 30)


def test_shards_that_were_not_flushed_are_verified_and_flushed_by_their_process(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "out"
    share(source, whole)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_dataset, "_finish", lambda *_, **__: "a manifest")  # killed before its end
        share(source, folder)
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    lost = folder / "shard-00003.tokens"  # of process 1 of 2
    lost.write_bytes(bytes(lost.stat().st_size))  # as after a power failure
    assert not share(source, folder, 0, 2)
    assert share(source, folder, 1, 2)
    assert contents(folder) == contents(whole)
    kept = {name: time for name, time in written.items() if name != lost.name}
    assert {name: (folder / name).stat().st_mtime_ns for name in kept} == kept


def test_column_without_text_in_a_part_of_a_file_only(tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", [5] * 20 + DOCUMENTS[:3]))
    assert share(source, tmp_path / "out")
    expected = [TOKENIZER.encode(text, bos=True, eos=True) for text in DOCUMENTS[:3]]
    manifest = PreparedManifest.read(open_folder(str(tmp_path / "out")), "")
    assert sum(shard.tokens for shard in manifest.shards) == sum(map(len, expected))
    assert sum(shard.skipped for shard in manifest.shards) == 20
    numbers = SourceConfig(path=write_jsonl(tmp_path / "numbers.jsonl", [5] * 20))
    with pytest.raises(DataError, match=r"numbers.jsonl: the column 'text' \(text_column\) holds int, not text"):
        share(numbers, tmp_path / "numbers")
    with pytest.raises(DataError, match=r"it has no column 'other' \(text_column\); its columns are text, n"):
        share(SourceConfig(path=numbers.path, text_column="other"), tmp_path / "other")


def test_input_of_most_bytes_has_at_most_so_many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_splits, "MAX_SHARDS", 64)
    monkeypatch.setattr(input_splits, "MAX_SHARD_BYTES", 10)
    assert len(input_splits.split_files([64 * 10 + 63], [True])) == 64


def test_output_that_does_not_answer_is_a_storage_error(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(tokenize_dataset, "_write_shard", fail)
    with pytest.raises(StorageError, match=r"out cannot be written: Stale file handle\. What is complete is kept"):
        share(source, tmp_path / "out")


def test_file_of_another_process_is_not_replaced_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(str(tmp_path))

    def no_link(_: Path, target: Path) -> None:
        if target.name == "first.json":  # another process was faster
            target.write_bytes(b"other")
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_link)
    assert [folder.create(name, b"own") for name in ("first.json", "second.json")] == [False, True]
    assert [folder.read(name) for name in ("first.json", "second.json")] == [b"other", b"own"]


def test_output_by_a_file_url_is_a_local_folder(source: SourceConfig, tmp_path: Path) -> None:
    share(source, tmp_path / "path")
    share(source, (tmp_path / "new/url").as_uri())
    assert contents(tmp_path / "new/url") == contents(tmp_path / "path")


def test_input_by_a_file_url_is_identified_by_its_content(tmp_path: Path) -> None:
    for name in ("one", "copy"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "a.jsonl", DOCUMENTS)
    os.utime(tmp_path / "copy/a.jsonl", ns=(1, 1))
    first, second = (SourceConfig(path=(tmp_path / name).as_uri()) for name in ("one", "copy"))
    assert not share(first, tmp_path / "out", 0, 2)
    assert share(second, tmp_path / "out", 1, 2)


def test_output_inside_the_data_is_rejected_for_urls_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for data, output in (("memory://x/", "memory://x/out"), (tmp_path.as_uri(), f"{tmp_path}/out")):
        assert command.main(["--data.path", data, "--prepare.output", output]) == 2
        assert "is inside the data folder" in capsys.readouterr().err


def test_second_of_two_processes_that_finish_at_once_accepts_the_manifest_of_the_first(
    source: SourceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = data_folder.LocalFolder.write

    @contextmanager
    def write_after_another(folder: data_folder.LocalFolder, name: str, *, flush: bool = False) -> Iterator[Any]:
        with write(folder, name, flush=flush) as file:
            yield file
        if name == MANIFEST:
            raise FileNotFoundError(errno.ENOENT, "its partial file was removed")

    monkeypatch.setattr(data_folder.LocalFolder, "write", write_after_another)
    assert share(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / MANIFEST).read_bytes())["shard_count"] > 1


def test_second_run_of_many_processes_changes_nothing(source: SourceConfig, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert [share(source, folder, rank, 3) for rank in range(3)] == [False, False, True]
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert [share(source, folder, rank, 3) for rank in (2, 0, 1)] == [True, True, True]
    assert [share(source, folder, rank, 5) for rank in range(5)] == [True] * 5
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
