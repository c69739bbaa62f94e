"""A checkpoint's ``manifest.json``: the step and run that it comes from, and size and hashes of each file."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from torchtrain.errors import DamagedError
from torchtrain.files import MISSING, hash_of, is_own_file, printable, read_file, with_retries

T = TypeVar("T")

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest. It has a hash of the whole file, or one of each of its pieces.

    A piece is what is read at once: one tensor, or the part of it that one rank saved. Pieces follow one another from
    the beginning of the file to its end.
    """

    name: str
    size_bytes: int
    xxh3_128: str = ""
    """Of the whole file; empty where there are pieces."""
    pieces: Sequence[tuple[int, str]] = ()
    """Size in bytes and hash of each piece. Older checkpoints have none."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isprintable()):
            raise ValueError(f"{self.name!r} is no name of a file")
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(f"{self.name!r} is not in its folder")
        if type(self.size_bytes) is not int or self.size_bytes < 0:
            raise ValueError(f"{self.name} has the size {self.size_bytes!r}")
        pieces = list(self.pieces)
        if not isinstance(self.xxh3_128, str) or not all(type(n) is int and n > 0 for n, _ in pieces):
            raise ValueError(f"{self.name} has no hash, or a piece without a size")
        if pieces and sum(n for n, _ in pieces) != self.size_bytes:
            raise ValueError(f"the pieces of {self.name} are not the file")


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``. Without step, run and data where ``convert`` made the checkpoint."""

    step: int | None = None
    run: str | None = None
    """Id of the run, the same through all its starts."""
    data: Mapping[str, str] = field(default_factory=dict)
    """The identity of its data and tokenizer by option (``Loader.identity``)."""
    files: Sequence[FileRecord] = ()

    def __post_init__(self) -> None:
        if not (self.step is None or type(self.step) is int) or not (self.run is None or isinstance(self.run, str)):
            raise ValueError(f"step = {self.step!r}, run = {self.run!r}")
        if not all(isinstance(word, str) for pair in dict(self.data).items() for word in pair):
            raise ValueError(f"data = {self.data!r}")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("it names a file twice")


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
        DamagedError: the manifest is missing or not as it was written.
        StorageError: it cannot be read.
    """
    text = found(folder / MANIFEST, lambda: read_file(folder / MANIFEST))
    try:
        content = json.loads(text.decode())
        del content["xxh3_128"]
        if _manifest_text(content) != text.decode():
            raise ValueError("its text does not have the hash it names")
        content["files"] = [FileRecord(**file) for file in content["files"]]
        return Manifest(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{folder / MANIFEST} is damaged ({printable(str(error))})") from error


def found(path: Path, read: Callable[[], T]) -> T:
    """``read()`` of ``path``, which is part of a checkpoint. DamagedError where there is no such file."""
    try:
        return read()
    except MISSING as error:
        raise DamagedError(f"{path} is missing ({error.strerror})") from error


def verify_sizes(folder: Path, records: Iterable[FileRecord]) -> None:
    """Look, without opening them, whether these files of the checkpoint in ``folder`` are there in full.

    Raises:
        DamagedError: one is missing, has another size, or is no file of this folder.
        StorageError: the file system fails.
    """
    for record in records:
        path = folder / record.name
        if not found(path, lambda: with_retries(lambda: is_own_file(path), path)):  # noqa: B023
            raise DamagedError(f"{path} is no file of its own folder")
        size_bytes = found(path, lambda: with_retries(lambda: path.stat().st_size, path))  # noqa: B023
        if size_bytes != record.size_bytes:
            raise DamagedError(f"{path} has {size_bytes} bytes; its manifest says {record.size_bytes}")


def verify(folder: Path, records: Iterable[FileRecord]) -> None:
    """Read these files of the checkpoint in ``folder`` in full.

    Raises:
        DamagedError: one is missing or damaged.
        StorageError: one cannot be read; that is no damage.
    """
    for record in records:
        verify_sizes(folder, [record])
        path, start = folder / record.name, 0
        for size_bytes, expected in record.pieces or [(record.size_bytes, record.xxh3_128)]:
            digest = found(path, lambda: with_retries(partial(hash_of, path, start, size_bytes), path))  # noqa: B023
            if digest != expected:
                raise changed(path)
            start += size_bytes


def read_verified(folder: Path, name: str) -> bytes:
    """The content of a small file of the checkpoint in ``folder``.

    Raises:
        DamagedError: it is missing or damaged, or the manifest does not name it.
        StorageError: it cannot be read.
    """
    path = folder / name
    records = [record for record in read_manifest(folder).files if record.name == name]
    if not records:
        raise DamagedError(f"{path} cannot be read: the manifest does not name it")
    verify_sizes(folder, records)
    content = found(path, lambda: read_file(path))
    if xxhash.xxh3_128_hexdigest(content) != records[0].xxh3_128:
        raise changed(path)
    return content


def changed(path: Path) -> DamagedError:
    return DamagedError(f"{path} does not have the hash that its manifest names: it was damaged after it was written")
