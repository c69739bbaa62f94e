"""The formats of files that the core reads: JSON lines, JSON, CSV, plain text, Parquet and Arrow; gzip, zstd and xz."""

import codecs
import csv
import gzip
import itertools
import json
import lzma
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from torchtrain.datasets.file_formats import (
    HEAD_BYTES,
    Content,
    FileFormat,
    NotUTF8Error,
    OnMalformed,
    read_blocks,
    require_utf8,
)
from torchtrain.errors import DataError

# A text file up to the first size is one document; a larger one is split at line ends into documents of the second
# size, so that a single file with a whole corpus can be shuffled.
LARGEST_TEXT_FILE_BYTES = 1 << 20
PIECE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


class JSONLines(FileFormat):
    """A JSON object in each line."""

    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:
        # Line by line: a column's type may change between lines, and a bad line is skipped.
        lines = enumerate(_decoded(_lines(content.blocks())), 1)
        return _texts(((f"line {number}", _row(line)) for number, line in lines), column, on_malformed)

    def is_splittable(self, size: int) -> bool:  # noqa: ARG002
        return True

    def read_range(
        self, raw: BinaryIO, column: str, start: int, stop: int, on_malformed: OnMalformed
    ) -> Iterator[str | None]:
        return _texts_in_range(raw, column, start, stop, on_malformed)

    def position(self, number: int, documents: int) -> str:  # noqa: ARG002
        return f"line {number + 1}"


class JSON(FileFormat):
    """An array of JSON objects, or one in each line."""

    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:
        blocks = content.blocks()
        first = next(blocks, b"")
        blocks = itertools.chain([first], blocks)
        if first.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            items = ((f"item {number}", item) for number, item in enumerate(_array(b"".join(blocks)), 1))
            return _texts(items, column, on_malformed)
        lines = enumerate(_decoded(_lines(blocks)), 1)
        return _texts(((f"line {number}", _row(line)) for number, line in lines), column, on_malformed)


class Table(FileFormat):
    """Rows of fields, of which the first names the columns."""

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter

    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:
        return _table(_decoded(_lines(content.blocks())), column, self.delimiter, on_malformed)


class PlainText(FileFormat):
    """A file is one document, or, if it is large, several."""

    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:  # noqa: ARG002
        blocks = content.blocks()
        first = next(blocks, b"")
        self.check_head(first[:HEAD_BYTES])
        return _pieces(itertools.chain([first], blocks))

    def check_head(self, head: bytes) -> None:
        require_utf8(head)

    def is_splittable(self, size: int) -> bool:
        return size > LARGEST_TEXT_FILE_BYTES

    def read_range(
        self,
        raw: BinaryIO,
        column: str,  # noqa: ARG002
        start: int,
        stop: int,
        on_malformed: OnMalformed,  # noqa: ARG002
    ) -> Iterator[str | None]:
        return _pieces_in_range(raw, start, stop)

    def position(self, number: int, documents: int) -> str:
        return f"document {number}" if documents > 1 else ""


class Parquet(FileFormat):
    is_utf8 = may_be_compressed = False

    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:  # noqa: ARG002
        return _parquet(content.raw, column)

    def is_splittable(self, size: int) -> bool:  # noqa: ARG002
        return True

    def read_range(
        self,
        raw: BinaryIO,
        column: str,
        start: int,
        stop: int,
        on_malformed: OnMalformed,  # noqa: ARG002
    ) -> Iterator[str | None]:
        return _parquet(raw, column, range(start, stop))


class Arrow(FileFormat):
    is_utf8 = may_be_compressed = False

    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:  # noqa: ARG002
        return _arrow(content.raw, column)


JSON_LINES, JSON_FILE, CSV, TSV, TEXT = JSONLines(), JSON(), Table(","), Table("\t"), PlainText()
PARQUET, ARROW = Parquet(), Arrow()


# Entries of ``COMPRESSIONS``: the decompressed bytes of a file; EOFError if it is truncated.


def gz(raw: BinaryIO) -> Iterator[bytes]:
    return read_blocks(gzip.GzipFile(fileobj=raw, mode="rb"))  # type: ignore[arg-type]


