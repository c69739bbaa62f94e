"""Local files of text: found, converted once into one column of text, and read in any order."""

import codecs
import fcntl
import itertools
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow
import xxhash

from torchtrain.datasets.formats import (
    LARGEST_TEXT_FILE_BYTES,
    PIECE_BYTES,
    SUFFIXES,
    decode_piece,
    documents,
    kind_of,
    place_to_cut,
)
from torchtrain.datasets.text import LocalText, read_again
from torchtrain.errors import DataError
from torchtrain.log import logger
from torchtrain.outputs import open_lock_file, written_whole
from torchtrain.reading import MAY_PASS, names_in, patiently, unreadable

_CONVERSION = 1  # its version: raise it when the same files give other documents
_ROWS = 1000  # that are converted at once
_WHOLE_BYTES = 1 << 20  # up to this size all of a file identifies it
_BLOCK_BYTES = 1 << 16  # else three blocks of it
_PLAIN = {("txt", ""), ("md", "")}  # kinds that are read in place


def open_files(paths: Sequence[str], column: str, label: str) -> LocalText:
    """The documents of files, of all data files in folders, and of all files that match patterns.

    Raises:
        DataError: there are none, they are damaged, or have no column of text ``column``.
    """
    files = list(dict.fromkeys(file for path in paths for file in _find_files(path, label)))
    if {kind_of(file.name) for file in files} <= _PLAIN:
        return _text_files(files, label)
    dataset = _converted(files, column, label)
    if len(dataset) == 0:
        raise DataError(f"{label} has no documents")
    return LocalText(dataset, label, partial(identity_of, files))


def open_standard_library() -> LocalText:
    """The sources of Python's standard library."""
    return _text_files(standard_library_files(), "the Python standard library")


