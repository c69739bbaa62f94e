"""The cache on a local disk of data that are read by URL: same batches, no second request, and a limit of its size."""

import errno
import fcntl
import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_hub_folder, write_jsonl, write_tokens
from fsspec.implementations.memory import MemoryFileSystem

from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.build import build_loaders
from torchtrain.datasets.options import DataConfig
from torchtrain.metrics.options import ValidationConfig
from torchtrain.plugins.object_storage.object_store import open_file_system
from torchtrain.plugins.remote_data import range_cache, remote_folder
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.remote_data.range_cache import RangeCache
from torchtrain.plugins.remote_data.remote_files import RemoteFile, find_remote_files
from torchtrain.plugins.remote_data.remote_folder import RemoteFolder

ENTRY_BYTES = 4096  # on disk, of the entries of these tests


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    file_system, _ = open_file_system("memory://", "data.path")
    yield file_system
    file_system.store.clear()


def upload(memory: MemoryFileSystem, folder: Path) -> str:
    for file in folder.iterdir():
        memory.pipe_file(f"/{folder.name}/{file.name}", file.read_bytes())
    return f"memory://{folder.name}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "tokens"])
def test_data_are_read_from_the_store_once(
    kind: str, memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "tokens":
        path = write_tokens(tmp_path / "data", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    else:
        path = write_hub_folder(tmp_path / "data", DOCUMENTS, files=2, kind=kind)
    config = DataConfig(path=upload(memory, Path(path)), prefetch=0)
    expected = take(make_loader(config), 12)  # several epochs
    cat_file, requests = memory.cat_file, list[tuple[str, int]]()

    def count(path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if start is not None:
            requests.append((path, start))
        content: bytes = cat_file(path, start=start, end=end, **options)
        return content

    def batches() -> torch.Tensor:
        return take(
            make_loader(config, plugins={"remote_data": RemoteDataConfig(cache_folder=str(tmp_path / "cache"))}), 12
        )

    monkeypatch.setattr(memory, "cat_file", count)
    monkeypatch.setattr(remote_folder, "_CONNECTIONS", 1)  # concurrent requests of neighbouring windows may overlap
    assert torch.equal(batches(), expected)
    first = len(requests)
    assert first == len(set(requests)) > 0
    if kind == "tokens":  # not a file for each window
        assert len(files_of(tmp_path / "cache")) == len({path for path, _ in requests})
    assert torch.equal(batches(), expected)
    assert len(requests) == first
    for file in Path(path).iterdir():
        memory.pipe_file(f"/data/{file.name}", file.read_bytes())  # another version, with the same size
    assert torch.equal(batches(), expected)
    assert len(requests) == 2 * first


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_object_that_is_overwritten_and_restored_is_not_cached(
    kind: str, memory: MemoryFileSystem, tmp_path: Path
) -> None:
    cache = RangeCache(tmp_path, 1 << 30)
    memory.pipe_file("/data/a.txt", b"right")
    folder = RemoteFolder("memory://data", cache=cache)
    assert folder.sizes() == {"a.txt": 5}
    [file] = find_remote_files(["memory://data/a.txt"], "data.path", "data.path")

    def read() -> bytes:
        return RemoteFile(file, cache).open().read() if kind == "text" else folder.read_ranges([("a.txt", 0, 5)])[0]

    right = memory.store["/data/a.txt"]
    memory.pipe_file("/data/a.txt", b"wrong")
    assert read() == b"wrong"
    memory.store["/data/a.txt"] = right  # with the same tag
    assert read() == b"right"
    memory.pipe_file("/data/a.txt", b"wrong")
    assert read() == b"right"


def test_training_and_validation_share_the_cache_of_the_config(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(memory, Path(write_hub_folder(tmp_path / "data", DOCUMENTS, files=1)))
    config = JobConfig(
        plugins={"remote_data": RemoteDataConfig(cache_folder=str(tmp_path / "cache"))},
        data=DataConfig(path=url, prefetch=0),
        validation=ValidationConfig(enable=True, path=url),
        training=TrainingConfig(global_batch_size=8, seq_len=32),
    )
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    group: Any = None
    training, validation = build_loaders(
        config, TOKENIZER, range(config.training.global_batch_size), torch.device("cpu"), group
    )
    monkeypatch.setattr(memory, "cat_file", lambda *_, **__: pytest.fail("its head, which is all, is in the cache"))
    assert take(training, 1).shape == (1, 8, 32)
    assert take(*validation.values(), 1).shape == (1, 8, 32)
    assert len(files_of(tmp_path / "cache")) == 1


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]


def test_size_is_limited_and_the_oldest_entries_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    (tmp_path / "a file of the user").write_bytes(bytes(10**6))
    caches = [RangeCache(tmp_path, 64 * ENTRY_BYTES) for _ in range(2)]
    for number in range(200):
        content = f"{number}".encode() * 100
        assert caches[number % 2].read(str(number), lambda content=content: content) == content  # type: ignore[misc]
        assert caches[0].read("0", lambda: pytest.fail("it is used often")) == b"0" * 100
        assert len(files_of(tmp_path / "torchtrain-ranges")) <= 64
    assert (tmp_path / "a file of the user").stat().st_size == 10**6
    missing: list[int] = []
    for number in range(200):
        caches[0].read(str(number), lambda number=number: missing.append(number) or b"")  # type: ignore[misc]
    assert 0 not in missing
    assert missing[:100] == list(range(1, 101))
    RangeCache(tmp_path, 16 * ENTRY_BYTES).read("new", lambda: b"content")  # a lower limit
    assert len(files_of(tmp_path / "torchtrain-ranges")) <= 16


def test_segments_that_are_read_are_kept_and_the_others_removed_by_their_last_use(tmp_path: Path) -> None:
    """Of entries of both kinds; the times are set, since a file system may not distinguish quick uses."""
    cache = RangeCache(tmp_path, 16 * ENTRY_BYTES)
    wrong = Mock(side_effect=lambda *_: pytest.fail("it is in the cache"))
    for number in range(12):
        if number % 2:
            cache.read(str(number), lambda: b"content")
        else:
            cache.read_part(str(number), 0, 7, 7, lambda *_: b"content")
        for entry in files_of(tmp_path):
            os.utime(entry, ns=(0, entry.stat().st_mtime_ns - 10**12))  # each is older than the next
    for number in (4, 1):  # the last uses, in this order
        used = set(files_of(tmp_path))
        if number % 2:
            cache.read(str(number), wrong)
        else:
            cache.read_part(str(number), 0, 7, 7, wrong)
        assert set(files_of(tmp_path)) == used
    cache._limit_bytes = 4 * ENTRY_BYTES  # leaves three
    cache._remove_old()
    assert len(files_of(tmp_path)) == 3
    assert cache.read("11", wrong) == cache.read("1", wrong) == b"content"
    assert cache.read_part("4", 0, 7, 7, wrong) == b"content"


def test_small_ranges_of_an_object_share_a_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_cache, "_SEGMENT_BLOCKS", 64)
    content = random.Random(0).randbytes(150_001)  # segments of 64 x 1016 bytes: three
    requests = list[tuple[int, int]]()

    def fetch(start: int, end: int) -> bytes:
        requests.append((start, end))
        return content[start:end]

    cache = RangeCache(tmp_path, 1 << 30)

    def read(starts: Sequence[int], count: int = 2002) -> None:
        for start in starts:
            end = min(start + count, len(content))
            assert cache.read_part("object", start, end, len(content), fetch) == content[start:end]

    starts = random.Random(1).sample(range(0, len(content), 2000), 76)
    read(starts[:10])
    assert sum(end - start for start, end in requests) < 10 * (2002 + 2 * 1016)  # little more than what is used
    assert sum(path.stat().st_blocks * 512 for path in files_of(tmp_path)) <= 10 * 3 * ENTRY_BYTES  # with holes
    read(starts)
    assert len(files_of(tmp_path)) == 3
    assert sum(end - start for start, end in requests) < 1.5 * len(content)
    requests.clear()
    read(starts)
    read([5, 70_000, 149_000], 1)
    assert requests == []
    with sorted(files_of(tmp_path))[0].open("r+b") as file:  # a damaged block is read again
        file.seek(3 * 1024)
        file.write(b"damaged")
    read(starts)
    assert [end - start for start, end in requests] == [1016]


def test_no_thread_waits_while_entries_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RangeCache(tmp_path, 64 * ENTRY_BYTES)
    listing, listed = threading.Event(), threading.Event()

    def remove_old() -> None:
        listing.set()
        assert listed.wait(30)

    monkeypatch.setattr(cache, "_remove_old", remove_old)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.read, "first", lambda: b"1")
        assert listing.wait(30)
        monkeypatch.setattr(cache, "_remove_old", Mock(side_effect=BlockingIOError))
        try:
            assert pool.submit(cache.read, "second", lambda: b"2").result(10) == b"2"
        finally:
            listed.set()
        assert first.result(30) == b"1"


def test_entries_that_are_too_large_or_would_wait_are_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtrain"), "propagate", True)
    cache = RangeCache(tmp_path, 64 * ENTRY_BYTES)
    for key in ("large", "too"):
        assert cache.read(key, lambda: bytes(9 * ENTRY_BYTES)) == bytes(9 * ENTRY_BYTES)
    assert [record.message.count("remote_data.cache_gib is too low") for record in caplog.records] == [1]
    with open(tmp_path / "torchtrain-ranges/.lock", "w") as lock:  # another process removes entries
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cache.read("small", lambda: b"content") == b"content"
    assert files_of(tmp_path) == []


def test_damaged_entry_is_read_again(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 1 << 30)
    cache.read("key", lambda: b"content")
    [entry] = files_of(tmp_path)
    for damaged in (b"", b"cut", b"C" + entry.read_bytes()[1:]):
        entry.write_bytes(damaged)
        assert cache.read("key", lambda: b"content") == b"content"
        assert cache.read("key", lambda: pytest.fail("it is in the cache")) == b"content"


def test_entries_of_another_user_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RangeCache(tmp_path, 1 << 30)
    cache.read("key", lambda: b"content")
    cache.read_part("object", 0, 7, 7, lambda *_: b"content")
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError))
    assert cache.read("key", lambda: pytest.fail("it is in the cache")) == b"content"
    assert cache.read_part("object", 0, 7, 7, lambda *_: pytest.fail("it is in the cache")) == b"content"


def test_full_disk_ends_the_writing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RangeCache(tmp_path, 1 << 30)
    cache.read("old", lambda: b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(range_cache, "atomic_write", fail)
    logger = logging.getLogger("torchtrain")
    monkeypatch.setattr(logger, "propagate", True)
    assert [cache.read("new", lambda: b"new") for _ in range(3)] == [b"new"] * 3
    assert cache.read("old", lambda: b"") == b"old"
    assert [record.message.count("cannot be written, and is only read") for record in caplog.records] == [1]