def xz(raw: BinaryIO) -> Iterator[bytes]:
    return read_blocks(lzma.LZMAFile(raw))  # type: ignore[arg-type]


def zst(raw: BinaryIO) -> Iterator[bytes]:
    import zstandard

    frame = None
    for block in read_blocks(raw):
        while block:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            if content := frame.decompress(block):  # a frame may be empty, or one that is skipped, as pzstd writes them
                yield content
            block = frame.unused_data if frame.eof else b""  # a file may hold several frames
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a compressed frame")


def _texts_in_range(
    raw: BinaryIO, column: str, start: int, stop: int, on_malformed: OnMalformed
) -> Iterator[str | None]:
    """The texts of the lines that begin in ``range(start, stop)``."""
    found = _TextColumn(column)
    lines = _lines_in_range(raw, start, stop)
    yield from found.texts(((f"the line at byte {offset}", _row(line)) for offset, line in lines), on_malformed)
    try:
        found.require_text()
    except DataError:  # It is an error only if there is no text in the whole file either.
        whole = (_row(line) for _, line in _lines_in_range(raw, 0, sys.maxsize))
        if not any(isinstance(row, dict) and isinstance(row.get(column, 0), str | None) for row in whole):
            raise


def require_column(column: str, columns: Sequence[str]) -> None:
    """Raise ``DataError`` unless exactly one of ``columns`` has the name ``column``."""
    names = ", ".join(name if name.isprintable() else repr(name) for name in columns)
    if column not in columns:
        raise DataError(f"it has no column {column!r} (text_column); its columns are {names}")
    if (count := list(columns).count(column)) > 1:
        raise DataError(
            f"it has {count} columns of the name {column!r} (text_column); its columns are {names}: rename all of "
            "them but the one that holds the text"
        )


def require_text(column: str, schema: Any) -> None:
    """Raise ``DataError`` if an Arrow schema has no such column, or if its type is not text.

    Binary columns are accepted: some writers of Parquet do not mark text as UTF-8.
    """
    import pyarrow

    require_column(column, schema.names)
    dtype, types = schema.field(column).type, pyarrow.types
    dtype = dtype.value_type if types.is_dictionary(dtype) else dtype
    strings = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    binaries = (types.is_binary, types.is_large_binary, types.is_binary_view)
    if not any(test(dtype) for test in (*strings, *binaries)):
        raise DataError(f"the column {column!r} (text_column) holds {dtype}, not text")


def decode_value(value: str | bytes | None, location: str) -> str | None:
    """The text of a value in a text or binary column, None if it is empty; NotUTF8Error if the value is not UTF-8."""
    try:
        return (value.decode() if isinstance(value, bytes) else value) or None
    except UnicodeDecodeError as error:
        raise _not_utf8_value(location, error) from None


def _not_utf8_value(location: str, error: UnicodeDecodeError) -> NotUTF8Error:
    return NotUTF8Error(f"{location} is not UTF-8 at byte {error.start} of its text; write the column in UTF-8")