def standard_library_files() -> list[Path]:
    """Python's own modules without their tests, which some systems leave out."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        files += [path for path in paths if path.is_file() and not path.is_symlink()]
    return files


def _converted(files: Sequence[Path], column: str, label: str) -> datasets.Dataset:
    """The documents of ``files``, which the first process to come writes into the cache of ``datasets``."""
    stats = [(str(file.absolute()), (at := file.stat()).st_size, at.st_mtime_ns) for file in files]
    name = xxhash.xxh3_128_hexdigest(repr((_CONVERSION, column, stats)).encode())
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    path = cache / "torchtrain" / f"{name}.arrow"
    schema = pyarrow.schema({"text": pyarrow.large_string()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_lock_file(path.with_suffix(".lock")), "r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if not path.exists():
                with written_whole(path, flush=True) as output, pyarrow.ipc.new_stream(output, schema) as writer:
                    texts = itertools.chain.from_iterable(_documents_of(file, column) for file in files)
                    while rows := list(itertools.islice(texts, _ROWS)):
                        # A lone surrogate, which JSON can spell, has no UTF-8: tokenizers replace it in the same way.
                        rows = [row if row is None else row.encode("utf-8", "replace").decode() for row in rows]
                        writer.write_batch(pyarrow.record_batch([pyarrow.array(rows, schema.types[0])], schema))
        return datasets.Dataset.from_file(str(path))
    except (pyarrow.ArrowInvalid, OSError) as error:
        number = getattr(error, "errno", None)
        if number in MAY_PASS:
            raise  # whoever opens the data tries again
        if number:
            raise DataError(
                f"{label} cannot be converted into {cache}: {os.strerror(number)}. Make room, or name "
                "another folder by HF_DATASETS_CACHE, and start again"
            ) from error
        raise DataError(
            f"{path}, into which {label} was converted, is damaged ({error}): remove it, and start again"
        ) from error


def _documents_of(file: Path, column: str) -> Iterator[str | None]:
    """The documents of a file. Every error names the file and the place in it."""
    count = 0
    try:
        with file.open("rb") as raw:
            for text in documents(raw, file.name, column):
                yield text
                count += 1
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    except Exception as error:  # Each format's reader has its own errors for a damaged file.
        if isinstance(error, OSError) and error.errno in MAY_PASS:
            raise OSError(error.errno, error.strerror, str(file)) from error
        if isinstance(error, OSError) and error.errno:
            raise unreadable(file, error, attempts=1) from error
        raise DataError(f"{file} cannot be read after document {count}, it seems damaged: {error}") from error


def identity_of(files: Sequence[Path], whole: bool = False) -> str:
    """Number and size of ``files``, and a hash of their names, sizes and content: of a large one of three blocks,
    unless ``whole``."""
    digest, total = xxhash.xxh3_128(), 0
    for path in files:
        size, digest = patiently(partial(_with_file, digest, path, whole), path)
        total += size
    return f"{len(files)} file(s) of {total:,} bytes, hash {digest.hexdigest()[:16]}"


def _with_file(before: xxhash.xxh3_128, path: Path, whole: bool) -> tuple[int, xxhash.xxh3_128]:
    """Size of a file, and the digest ``before`` with what ``identity_of`` takes of it."""
    digest = before.copy()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(os.fsencode(path.name) + f"\0{size}\0".encode())  # a name need not be UTF-8
        parts = (0, (size - _BLOCK_BYTES) // 2, size - _BLOCK_BYTES)
        for start in range(0, size, _BLOCK_BYTES) if whole or size <= _WHOLE_BYTES else parts:
            file.seek(start)
            digest.update(file.read(_BLOCK_BYTES))
    return size, digest


def _find_files(pattern: str, label: str) -> list[Path]:
    """The data files that ``pattern`` stands for, in a fixed order, without empty ones."""
    path = Path(pattern)
    if path.is_dir():
        files = sorted(file for file in _walk(path) if kind_of(file.name)[0] and not file.is_dir())
        for beside in ({"md"}, {"csv", "tsv"}):  # a README or a table that describes the data
            files = [file for file in files if kind_of(file.name)[0] not in beside] or files
        if not files:
            raise DataError(f"{label} is a folder without data files; they must end in one of {SUFFIXES}")
        if gone := [file for file in files if not file.is_file()]:  # to open a pipe would wait for ever
            raise DataError(f"{label}: {gone[0]} is not a file, or a broken link; restore what it names, or remove it")
    else:
        found = [path] if path.is_file() else _matches(Path(path.anchor), path.parts[bool(path.anchor) :])
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise DataError(f"{label} does not exist (looked for {path.absolute()})")
    if bad := [file.name for file in files if not kind_of(file.name)[0]]:
        raise DataError(f"{label}: {bad[0]} must end in one of {SUFFIXES}")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise DataError(f"{label} has no documents")
    kinds = sorted({"txt" if (kind := kind_of(file.name)[0]) == "md" else kind for file in files})
    if len(kinds) > 1:
        raise DataError(
            f"{label} mixes files of several kinds (.{', .'.join(kinds)}); name one kind, such as '*.{kinds[0]}'"
        )
    for file in files:
        try:
            with file.open("rb") as content:
                head = content.read(4096)
        except PermissionError as error:
            raise DataError(f"{label}: {file} cannot be opened: {error.strerror}; let this user read it") from error
        if kind_of(file.name) in _PLAIN:
            _require_utf8(head, file)
    return files


def _matches(folder: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """What in ``folder`` matches the parts of a pattern; unlike ``glob``, which passes over what cannot be read."""
    if not pattern:
        yield folder
        return
    part, *rest = pattern
    if part == "**":
        for inner in _walk(folder):
            yield from _matches(inner, rest or ["*"])
    elif has_magic(part):
        for name in names_in(folder) if folder.is_dir() else ():
            if fnmatchcase(name, part) and not name.startswith("."):
                yield from _matches(folder / name, rest)
    elif (folder / part).exists():
        yield from _matches(folder / part, rest)


def _walk(path: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """``path`` and, if it is a folder, all in it, by links too, but nothing hidden; StorageError for a folder that
    cannot be read."""
    if not path.is_dir():
        yield path
    elif (real := path.resolve()) not in above:  # else a link that leads up again
        yield path
        for name in names_in(path):
            if not name.startswith("."):
                yield from _walk(path / name, above | {real})


def _require_utf8(head: bytes, file: Path) -> None:
    """DataError where the first bytes of a text file are in another encoding."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        place = head.find(b"\0")  # as in UTF-16
    except UnicodeDecodeError as error:
        place = error.start
    if place >= 0:
        raise DataError(f"{file} is not UTF-8 at byte {place}; convert it, as by iconv, or leave it out")


def _text_files(files: Sequence[Path], label: str) -> LocalText:
    """The documents of ``files``, each read when it is asked for."""
    rows: dict[str, list[Any]] = {"path": [], "start": [], "stop": []}
    for file in files:
        size = file.stat().st_size
        step = size if size <= LARGEST_TEXT_FILE_BYTES else PIECE_BYTES
        for start in range(0, size, max(step, 1)):
            rows["path"].append(os.fsencode(file))
            rows["start"].append(start)
            rows["stop"].append(min(start + step, size))
    return LocalText(datasets.Dataset.from_dict(rows).with_transform(_read_pieces), label, partial(identity_of, files))


def _read_pieces(rows: Mapping[str, Sequence[Any]]) -> dict[str, list[str | None]]:
    return {"text": [_read_piece(Path(os.fsdecode(path)), *place) for path, *place in zip(*rows.values(), strict=True)]}


def _read_piece(path: Path, start: int, stop: int) -> str | None:
    def read() -> tuple[bytes, int]:
        with path.open("rb") as file:
            begin, end = _cut(file, start), _cut(file, stop)
            file.seek(begin)
            return file.read(end - begin), begin

    piece, begin = read_again(read, path)
    try:
        return decode_piece(piece, begin)
    except DataError as error:  # it is not UTF-8
        logger.warning("%s: %s; the document is skipped", path, error)
        return None


def _cut(file: BinaryIO, near: int) -> int:
    """Where the piece that nominally begins at ``near`` begins."""
    file.seek(near)
    block = file.read(PIECE_BYTES)
    return near if near == 0 or not block else near + place_to_cut(block)
