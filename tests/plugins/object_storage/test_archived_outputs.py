"""The archive of metrics in a checkpoint: it is bounded, and metrics of several starts are merged."""

import gzip
import io
import json
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from torchtrain.checkpoint.format import FileRecord, Manifest, manifest_bytes
from torchtrain.checkpoint.local_storage import LocalCheckpoint
from torchtrain.errors import DamagedError
from torchtrain.plugins.object_storage import outputs
from torchtrain.plugins.object_storage.outputs import (
    METRICS,
    OUTPUTS,
    TRACKER_RUNS,
    merge_metrics,
    read_metrics,
    restore_outputs,
)


def stored_outputs(folder: Path, pack: Callable[[tarfile.TarFile], None], *, cut: int = 0) -> LocalCheckpoint:
    """A checkpoint whose archive of metrics is what ``pack`` adds."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb") as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        pack(tar)
    content = packed.getvalue()[: -cut or None]
    (folder / OUTPUTS).write_bytes(content)
    record = FileRecord(OUTPUTS, len(content), xxhash.xxh3_128_hexdigest(content))
    (folder / "manifest.json").write_bytes(manifest_bytes(Manifest(files=[record])))
    return LocalCheckpoint(folder)


def tar_entry(name: str, size: int, kind: bytes = tarfile.REGTYPE, **headers: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.pax_headers = size, kind, headers
    return entry


class Zeros(io.RawIOBase):
    """An endless file of zeros."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


@pytest.mark.parametrize("kind", ["metrics", "header", "other", "files", "cut"])
def test_archive_of_metrics_does_not_unpack_to_more_than_metrics_do(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "MAX_FILES", 20)
    size = 40 * 2**20

    def pack(tar: tarfile.TarFile) -> None:
        if kind == "files":
            for number in range(21):
                tar.addfile(tar_entry(f"tensorboard/{number}", 100), io.BytesIO(os.urandom(100)))
        elif kind == "header":
            tar.addfile(tar_entry("metrics.jsonl", 0, comment="a" * 2**22))
        else:
            tar.addfile(tar_entry("other" if kind == "other" else "metrics.jsonl", size), Zeros())

    checkpoint = stored_outputs(tmp_path, pack, cut=5000 if kind == "cut" else 0)
    tracemalloc.start()
    with pytest.raises(DamagedError, match=r"outputs\.tar\.gz is damaged: "):
        restore_outputs(checkpoint, tmp_path / "run")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24
    if kind != "files":
        with pytest.raises(DamagedError):
            read_metrics(checkpoint)


def test_sparse_file_in_an_archive_of_metrics_is_left_out(tmp_path: Path) -> None:
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,0", "GNU.sparse.size": "1" * 15}

    def pack(tar: tarfile.TarFile) -> None:
        tar.addfile(tar_entry("metrics.jsonl", 0, **headers))
        tar.addfile(tar_entry("wandb_id", 3), io.BytesIO(b"abc"))

    restore_outputs(stored_outputs(tmp_path, pack), tmp_path / "run")
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == {"wandb_id": b"abc"}


@pytest.mark.parametrize("name", TRACKER_RUNS)
def test_id_of_a_tracker_run_is_that_of_the_newer_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After a rollback, a new one is in the folder before a checkpoint has it."""
    stored = {METRICS: lines_of((0, 1, "12")), name: b"stored"}
    monkeypatch.setattr(outputs, "_read_outputs", lambda _: list(stored.items()))
    checkpoint: Any = None
    restore_outputs(checkpoint, tmp_path)
    assert (tmp_path / name).read_bytes() == b"stored"
    (tmp_path / name).write_bytes(b"own")
    (tmp_path / METRICS).write_bytes(lines_of((0, 1, "12"), (2, 2, "3")))
    restore_outputs(checkpoint, tmp_path)
    assert (tmp_path / name).read_bytes() == b"own"
    stored[METRICS] = lines_of((0, 1, "12"), (2, 3, "34"))
    restore_outputs(checkpoint, tmp_path)
    assert (tmp_path / name).read_bytes() == b"stored"


def lines_of(*processes: tuple[int, int, str]) -> bytes:
    """Lines of processes, each given as its first step and generation, and the steps that it has written."""
    texts = []
    for first, generation, steps in processes:
        texts.append(json.dumps({"step": first, "event": "start", "generation": generation, "time": generation}))
        texts += [json.dumps({"step": int(step)}) for step in steps]
    return "".join(f"{text}\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("own", "checkpoint", "merged"),
    [
        ([(0, 1, "1234")], [(0, 1, "1234"), (4, 2, "5678")], [(0, 1, "1234"), (4, 2, "5678")]),
        ([(0, 1, "123456")], [(0, 1, "1234"), (4, 2, "56")], [(0, 1, "123456"), (4, 2, "56")]),
        ([(0, 1, "12"), (2, 3, "34")], [(0, 1, "12"), (2, 2, "3")], [(0, 1, "12"), (2, 2, "3"), (2, 3, "34")]),
        ([], [(0, 1, "12")], [(0, 1, "12")]),
        ([(0, 1, "123")], [(0, 1, "12")], [(0, 1, "123")]),
    ],
)
def test_metrics_of_several_machines_are_merged_by_process(own: Any, checkpoint: Any, merged: Any) -> None:
    assert merge_metrics(lines_of(*own), lines_of(*checkpoint)) == lines_of(*merged)
    assert merge_metrics(lines_of(*checkpoint), lines_of(*own)) == lines_of(*merged)


def test_nested_event_in_metrics_does_not_end_the_merge() -> None:
    deep = b'{"step": 0, "event": "start", "a": ' + b"[" * 200_000 + b"\n"
    other = lines_of((0, 1, "12"))
    assert merge_metrics(other, deep) == deep + other