def find_cut(block: bytes) -> int:
    """Offset in ``block`` at which a document may begin: after the first line end, else space, else at a character."""
    for separator in (b"\n", b" "):
        offset = block.find(separator)
        if offset >= 0:
            return offset + 1
    # The first byte that does not continue a UTF-8 character; continuation bytes have the leading bits 10.
    return next((offset for offset, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []  # blocks of an incomplete line
    for block in blocks:
        first, *others = block.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = others[-1:]
    if last := b"".join(rest):
        yield last


def _lines_in_range(raw: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, str]]:
    """Offset and text of each line that begins in ``range(start, stop)``."""
    raw.seek(max(0, start - 1))
    lines = _lines(read_blocks(raw))
    offset = start
    if start > 0:
        # The line that byte start - 1 belongs to began before: up to its end it is part of the range before.
        offset = start - 1 + len(next(lines, b"")) + 1
    for line in lines:
        if offset >= stop:
            return
        try:
            yield offset, line.decode("utf-8-sig" if offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            place = offset + error.start
            raise NotUTF8Error(f"it is not UTF-8 at byte {place}; convert the file, as by iconv") from None
        offset += len(line) + 1


def _decoded(lines: Iterator[bytes]) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise NotUTF8Error(
                f"line {number} is not UTF-8 at byte {offset + error.start} of the text; convert the file, as by iconv"
            ) from None
        offset += len(line) + 1


class _TextColumn:
    """The column of rows without a schema, and what is known of their columns."""

    def __init__(self, column: str) -> None:
        self.column = column
        self.columns: dict[str, None] = {}
        self.kinds: set[str] = set()  # types of the values in the column
        self.begin = ""  # start of the first row that is not a JSON object

    def texts(self, rows: Iterable[tuple[str, object]], on_malformed: OnMalformed) -> Iterator[str | None]:
        """The texts of ``rows``, which are pairs of location and row."""
        for location, row in rows:
            if isinstance(row, dict):
                if len(self.columns) < 100:
                    self.columns.update(dict.fromkeys(row))
                if self.column in row:
                    self.kinds.add(type(row[self.column]).__name__)
                yield row[self.column] or None if isinstance(row.get(self.column), str) else None
                continue
            if line := str(row).strip():
                self.begin = self.begin or line[:40]
                on_malformed(location)
            yield ""

    @property
    def has_text(self) -> bool:
        """Whether a row has text in the column, or null, which is a document without text."""
        return bool(self.kinds & {"str", "NoneType"})

    def require_text(self) -> None:
        """Raise DataError if there were rows, and none has text in the column."""
        if self.columns and not self.kinds:
            require_column(self.column, list(self.columns))
        if self.begin and not self.columns:
            raise DataError(f"it must hold one JSON object a line, or an array of them; it begins with {self.begin!r}")
        if self.kinds and not self.has_text:
            kinds = ", ".join(sorted(self.kinds))
            raise DataError(f"the column {self.column!r} (text_column) holds {kinds}, not text")


def _texts(rows: Iterable[tuple[str, object]], column: str, on_malformed: OnMalformed) -> Iterator[str | None]:
    """``column`` of rows without a schema, given as pairs of location and row.

    Raises:
        DataError: at the end, if no row has text there.
    """
    found = _TextColumn(column)
    yield from found.texts(rows, on_malformed)
    found.require_text()


def _row(line: str) -> object:
    """The JSON object in ``line``; ``line`` itself if it is not a JSON object."""
    try:
        return json.loads(line) if line.lstrip()[:1] == "{" else line
    except (ValueError, RecursionError):  # RecursionError: thousands of nested lists
        return line


def _array(content: bytes) -> list[object]:
    try:
        items: list[object] = json.loads(decode_piece(content, 0))
    except json.JSONDecodeError as error:
        raise DataError(f"line {error.lineno} is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise DataError("its values are nested too deeply") from None
    if not items:
        raise DataError("it has no data: its array is empty")
    return items


def _table(lines: Iterator[str], column: str, delimiter: str, on_malformed: OnMalformed) -> Iterator[str | None]:
    """``column`` of a CSV file whose first line names the columns. A row without a field for ``column`` is malformed.

    Raises:
        DataError: a row has more fields than there are columns, for example because a delimiter is not quoted; or a
            quote is not closed or not allowed.
    """
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
    columns: list[str] = []
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = max(first, reader.line_num)
            raise DataError(
                f"the row that begins at line {first} is malformed at line {last}: {error}. Close each quote, write a "
                "quote within a quoted field twice, and quote a field that begins with a quote"
            ) from None
        if not row:
            if columns:
                yield ""
        elif not columns:
            columns = row
            require_column(column, columns)
            index = columns.index(column)
        elif any(row[len(columns) :]):
            raise DataError(
                f"line {first} has {len(row)} fields, but there are {len(columns)} columns: quote a field that has "
                f"{delimiter!r} in it"
            )
        elif index < len(row):
            yield row[index] or None
        else:
            on_malformed(f"line {first}")
            yield ""


def start_of_piece(raw: BinaryIO, offset: int) -> int:
    """The first offset from ``offset`` on at which a document of a text file may begin."""
    raw.seek(offset)
    block = raw.read(PIECE_BYTES)
    return offset if offset == 0 or not block else offset + find_cut(block)


def _pieces_in_range(raw: BinaryIO, start: int, stop: int) -> Iterator[str | None]:
    """The documents of a large text file that begin about in ``range(start, stop)``, which is in bytes."""
    end, begin = start_of_piece(raw, stop), start_of_piece(raw, start)
    raw.seek(begin)
    require_utf8(raw.read(min(HEAD_BYTES, end - begin)))
    raw.seek(begin)
    sizes = (min(_BLOCK_BYTES, end - offset) for offset in range(begin, end, _BLOCK_BYTES))
    return _pieces(map(raw.read, sizes), begin, 2 * PIECE_BYTES)


def _pieces(blocks: Iterator[bytes], begin: int = 0, largest: int = LARGEST_TEXT_FILE_BYTES) -> Iterator[str | None]:
    """The documents of a text file that is read sequentially, for example because it is compressed.

    Args:
        begin: offset of the first block in the file.
        largest: up to this size, the blocks are one document.
    """
    buffer = b""
    for block in blocks:
        buffer += block
        while len(buffer) > largest:
            largest = 2 * PIECE_BYTES
            cut = PIECE_BYTES + find_cut(buffer[PIECE_BYTES:largest])
            yield decode_piece(buffer[:cut], begin)
            buffer, begin = buffer[cut:], begin + cut
    if buffer:
        yield decode_piece(buffer, begin)


def decode_piece(piece: bytes, begin: int) -> str:
    """Decode a piece of a text file; NotUTF8Error if it is not UTF-8. ``begin``: its offset in the file."""
    try:
        return piece.decode("utf-8-sig" if begin == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise NotUTF8Error(f"it is not UTF-8 at byte {begin + error.start}; convert the file, as by iconv") from None


def _parquet(raw: BinaryIO, column: str, within: range | None = None) -> Iterator[str | None]:
    """Documents of a Parquet file; reads only ``column``, and with ``within`` only row groups whose first byte is in
    this range."""
    import pyarrow.parquet

    parquet = pyarrow.parquet.ParquetFile(raw, pre_buffer=True)
    require_text(column, parquet.schema_arrow)
    first = 0  # row of the batch
    for group in range(parquet.num_row_groups):
        metadata = parquet.metadata.row_group(group)
        if within is not None and _first_byte(metadata) not in within:
            first += metadata.num_rows
            continue
        for batch in parquet.iter_batches(256, row_groups=[group], columns=[column]):
            yield from _values(batch.column(column), first)
            first += len(batch)


def _first_byte(row_group: Any) -> int:
    """The offset of a row group of a Parquet file."""
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    # Some writers state 0 if there is no dictionary page.
    return min(int(offset) for c in columns for offset in (c.dictionary_page_offset, c.data_page_offset) if offset)


def _arrow(raw: BinaryIO, column: str) -> Iterator[str | None]:
    """Documents of both Arrow formats: streams, which the library ``datasets`` writes, and files."""
    import pyarrow

    if raw.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(raw)
        batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
    else:
        raw.seek(0)
        reader = pyarrow.ipc.open_stream(raw)
        batches = _batches_of_stream(reader, raw)
    require_text(column, reader.schema)
    first = 0  # row of the batch
    for batch in batches:
        yield from _values(batch.column(column), first)
        first += len(batch)


def _batches_of_stream(reader: Any, raw: BinaryIO) -> Iterator[Any]:
    """All batches of an Arrow stream; EOFError if the end-of-stream marker is missing, which pyarrow does not check."""
    end = raw.tell()  # end of the last message
    for batch in reader:
        yield batch
        end = raw.tell()
    if raw.tell() == end:
        raise EOFError("the Arrow stream has no mark of its end: it was cut between two batches")
    if raw.read(1):
        raise EOFError("there is more after the end of the Arrow stream: give each stream a file of its own")


def _values(array: Any, first: int) -> Iterator[str | None]:
    """Texts of an Arrow array of text or binary values, whose first element is row ``first`` of the file."""
    try:
        values = array.to_pylist()
    except UnicodeDecodeError:  # Arrow does not verify that its strings are UTF-8
        for row, value in enumerate(array, first):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                raise _not_utf8_value(f"row {row}", error) from None
        raise
    for row, value in enumerate(values, first):
        yield decode_value(value, f"row {row}")
