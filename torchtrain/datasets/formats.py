"""The documents in one file, of every format that people keep text in.

A row without text gives None and a blank line gives "", so that documents keep the numbers of their rows.
"""

import codecs
import csv
import gzip
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet
import zstandard

from torchtrain.errors import DataError

KINDS = ("jsonl", "json", "csv", "tsv", "txt", "md", "parquet", "arrow")
COMPRESSIONS = ("", "gz", "zst")
SUFFIXES = ".jsonl, .json, .csv, .tsv, .txt, .md (also .gz or .zst), .parquet or .arrow"

# A text file up to the first size is one document; a larger one is cut at line ends into documents of the second, so
# that one file that holds a whole corpus can be shuffled.
LARGEST_TEXT_FILE_BYTES = 1 << 20
PIECE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


def kind_of(name: str) -> tuple[str, str]:
    """Of a file's name: one of ``KINDS`` and one of ``COMPRESSIONS``; ("", "") if it is not that of a data file."""
    words = name.lower().split(".")
    compression = words.pop() if words[-1] in COMPRESSIONS else ""
    kind = words[-1] if len(words) > 1 and words[-1] in KINDS else ""
    return ("", "") if compression and kind in ("", "parquet", "arrow") else (kind, compression)


def documents(
    raw: BinaryIO, name: str, column: str, start: int = 0, *, text_by_line: bool = False, head: int | None = None
) -> Iterator[str | None]:
    """The documents of the file ``name`` with the content ``raw``, from number ``start`` on.

    ``text_by_line``: each line of a text file is a document, as in the library ``datasets``. ``head``: read only so
    many lines.

    Raises:
        DataError: it is not what its name says, or has no text in ``column``.
        Exception: any other, from the format's reader, for a damaged file.
    """
    kind, compression = kind_of(name)
    if kind == "parquet":
        return _parquet(raw, column, start)
    if kind == "arrow":
        return itertools.islice(_arrow(raw, column), start, None)
    blocks = _decompressed(raw, compression)
    if kind in ("txt", "md") and not text_by_line:
        return itertools.islice(_pieces(blocks), start, None)
    block = next(blocks, b"")
    blocks = itertools.chain([block], blocks)
    if kind == "json" and block.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
        return itertools.islice(_texts(_array(b"".join(blocks)), column), start, None)
    lines = _decoded(itertools.islice(_lines(blocks), head))
    if kind in ("json", "jsonl"):  # Line by line: a column's type may change between lines, and a bad line is skipped.
        return _texts(map(_row, itertools.islice(lines, start, None)), column, check=start == 0)
    rows = _table(lines, column, "," if kind == "csv" else "\t") if kind in ("csv", "tsv") else lines
    return itertools.islice(rows, start, None)


def require_column(column: str, columns: Sequence[str]) -> None:
    """Raise ``DataError`` that names the columns there are."""
    if column not in columns:
        raise DataError(f"it has no column {column!r} (text_column); its columns are {', '.join(columns)}")


def require_text(column: str, schema: Any) -> None:
    """Raise ``DataError`` where an Arrow schema has no such column, or one of another type than text."""
    require_column(column, schema.names)
    dtype, types = schema.field(column).type, pyarrow.types
    dtype = dtype.value_type if types.is_dictionary(dtype) else dtype
    if not any(test(dtype) for test in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)):
        raise DataError(f"the column {column!r} (text_column) holds {dtype}, not text")


def place_to_cut(block: bytes) -> int:
    """Where in ``block`` a new document may begin: after a line end, or else a space, or else there."""
    for separator in (b"\n", b" "):
        if (place := block.find(separator)) >= 0:
            return place + 1
    # Not inside a character: the bytes that continue one have the bits 10 on top.
    return next((place for place, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)


def _decompressed(raw: BinaryIO, compression: str) -> Iterator[bytes]:
    """The decompressed content in blocks. A compressed file that was cut is an error."""
    if compression != "zst":
        file: Any = gzip.GzipFile(fileobj=raw, mode="rb") if compression == "gz" else raw
        yield from iter(lambda: file.read(_BLOCK_BYTES), b"")
        return
    frame = None
    for block in iter(lambda: raw.read(_BLOCK_BYTES), b""):
        while block:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b""  # a file may hold several frames
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a compressed frame")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []  # of a line that is longer than a block
    for block in blocks:
        first, *others = block.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = others[-1:]
    if last := b"".join(rest):
        yield last


def _decoded(lines: Iterator[bytes]) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} is not UTF-8 at byte {offset + error.start} of the text; convert the file, as by iconv"
            ) from None
        offset += len(line) + 1


