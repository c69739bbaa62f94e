"""Local text files: those that a path names, their encoding, and the identity of their content."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from torchtrain.config.registry import FILE_FORMATS
from torchtrain.datasets.data_identity import HASH_DIGITS, MAX_FILES, DataFile, FileTable, Identity, shortened
from torchtrain.datasets.file_formats import HEAD_BYTES, NotUTF8Error, kind_of, require_utf8_file
from torchtrain.datasets.find_files import find_files
from torchtrain.datasets.text_input import SKIP_HINT, LocalFile, TextFiles
from torchtrain.errors import DataError
from torchtrain.files import BLOCK_BYTES, with_retries
from torchtrain.logging import logger
from torchtrain.progress import progress

_WHOLE_BYTES = 1 << 20  # files up to this size are hashed in full for their identity
_BLOCK_BYTES = 1 << 16  # of larger files, three blocks of this size are hashed


def open_text_files(
    paths: Sequence[str],
    column: str = "text",
    label: str = "the text",
    verify_bytes: float = math.inf,
    *,
    split: str = "train",
    skip_not_utf8: bool = False,
) -> TextFiles:
    """The documents of files, of all data files in folders, and of all files that match patterns.

    Args:
        paths: the files, folders and patterns.
        column: the column that contains the text.
        label: name for messages.
        verify_bytes: files up to this total size are hashed in full, and their encoding is checked in full.
        split: the split of a folder that ``DatasetDict.save_to_disk`` wrote.
        skip_not_utf8: skip files that are not UTF-8, and count them.

    Raises:
        DataError: there are no such files, or they are not UTF-8.
    """
    found = list(dict.fromkeys(file for path in paths for file in find_files(path, label, split)))
    errors = {file: error for file, error in zip(found, _errors_of_heads(found, label), strict=True) if error}
    if errors and not skip_not_utf8:
        raise _not_utf8(errors)
    if errors:
        names = shortened([str(file) for file in errors])
        logger.warning("%s: skipped %d of %d file(s) that are not UTF-8: %s", label, len(errors), len(found), names)
    files = [file for file in found if file not in errors]
    if not files:
        raise DataError(f"{label} has no documents")
    inputs = [LocalFile(file) for file in files]  # before the content is hashed, to detect changes since then
    identity, key = identity_and_key(files, verify_bytes)

    def raise_for_all_files() -> None:
        require_utf8_files(files, label, verify_bytes)

    return TextFiles(
        inputs, column, label, lambda: identity, key, on_not_utf8=raise_for_all_files, skip_not_utf8=skip_not_utf8
    )


def require_utf8_files(files: Sequence[Path], label: str, verify_bytes: float = math.inf) -> None:
    """Check ``files`` before work begins that an error would stop: all of their content, if their size is at most
    ``verify_bytes``, else the beginning of each. Columns of Parquet and Arrow are not read.

    Raises:
        NotUTF8Error: it names the files that are not UTF-8.
    """
    sizes = [file.stat().st_size for file in files]
    whole = sum(sizes) <= verify_bytes
    errors = {}
    for file in progress(zip(files, sizes, strict=True), f"checking the encoding of {label}", sum(sizes)):
        try:
            with file.open("rb") as raw:
                require_utf8_file(raw, file.name, whole=whole)
        except NotUTF8Error as error:
            errors[file] = error
        except Exception:  # Each format's reader has its own errors. Reading the documents raises this one, too.
            continue
    if errors:
        raise _not_utf8(errors)


def _not_utf8(errors: Mapping[Path, NotUTF8Error]) -> NotUTF8Error:
    """The error of the first file, with the names of the others."""
    file, *others = errors
    names = shortened([str(other) for other in others])
    also = f". {len(others)} other file(s) are not UTF-8 either: {names}" if others else ""
    return NotUTF8Error(f"{file}: {errors[file]}{SKIP_HINT}{also}")


def _errors_of_heads(files: Sequence[Path], label: str) -> Iterator[NotUTF8Error | None]:
    """For each file the error if it is a plain text file that does not begin with UTF-8.

    Raises:
        DataError: a file cannot be opened.
    """
    for file in files:
        try:
            with file.open("rb") as content:
                head = content.read(HEAD_BYTES)
            kind, compression = kind_of(file.name)
            if not compression:
                FILE_FORMATS[kind].check_head(head)
            yield None
        except PermissionError as error:
            raise DataError(f"{label}: {file} cannot be opened: {error.strerror}; let this user read it") from error
        except NotUTF8Error as error:
            yield error


def identify(files: Sequence[Path], verify_bytes: float = math.inf, *, whole: bool = False) -> Identity:
    """Number, total size and hash of ``files``, independent of their folder and names; and their table.

    The hash is of formats, sizes and content, in the order of the files; of a file above 1 MiB, of three blocks only,
    unless ``whole``. If some content is not hashed, and the total size is at most ``verify_bytes``, a second hash of
    all content is added.
    """
    sizes, digest, table = _digest_of(files, whole)
    text = f"{len(files)} file(s) of {sum(sizes):,} bytes, hash {digest}"
    if whole or sum(sizes) > verify_bytes or max(sizes, default=0) <= _WHOLE_BYTES:
        return Identity(text, table)
    _, content, table_of_content = _digest_of(files, whole=True)
    pairs = zip(table.files, table_of_content.files, strict=True)
    entries = [a if a.hash == b.hash else replace(a, content=b.hash) for a, b in pairs]
    return Identity(f"{text}, content {content}", replace(table, files=entries))


def identity_and_key(files: Sequence[Path], verify_bytes: float) -> tuple[Identity, str]:
    """The identity of ``files``, and a text for the key of their tokens in the cache.

    Since content above ``verify_bytes`` is not hashed in full, the key of such files depends on their times, too, among
    them the change time of the inode, which users cannot set.
    """
    identity = identify(files, verify_bytes)
    is_hashed = sum(path.stat().st_size for path in files) <= verify_bytes
    kinds = [kind_of(file.name) for file in files]
    return identity, repr((identity.text, kinds, None if is_hashed else _stats(files)))


def _stats(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Of each file: path, size, modification time and inode change time, both in nanoseconds."""
    stats = [(str(file.absolute()), file.stat()) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]


