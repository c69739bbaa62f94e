"""Crafted and corrupted checkpoints: each is detected as damaged, and the one before it is loaded."""

import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from forked_run import finish
from test_checkpoint import Run, assert_bitwise_equal, change_index, only_file, replace_small_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchtrain.checkpoint.format import INDEX, FileRecord, _manifest_text, _tile, manifest_bytes, read_manifest
from torchtrain.checkpoint.local_storage import LocalCheckpoint
from torchtrain.checkpoint.storage import MANIFEST
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import CheckpointError
from torchtrain.logging import logger

SPARSE_BYTES = 2**42
ESCAPE = "\x1b]0;owned\x07\n"


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump folder of a run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    Run(folder).train(1, 4)
    dist.destroy_process_group()
    return folder


@pytest.fixture(scope="module")
def before(saved: Path) -> dict[str, Any]:
    """The tensors of step 2."""
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    run = Run(saved, load_step=2)
    run.manager.resume()
    tensors = run.tensors()
    dist.destroy_process_group()
    return tensors


def change_manifest(**changes: Any) -> Callable[[Path], None]:
    """Change keys of the manifest and make its own hash agree."""

    def change(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        del content["xxh3_128"]
        content.update(changes)
        (folder / MANIFEST).write_text(_manifest_text(content))

    return change


def change_record(ending: str, **changes: Any) -> Callable[[Path], None]:
    """Change the manifest's record of a file."""

    def change(folder: Path) -> None:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        next(file for file in files if file["name"].endswith(ending)).update(changes)
        change_manifest(files=files)(folder)

    return change


def replace_file(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Replace a file by something else of the same name."""

    def change(folder: Path) -> None:
        (file,) = folder.glob(name)
        file.unlink()
        make(file)

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    """Write a small file and make the manifest agree."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)
        before = read_manifest(LocalCheckpoint(folder))
        own = FileRecord(name, len(content), xxhash.xxh3_128_hexdigest(content))
        (folder / MANIFEST).write_bytes(
            manifest_bytes(replace(before, files=[own, *(file for file in before.files if file.name != name)]))
        )

    return change


def link_outside(file: Path) -> None:
    shutil.copyfile(file.parent.parent / "step-2" / file.name, file.parent.parent / "outside")
    file.symlink_to(file.parent.parent / "outside")


def changed_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: change_index(folder, change)


def set_chunk(place: int, value: Any) -> Callable[[Path], None]:
    """Change the first chunk of a tensor: [offsets, shape, file, offset, length]."""
    return changed_index(lambda tensors: next(iter(tensors.values()))["chunks"][0].__setitem__(place, value))


def set_entry(**changes: Any) -> Callable[[Path], None]:
    return changed_index(lambda tensors: tensors["model.norm.weight"].update(changes))


def rename_tensor(new: str) -> Callable[[Path], None]:
    """Give a tensor another name, too; the old name stays, so that nothing is missing."""
    return changed_index(lambda tensors: tensors.update({new: next(iter(tensors.values()))}))


def overlap(tensors: dict[str, Any]) -> None:
    """Make two chunks of a tensor the same half: the number of elements is right, and half of them are not written."""
    entry = tensors["model.embedding.weight"]
    entry["shape"][0] *= 2
    entry["chunks"] *= 2


def replace_piece(make: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Replace the bytes of the first tensor, and make hashes and index agree."""

    def change(folder: Path) -> None:
        file = only_file(folder)
        index = json.loads((folder / INDEX).read_bytes())
        chunks = [chunk for entry in index["tensors"].values() for chunk in entry["chunks"]]
        old = file.read_bytes()
        first = min(chunks, key=lambda chunk: chunk[3])
        length = first[4]
        new = make(old[:length])
        for chunk in chunks:
            chunk[3] += len(new) - length if chunk[3] else 0
        first[4] = len(new)
        content = new + old[length:]
        file.write_bytes(content)
        before = read_manifest(LocalCheckpoint(folder))
        (record,) = (record for record in before.files if record.name == file.name)
        pieces = [(len(new), xxhash.xxh3_128_hexdigest(new)), *record.pieces[1:]]
        own = FileRecord(file.name, len(content), pieces=pieces)
        (folder / MANIFEST).write_bytes(
            manifest_bytes(replace(before, files=[own, *(r for r in before.files if r.name != file.name)]))
        )
        replace_small_file(folder, INDEX, json.dumps(index).encode())

    return change


def compressed(content: bytes) -> bytes:
    """The same tensor in a compressed archive, which could decompress to any size."""
    packed = io.BytesIO()
    large = io.BytesIO()
    torch.save(torch.zeros(1_000_000), large)
    with zipfile.ZipFile(large) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry.filename))
    return packed.getvalue() + bytes(max(0, 64 - len(content)))


def sparse(file: Path) -> None:
    """A file of zeros that takes no space on the disk."""
    file.touch()
    os.truncate(file, SPARSE_BYTES)


def many_entries(content: bytes) -> bytes:
    """The tensor with entries beside it, whose table takes 20 times as much memory as in the file."""
    packed = io.BytesIO(content)
    with zipfile.ZipFile(packed, "a") as archive:
        for number in range(1500):
            archive.writestr(f"archive/other/{number:040}", b"")
    return packed.getvalue()


def saved_object(content: bytes) -> bytes:  # noqa: ARG001
    stream = io.BytesIO()
    torch.save({"a": 1, ESCAPE: 2}, stream)
    return stream.getvalue()


CHANGES = {
    # Names in the manifest
    **{
        f"manifest names {name!r}": change_record(".distcp", name=name)
        for name in ("/dev/zero", "../step-2/.metadata", "..", ".", "", "a/b", "a\0b", "\ud800", ESCAPE, 7, None, [])
    },
    "manifest names a file twice": change_record(".distcp", name="config.toml"),
    # Wrong types in the manifest
    **{
        f"manifest has {key} = {value!r}": change_record(".distcp", **{key: value})
        for key, values in {
            "size_bytes": ("12", -1, 1.5, None, True, 10**30),
            "xxh3_128": (5, None, []),
            "pieces": ("x", 3, None, [["a", "b"]], [[0, ""]], [[1]], [[-5, ""], [5, ""]]),
            "new\x1b": (1,),
        }.items()
        for value in values
    },
    **{
        f"manifest has {key} = {value!r}": change_manifest(**{key: value})
        for key, values in {
            "step": ("4", 4.5, [4], True),
            "run": (5, [], {}),
            "data": (None, [1], {"a": 1}, "x"),
            "files": (None, {}, "x", [1], [[]], 7),
            "loader": (
                *({}, [], {"global_batch_size": "x", "seq_len": 8, "state_sizes": [1]}),
                *({"global_batch_size": 10**15, "seq_len": 8, "state_sizes": [1]},),
                *({"global_batch_size": 4, "seq_len": 0, "state_sizes": [1]},),
                *({"global_batch_size": 4, "seq_len": 8, "state_sizes": [-1]},),
            ),
            ESCAPE: (1,),
        }.items()
        for value in values
    },
    # Files that are replaced
    "pipe": replace_file("*.distcp", os.mkfifo),
    "folder": replace_file("*.distcp", Path.mkdir),
    "link to a device": replace_file("*.distcp", lambda file: file.symlink_to("/dev/zero")),
    "link to itself": replace_file("*.distcp", lambda file: file.symlink_to(file)),
    "link to nothing": replace_file("*.distcp", lambda file: file.symlink_to("/nothing")),
    "link outside": replace_file("config.toml", link_outside),
    "metadata are a pipe": replace_file(".metadata", os.mkfifo),
    "index is a pipe": replace_file(INDEX, os.mkfifo),
    "manifest is a pipe": replace_file(MANIFEST, os.mkfifo),
    "manifest is a device": replace_file(MANIFEST, lambda file: file.symlink_to("/dev/zero")),
    "manifest is larger than the memory": replace_file(MANIFEST, sparse),
    "config is larger than the memory": lambda folder: (
        replace_file("config.toml", sparse)(folder),
        change_record("config.toml", size_bytes=SPARSE_BYTES)(folder),
    )[0],
    "manifest is a link to itself": replace_file(MANIFEST, lambda file: file.symlink_to(file)),
    **{
        f"manifest is {content[:9]!r}": replace_file(MANIFEST, lambda file, content=content: file.write_bytes(content))
        for content in (b"", b"null", b"[]", b"\xff\xfe", b"[" * 200_000, b"1" * 9000, b'{"xxh3_128": ""}')
    },
    # The index
    **{
        f"index is {content[:12]!r}": write(INDEX, content)
        for content in (b"", b"7", b"[]", b"\xff\xfe", b"[" * 200_000, b'{"tensors": 7}', b'{"tensors": [1]}')
    },
    "index is cut": lambda folder: replace_small_file(folder, INDEX, (folder / INDEX).read_bytes()[:-40]),
    "a shape without end": set_entry(shape=[1] * 500),
    "an entry is a number": changed_index(lambda tensors: tensors.update({"a": 5})),
    "a name with NUL": rename_tensor("a\0b"),
    "a name that is no text": rename_tensor("\ud800"),
    "a name with an escape sequence": rename_tensor(ESCAPE),
    "no shape": set_entry(shape=None),
    "no chunks": set_entry(chunks=[]),
    "no dtype": set_entry(dtype=None),
    "another dtype": set_entry(dtype="os"),
    "an offset that is text": set_chunk(3, "0"),
    "an offset below 0": set_chunk(3, -5),
    "a length of 0": set_chunk(4, 0),
    "a length beyond the file": set_chunk(4, 10**12),
    "a file that is a number": set_chunk(2, 5),
    "a file that is not listed": set_chunk(2, ESCAPE),
    "parts that overlap": changed_index(overlap),
    # The config
    **{
        f"config is {content[:12]!r}": write("config.toml", content)
        for content in (
            *(b"garbage \x1b[31m", b"\xff\xfe", b"a = \0", b"[data]\nsources = 3\n", b"[data]\nsources = [1]\n"),
            *(b"a = " + b"[" * 100_000, b'training = 3\n[lr_scheduler]\ndecay_type = "constant"\nwarmup_steps = "a"\n'),
        )
    },
    # Tensors
    "a tensor is compressed": replace_piece(compressed),
    "a tensor is beside many entries": replace_piece(many_entries),
    "a tensor is another object": replace_piece(saved_object),
    "a tensor is no archive": replace_piece(lambda content: bytes(len(content))),
}


def first_of_each_kind(names: Iterable[str]) -> Iterator[Any]:
    """The names, of which those that differ from one before in the value alone are slow."""
    kinds = set()
    for name in names:
        value = re.match(r"(manifest names|manifest has \S+ =|(?:manifest|index|config) is) ([^a-z]|b['\"])", name)
        yield pytest.param(name, marks=pytest.mark.slow) if value and value[1] in kinds else name
        if value:
            kinds.add(value[1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", list(first_of_each_kind(CHANGES)))
def test_crafted_checkpoint_is_detected_as_damaged(
    saved: Path,
    before: dict[str, Any],
    tmp_path: Path,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger.name)
    folder = tmp_path / "checkpoint"
    shutil.copytree(saved / "checkpoint", folder)
    CHANGES[change](folder / "step-4")
    with pytest.raises(CheckpointError, match="load_step = 4 cannot be loaded") as error:
        Run(tmp_path, load_step=4).manager.resume()
    assert str(error.value).isprintable()
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.resume() == 2
    assert (folder / "step-4.damaged").is_dir()
    assert [message for message in caplog.messages if not message.isprintable()] == []
    assert_bitwise_equal(resumed.tensors(), before)


@pytest.mark.parametrize(
    ("boxes", "are_whole"),
    [
        ([((0, 0), (4, 6))], True),
        ([((0, 0), (2, 6)), ((2, 0), (2, 6))], True),
        ([((0, 0), (2, 3)), ((0, 3), (4, 3)), ((2, 0), (2, 3))], True),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], False),  # row 1 twice, row 3 missing, and as many elements
        ([((0, 0), (4, 4)), ((0, 3), (4, 2))], False),  # column 3 twice, column 5 missing
        ([((0, 0), (2, 6)), ((0, 0), (2, 6))], False),
        ([((0, 0), (2, 6)), ((2, 0), (2, 5))], False),
        ([((0, 0), (2, 6)), ((2, 1), (2, 6))], False),  # beyond the tensor
    ],
)
def test_pieces_of_a_tensor_are_all_of_it_without_overlaps(boxes: list[Any], are_whole: bool) -> None:
    pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    assert _tile(pieces, torch.Size((4, 6))) is are_whole
    assert _tile(pieces[::-1], torch.Size((4, 6))) is are_whole


def test_run_does_not_resume_from_a_position_of_other_numbers_than_its_manifest_says(tmp_path: Path) -> None:
    dist.destroy_process_group()
    options = ("--checkpoint.interval", "2", "--training.steps", "4")
    finish(tmp_path, *options, ranks=1)
    folder = tmp_path / "checkpoint" / "step-4"
    loader = json.loads((folder / MANIFEST).read_text())["loader"]
    change_manifest(loader={**loader, "global_batch_size": 2**30})(folder)
    output = finish(tmp_path, *options, ranks=1)
    assert "checkpoint of step 4 is damaged, and renamed to step-4.damaged: " in output
    assert f"its position in the data has shape ({loader['global_batch_size']}, " in output
    assert "by its manifest (1073741824, " in output
    assert "resumed from" in output
    assert (tmp_path / "checkpoint" / "step-4").is_dir()
