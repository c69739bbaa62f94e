"""A checkpoint's ``manifest.json``: size and hash of each file, and the step and run that it comes from."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from torchtrain.errors import CheckpointError
from torchtrain.reading import MISSING, patiently, read_file

MANIFEST = "manifest.json"
BLOCK_BYTES = 16 * 2**20  # read, hashed or written at once


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest."""

    name: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint comes from; None and empty for one that ``convert`` made."""

    step: int | None = None
    run: str | None = None
    """Id of the run, the same through all its starts."""
    data: Mapping[str, str] = field(default_factory=dict)
    """The identity of its data by option (``datasets/identity.py``)."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    files: list[FileRecord]
    origin: Origin = Origin()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``, with a hash of its own text."""
    files = [asdict(record) for record in sorted(manifest.files, key=lambda record: record.name)]
    (folder / MANIFEST).write_text(_manifest_text({**asdict(manifest.origin), "files": files}))


def _manifest_text(content: Mapping[str, Any]) -> str:
    # Older manifests have only "files", and a hash of that list.
    hashed = content["files"] if content.keys() == {"files"} else content
    body = json.dumps(hashed, sort_keys=True).encode()
    return json.dumps({**content, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: the manifest is missing or not as it was written.
        StorageError: it cannot be read.
    """
    try:
        text = read_file(folder / MANIFEST).decode()
        content = json.loads(text)
        del content["xxh3_128"]
        if _manifest_text(content) != text:
            raise ValueError("its text does not have the hash it names")
        files = [FileRecord(**file) for file in content.pop("files")]
        return Manifest(files, Origin(**content))
    except MISSING as error:
        raise CheckpointError(f"{folder / MANIFEST} is missing ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})") from error


def problem_in(folder: Path, records: Sequence[FileRecord]) -> str | None:
    """What is wrong with one of these files of a checkpoint, as ``verify_file`` says, or None."""
    return next((problem for record in records if (problem := verify_file(folder, record))), None)


def verify_file(folder: Path, record: FileRecord) -> str | None:
    """What is wrong with a file of a checkpoint, or None: reads the whole file.

    Raises:
        StorageError: it cannot be read; that is no damage.
    """
    path = folder / record.name

    def size_and_hash() -> tuple[int, str]:
        size_bytes = os.stat(path).st_size
        digest = xxhash.xxh3_128()
        if size_bytes == record.size_bytes:  # else there is no need to read it
            with path.open("rb", buffering=0) as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
        return size_bytes, digest.hexdigest()

    try:
        size_bytes, digest = patiently(size_and_hash, path)
    except MISSING as error:
        return f"{path} is missing ({error.strerror})"
    if size_bytes != record.size_bytes:
        return f"{path} has {size_bytes} bytes; its manifest says {record.size_bytes}"
    if digest != record.xxh3_128:
        return f"{path} does not have the hash that its manifest names: it was damaged after it was written"
    return None