def _texts(rows: Iterable[object], column: str, *, check: bool = True) -> Iterator[str | None]:
    """``column`` of rows without a schema; with ``check``, DataError in the end if none has text there."""
    columns: dict[str, None] = {}
    kinds: set[str] = set()  # of values in the column
    begin = ""  # of the first row that is no JSON object
    for row in rows:
        if isinstance(row, dict):
            if len(columns) < 100:
                columns.update(dict.fromkeys(row))
            if column in row:
                kinds.add(type(row[column]).__name__)
            yield row[column] if isinstance(row.get(column), str) else None
        else:
            line = str(row).strip()
            begin = begin or line[:40]
            yield None if line else ""
    if not check:
        return
    if columns and not kinds:
        require_column(column, list(columns))
    if begin and not columns:
        raise DataError(f"it must hold one JSON object a line, or an array of them; it begins with {begin!r}")
    if kinds and not kinds & {"str", "NoneType"}:
        raise DataError(f"the column {column!r} (text_column) holds {', '.join(sorted(kinds))}, not text")


def _row(line: str) -> object:
    """The JSON object in ``line``, or ``line`` if it is none."""
    try:
        return json.loads(line) if line.lstrip()[:1] == "{" else line
    except (ValueError, RecursionError):  # the second for lists in lists, thousands deep
        return line


def _array(content: bytes) -> list[object]:
    try:
        items: list[object] = json.loads(decode_piece(content, 0))
    except json.JSONDecodeError as error:
        raise DataError(f"line {error.lineno} is not valid JSON: {error.msg}") from None
    if not items:
        raise DataError("it has no data: its array is empty")
    return items


def _table(lines: Iterator[str], column: str, delimiter: str) -> Iterator[str | None]:
    """Rows of a file whose first line names the columns."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter)
    columns = next((row for row in reader if row), [])
    if columns:
        require_column(column, columns)
    for row in reader:
        place = columns.index(column)
        yield row[place] if place < len(row) else None


def _pieces(blocks: Iterator[bytes]) -> Iterator[str | None]:
    """The documents of a text file that is read from its beginning, as a compressed one must be."""
    buffer, begin, largest = b"", 0, LARGEST_TEXT_FILE_BYTES
    for block in blocks:
        buffer += block
        while len(buffer) > largest:
            largest = 2 * PIECE_BYTES
            cut = PIECE_BYTES + place_to_cut(buffer[PIECE_BYTES:largest])
            yield decode_piece(buffer[:cut], begin)
            buffer, begin = buffer[cut:], begin + cut
    if buffer:
        yield decode_piece(buffer, begin)


def decode_piece(piece: bytes, begin: int) -> str:
    """Raises DataError where it is not UTF-8; ``begin`` is its place in the file."""
    try:
        return piece.decode("utf-8-sig" if begin == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 at byte {begin + error.start}; convert the file, as by iconv") from None


def _parquet(raw: BinaryIO, column: str, start: int) -> Iterator[str | None]:
    """Reads only this column, from the row group that holds document ``start``."""
    parquet = pyarrow.parquet.ParquetFile(raw, pre_buffer=True)
    require_text(column, parquet.schema_arrow)
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if start >= rows:
            start -= rows
            continue
        for batch in parquet.iter_batches(256, row_groups=[group], columns=[column]):
            yield from batch.column(column).slice(start).to_pylist()
            start = max(0, start - len(batch))


def _arrow(raw: BinaryIO, column: str) -> Iterator[str | None]:
    """Of both formats: a stream, as the library ``datasets`` writes it, and a file."""
    if raw.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(raw)
        batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
    else:
        raw.seek(0)
        reader = batches = pyarrow.ipc.open_stream(raw)
    require_text(column, reader.schema)
    for batch in batches:
        yield from batch.column(column).to_pylist()
