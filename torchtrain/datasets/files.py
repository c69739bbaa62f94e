"""Local files of text, of every kind that people keep text in."""

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow.parquet

from torchtrain.datasets.identity import identity_of_files
from torchtrain.datasets.text import RETRY_SECONDS, LocalText, as_text, require_column
from torchtrain.errors import DataError
from torchtrain.reading import MISSING, patiently

_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet", ".arrow", ".txt")

# A text file up to the first size is one document; a larger one is cut at line ends into documents of the second, so
# that one file that holds a whole corpus can be shuffled.
_LARGEST_TEXT_FILE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16


def open_files(pattern: str, column: str, label: str) -> LocalText:
    """The documents of a file, of all data files in a folder, or of all files that match a pattern.

    Raises:
        DataError: there are none, they are damaged, or have no column of text ``column``.
    """
    files = _find_files(pattern, label)
    kinds = sorted({_suffix(file) for file in files})
    if len({kind.split(".")[1] for kind in kinds}) > 1:
        raise DataError(
            f"{label} mixes files of several kinds ({', '.join(kinds)}); name one kind, such as '*{kinds[0]}'"
        )
    identity = partial(identity_of_files, files)
    if kinds == [".txt"]:
        return LocalText(*_text_files(files), label, identity)
    names = [str(file) for file in files]
    # Progress bars would come from every rank.
    datasets.disable_progress_bars()
    try:
        if kinds == [".parquet"]:
            require_column(column, pyarrow.parquet.read_schema(files[0]).names, label)
            dataset = datasets.load_dataset("parquet", data_files=names, split="train", columns=[column])
        elif kinds == [".arrow"]:
            dataset = datasets.load_dataset("arrow", data_files=names, split="train")
        elif kinds == [".json"] and _first_byte(files[0]) == b"[":
            dataset = datasets.load_dataset("json", data_files=names, split="train")
        else:
            # Lines are parsed when they are read: a column's type may change from line to line.
            dataset = datasets.load_dataset("text", data_files=names, split="train")
            require_column(column, _parse(dataset[0]["text"], label), label)
            return LocalText(dataset, lambda row: _text_of_line(row["text"], column), label, identity)
    except DataError:
        raise
    except Exception as error:  # Whatever the readers of pyarrow and datasets say of a damaged file.
        raise DataError(f"cannot read {label}: {error.__cause__ or error}") from error
    return open_dataset(dataset, column, label, identity)


def open_dataset(dataset: datasets.Dataset, column: str, label: str, identity: Callable[[], str]) -> LocalText:
    """The column of a dataset that lies on disk; DataError unless it holds text."""
    if len(dataset) == 0:
        raise DataError(f"{label} has no documents")
    require_column(column, dataset.column_names, label)
    # A column of JSON with values of several types has no dtype; they are looked at one by one.
    dtype = getattr(dataset.features[column], "dtype", "string")
    if dtype not in ("string", "large_string"):
        raise DataError(f"{label}: the column {column!r} (text_column) holds {dtype}, not text")
    return LocalText(dataset.select_columns([column]), lambda row: as_text(row[column]), label, identity)


def open_standard_library() -> LocalText:
    """Python's own modules without their tests, which some systems leave out."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        files += [path for path in paths if path.is_file() and not path.is_symlink()]
    return LocalText(*_text_files(files), "the Python standard library", partial(identity_of_files, files))


def _find_files(pattern: str, label: str) -> list[Path]:
    """The data files that ``pattern`` stands for, in a fixed order, without empty ones."""
    path, kinds = Path(pattern), ", ".join(_SUFFIXES)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file))
    else:
        files = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
        if not files:
            raise DataError(f"{label} does not exist (looked for {path.absolute()})")
    if not files:
        raise DataError(f"{label} is a folder without data files; they must end in one of {kinds}")
    for file in files:
        if not _suffix(file):
            raise DataError(f"{label}: {file.name} must end in one of {kinds}")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise DataError(f"{label} has no documents")
    for file in files:
        try:
            file.open("rb").close()
        except OSError as error:
            raise DataError(f"{label}: {file} cannot be opened: {error.strerror}; let this user read it") from error
    return files


def _suffix(file: Path) -> str:
    """The suffix of a data file; "" for any other file."""
    return max((suffix for suffix in _SUFFIXES if file.name.endswith(suffix)), key=len, default="")


def _first_byte(file: Path) -> bytes:
    with open(file, "rb") as content:
        return content.read(4096).lstrip()[:1]


def _parse(line: str, label: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(f"{label} must hold one JSON object a line, or an array of them; it begins with {line[:40]!r}")
    return row


def _text_of_line(line: str, column: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return as_text(row.get(column)) if isinstance(row, dict) else None


def _text_files(files: Sequence[Path]) -> tuple[datasets.Dataset, Callable[[Mapping[str, Any]], str | None]]:
    """One row for each document of ``files``, read when it is asked for, and the reader of a row."""
    rows: dict[str, list[Any]] = {"path": [], "start": [], "stop": []}
    for file in files:
        size = file.stat().st_size
        step = size if size <= _LARGEST_TEXT_FILE_BYTES else _PIECE_BYTES
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
                return file.read(stop - start).decode()
            except UnicodeDecodeError:
                return None

    try:
        return patiently(read, path, RETRY_SECONDS)
    except MISSING as error:
        raise DataError(f"{path} was there when the run began, and is not any more: put it back") from error


def _cut(file: BinaryIO, near: int) -> int:
    """Where the piece that nominally begins at ``near`` begins: after a line end, or else a space, or else there."""
    file.seek(near)
    block = file.read(_PIECE_BYTES)
    if near == 0 or not block:
        return near
    for separator in (b"\n", b" "):
        if (place := block.find(separator)) >= 0:
            return near + place + 1
    # Not inside a character: the bytes that continue one have the bits 10 on top.
    return near + next((place for place, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)
