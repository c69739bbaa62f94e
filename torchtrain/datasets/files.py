"""Local files of text: found, converted once into one column of text, and read in any order."""

import codecs
import errno
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    as_text,
    decode_piece,
    documents,
    kind_of,
    place_to_cut,
    require_column,
    require_text,
)
from torchtrain.datasets.identity import identity_of_files
from torchtrain.datasets.text import RETRY_SECONDS, LocalText
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.log import logger
from torchtrain.reading import MISSING, names_in, patiently, unreadable

_CONVERSION = 1  # its version: raise it when the same files give other documents
_ROWS = 1000  # that are converted at once


def open_files(paths: Sequence[str], column: str, label: str) -> LocalText:
    """The documents of files, of all data files in folders, and of all files that match patterns.

    Raises:
        DataError: there are none, they are damaged, or have no column of text ``column``.
    """
    files = list(dict.fromkeys(file for path in paths for file in _find_files(path, label)))
    kinds = {kind_of(file.name) for file in files}
    if kinds <= {("txt", ""), ("md", "")}:
        return LocalText(*_text_files(files), label, partial(identity_of_files, files), files)
    # Progress bars would come from every rank.
    datasets.disable_progress_bars()
    try:
        builder = _Converter(files, column)
        builder.download_and_prepare(verification_mode="no_checks")
        dataset = builder.as_dataset(split="train")
    except Exception as error:
        raise _why(error, label) from error
    return LocalText(dataset, lambda row: row["text"], label, partial(identity_of_files, files), files)


def open_dataset(dataset: datasets.Dataset, column: str, label: str, identity: Callable[[], str]) -> LocalText:
    """The column of a dataset that lies on disk; DataError unless it holds text."""
    if len(dataset) == 0:
        raise DataError(f"{label} has no documents")
    require_column(column, dataset.column_names, label)
    try:
        require_text(column, dataset.data.schema.field(column).type)
    except DataError as error:
        raise DataError(f"{label}: {error}") from None
    return LocalText(dataset.select_columns([column]), lambda row: as_text(row[column]), label, identity)


def open_standard_library() -> LocalText:
    """Python's own modules without their tests, which some systems leave out."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        files += [path for path in paths if path.is_file() and not path.is_symlink()]
    return LocalText(*_text_files(files), "the Python standard library", partial(identity_of_files, files), files)


class _Converter(datasets.ArrowBasedBuilder):  # type: ignore[misc]
    """Writes the documents of files into the cache of ``datasets``, whose locks and temporary files it uses."""

    def __init__(self, files: Sequence[Path], column: str):
        self.files, self.column = files, column
        stats = [(str(file.absolute()), (at := file.stat()).st_size, at.st_mtime_ns) for file in files]
        super().__init__(hash=xxhash.xxh3_128_hexdigest(repr((_CONVERSION, column, stats)).encode()))

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({"text": datasets.Value("large_string")}))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:  # noqa: ARG002
        return [datasets.SplitGenerator(name="train")]

    def _generate_tables(self) -> Iterator[tuple[str, pyarrow.Table]]:
        for file in self.files:
            texts, first = _documents_of(file, self.column), 0
            while rows := list(itertools.islice(texts, _ROWS)):
                # A lone surrogate, which JSON can spell, has no UTF-8: tokenizers replace it in the same way.
                rows = [row if row is None else row.encode("utf-8", "replace").decode() for row in rows]
                yield f"{file} {first}", pyarrow.table({"text": pyarrow.array(rows, pyarrow.large_string())})
                first += _ROWS


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
        if isinstance(error, OSError) and error.errno:
            raise unreadable(file, error, attempts=1) from error
        raise DataError(f"{file} cannot be read after document {count}, it seems damaged: {error}") from error


def _why(error: BaseException, label: str) -> TorchtrainError:
    """The cause of an error of the library ``datasets``, as an error for the user."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, TorchtrainError):
            return below
        if isinstance(below, OSError) and below.errno in (errno.ENOSPC, errno.EDQUOT):
            return DataError(
                f"{label} is converted into {datasets.config.HF_DATASETS_CACHE}, and there is no room left: make room, "
                "or name another folder by HF_DATASETS_CACHE, and start again"
            )
        if isinstance(below, OSError) and below.errno in (errno.EIO, errno.ESTALE):
            return unreadable(Path(below.filename or datasets.config.HF_DATASETS_CACHE), below, attempts=1)
        below = below.__cause__ or below.__context__
    return DataError(f"cannot read {label}: {error.__cause__ or error}")


