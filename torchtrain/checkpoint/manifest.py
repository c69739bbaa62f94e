"""A checkpoint's ``manifest.json``: the step and run that it comes from, and size and hash of each file."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from torchtrain.errors import CheckpointError
from torchtrain.reading import MISSING, hash_of, patiently, read_file

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest."""

    name: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``. Without step, run and data where ``convert`` made the checkpoint."""

    step: int | None = None
    run: str | None = None
    """Id of the run, the same through all its starts."""
    data: Mapping[str, str] = field(default_factory=dict)
    """The identity of its data and tokenizer by option (``Loader.identity``)."""
    files: Sequence[FileRecord] = ()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``, with a hash of its own text."""
    files = sorted(manifest.files, key=lambda record: record.name)
    with open(folder / MANIFEST, "w", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as file:
        file.write(_manifest_text(asdict(replace(manifest, files=files))))


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
        content["files"] = [FileRecord(**file) for file in content["files"]]
        return Manifest(**content)
    except MISSING as error:
        raise CheckpointError(f"{folder / MANIFEST} is missing ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})") from error


def verify_sizes(folder: Path, records: Iterable[FileRecord]) -> None:
    """Look at the size of these files of the checkpoint in ``folder``.

    Raises:
        CheckpointError: one is missing, or has another size.
        StorageError: the file system fails.
    """
    for record in records:
        path = folder / record.name
        try:
            size_bytes = patiently(lambda: path.stat().st_size, path)  # noqa: B023
        except MISSING as error:
            raise CheckpointError(f"{path} is missing ({error.strerror})") from error
        if size_bytes != record.size_bytes:
            raise CheckpointError(f"{path} has {size_bytes} bytes; its manifest says {record.size_bytes}")


def verify(folder: Path, records: Iterable[FileRecord]) -> None:
    """Read these files of the checkpoint in ``folder`` in full.

    Raises:
        CheckpointError: one is missing or damaged.
        StorageError: one cannot be read; that is no damage.
    """
    for record in records:
        verify_sizes(folder, [record])
        path = folder / record.name
        try:
            digest = patiently(lambda: hash_of(path), path)  # noqa: B023
        except MISSING as error:
            raise CheckpointError(f"{path} is missing ({error.strerror})") from error
        if digest != record.xxh3_128:
            raise CheckpointError(
                f"{path} does not have the hash that its manifest names: it was damaged after it was written"
            )