def _digest_of(files: Sequence[Path], whole: bool) -> tuple[list[int], str, FileTable]:
    """Size of each of ``files``, the hash of all as in ``identify``, and a table with the hash of each."""
    digest, sizes = xxhash.xxh3_128(), []
    entries: list[DataFile] = []
    on_disk = [with_retries(path.stat, path).st_size for path in files]
    to_read = [size if whole or size <= _WHOLE_BYTES else 3 * _BLOCK_BYTES for size in on_disk]
    for path in progress(zip(files, to_read, strict=True), "hashing the data", sum(to_read)):
        size, digest, own = with_retries(partial(_with_file, digest, path, whole), path)
        sizes.append(size)
        if len(entries) < MAX_FILES:
            entries.append(DataFile(str(path), size, own.hexdigest()[:HASH_DIGITS]))
    return sizes, digest.hexdigest()[:16], FileTable(entries, len(files))


def _with_file(before: xxhash.xxh3_128, path: Path, whole: bool) -> tuple[int, xxhash.xxh3_128, xxhash.xxh3_128]:
    """Size of a file, a copy of the digest ``before`` that is updated with the file as in ``identify``, and a digest of
    the file alone."""
    digests = before.copy(), xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        for part in _hashed_parts(file, kind_of(path.name), size, whole):
            for digest in digests:
                digest.update(part)
    return size, *digests


def _hashed_parts(file: io.FileIO, kind: tuple[str, str], size: int, whole: bool) -> Iterator[bytes]:
    """What the hash of a file is computed from."""
    yield f"{kind}\0{size}\0".encode()
    file.seek(0)
    if whole or size <= _WHOLE_BYTES:
        yield from iter(lambda: file.read(BLOCK_BYTES), b"")
        return
    for start in (0, (size - _BLOCK_BYTES) // 2, size - _BLOCK_BYTES):
        file.seek(start)
        yield file.read(_BLOCK_BYTES)