def _find_files(pattern: str, label: str) -> list[Path]:
    """The data files that ``pattern`` stands for, in a fixed order, without empty ones."""
    path = Path(pattern)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in _walk(path) if kind_of(file.name)[0])
        for beside in ({"md"}, {"csv", "tsv"}):  # a README or a table that describes the data
            files = [file for file in files if kind_of(file.name)[0] not in beside] or files
    else:
        files = sorted(file for file in _matches(Path(path.anchor), path.parts[bool(path.anchor) :]) if file.is_file())
        if not files:
            raise DataError(f"{label} does not exist (looked for {path.absolute()})")
    if not files:
        raise DataError(f"{label} is a folder without data files; they must end in one of {SUFFIXES}")
    for file in files:
        if not kind_of(file.name)[0]:
            raise DataError(f"{label}: {file.name} must end in one of {SUFFIXES}")
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
        if kind_of(file.name) in (("txt", ""), ("md", "")):
            _require_utf8(head, file)
    return files


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All files in ``folder`` and the folders in it, by links too, but not hidden ones; StorageError for one that
    cannot be read."""
    above |= {folder.resolve()}
    for name in names_in(folder):
        path = folder / name
        if name.startswith("."):
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in above:  # else a link that leads up again
            yield from _walk(path, above)


def _matches(folder: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """What in ``folder`` matches the parts of a pattern; unlike ``glob``, which passes over what cannot be read."""
    if not pattern:
        yield folder
        return
    part, *rest = pattern
    if part == "**":
        found = {folder, *(parent for file in _walk(folder) for parent in file.parents if folder in parent.parents)}
        yield from {match for inner in found for match in _matches(inner, rest or ["*"])}
    elif has_magic(part):
        if folder.is_dir():
            for name in names_in(folder):
                if fnmatchcase(name, part) and not name.startswith("."):
                    yield from _matches(folder / name, rest)
    elif (folder / part).exists():
        yield from _matches(folder / part, rest)


def _require_utf8(head: bytes, file: Path) -> None:
    """DataError where the first bytes of a text file are in another encoding."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        place = head.find(b"\0")  # as in UTF-16
    except UnicodeDecodeError as error:
        place = error.start
    if place >= 0:
        raise DataError(f"{file} is not UTF-8 at byte {place}; convert it, as by iconv, or leave it out")


def _text_files(files: Sequence[Path]) -> tuple[datasets.Dataset, Callable[[Mapping[str, Any]], str | None]]:
    """One row for each document of ``files``, read when it is asked for, and the reader of a row."""
    rows: dict[str, list[Any]] = {"path": [], "start": [], "stop": []}
    for file in files:
        size = file.stat().st_size
        step = size if size <= LARGEST_TEXT_FILE_BYTES else PIECE_BYTES
        for start in range(0, size, max(step, 1)):
            rows["path"].append(str(file))
            rows["start"].append(start)
            rows["stop"].append(min(start + step, size))
    return datasets.Dataset.from_dict(rows), _read_piece


def _read_piece(row: Mapping[str, Any]) -> str | None:
    path = Path(row["path"])

    def read() -> str | None:
        with path.open("rb") as file:
            start, stop = _cut(file, row["start"]), _cut(file, row["stop"])
            file.seek(start)
            try:
                return decode_piece(file.read(stop - start), start)
            except DataError as error:
                logger.warning("%s: %s; the document is skipped", path, error)
                return None

    try:
        return patiently(read, path, RETRY_SECONDS)
    except MISSING as error:
        raise DataError(f"{path} was there when the run began, and is not any more: put it back") from error


def _cut(file: BinaryIO, near: int) -> int:
    """Where the piece that nominally begins at ``near`` begins."""
    file.seek(near)
    block = file.read(PIECE_BYTES)
    return near if near == 0 or not block else near + place_to_cut(block)
