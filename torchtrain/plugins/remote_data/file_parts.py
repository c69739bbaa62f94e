"""Parts of files that are streamed: ranges of bytes, row groups of Parquet, or every n-th document of a whole file."""

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtrain.datasets.builtin_formats import LARGEST_TEXT_FILE_BYTES
from torchtrain.datasets.file_formats import OnMalformed, is_splittable, kind_of, position_of
from torchtrain.datasets.text_input import InputFile, Split, read_split
from torchtrain.errors import DataError, TorchtrainError

PART_BYTES = 128 << 20  # a file that can be read in ranges has one part for each such number of bytes


@dataclass(frozen=True)
class _Range:
    """Where the documents of a part are: every ``step``-th document of ``split``, from ``first`` on."""

    split: Split
    first: int
    step: int = 1
    documents_before: int | None = None
    """Number of documents of the file before ``split``, if it is known."""


@dataclass(frozen=True)
class FilePart:
    """Part ``number`` of the ``count`` parts of a file. Together they contain each of its documents once."""

    file: InputFile
    number: int
    count: int

    def read(self, column: str, start: int, on_malformed: OnMalformed) -> Iterator[str | None]:
        """The documents from number ``start`` of the part on; raises the errors of ``read_split``."""
        found, index = self._find(start), 0
        # All parts of a file that cannot be read in ranges read all of its lines.
        counts = found.step == 1 or self.number == 0

        def count_malformed(location: str) -> None:
            if counts and index >= found.first:
                on_malformed(f"{self.file.location}: {location}")

        for text in read_split(self.file, column, found.split, count_malformed):
            if index >= found.first and (index - found.first) % found.step == 0:
                yield text
            index += 1

    def position(self, document: int) -> str:
        """The position in the file of a document, by its number in the part."""
        found = self._find(document)
        name, (kind, compression) = self.file.name, kind_of(self.file.name)
        if found.documents_before is not None:
            is_one_document = self.file.size <= LARGEST_TEXT_FILE_BYTES and not compression
            return position_of(name, found.documents_before + found.first, 1 if is_one_document else 2)
        if kind == "jsonl":
            return f"the line at byte {self._offset_of_line(found)}"
        return f"document {document} of part {self.number} of {self.count}"

    def _offset_of_line(self, found: _Range) -> int:
        """The offset of line ``found.first`` of those that begin in ``found.split``."""
        with self.file.open() as raw, io.BufferedReader(raw) as lines:  # type: ignore[type-var]
            lines.seek(found.split.start - 1)
            for _ in range(1 + found.first):  # and the rest of the line that began before
                lines.readline()
            return lines.tell()

    def _find(self, start: int) -> _Range:
        """The documents from number ``start`` of the part on."""
        number, count, size = self.number, self.count, self.file.size
        whole = _Range(Split(0, 0, size), number + start * count, count, documents_before=0)
        if kind_of(self.file.name)[0] == "parquet" and (count > 1 or start > 0):
            groups = _row_groups(self.file)
            if len(groups) < count:
                return whole
            begin, end = len(groups) * number // count, len(groups) * (number + 1) // count
            rows = [rows for _, rows in groups]
            before = sum(rows[:begin])
            while begin < end - 1 and start >= rows[begin]:  # groups before the first document are not read
                start, before, begin = start - rows[begin], before + rows[begin], begin + 1
            stop = groups[end][0] if end < len(groups) else size
            return _Range(Split(0, groups[begin][0], stop), start, documents_before=before)
        if count == 1 or not is_splittable(self.file.name, size):
            return whole
        split = Split(0, size * number // count, size * (number + 1) // count)
        return _Range(split, start, documents_before=0 if split.start == 0 else None)


def _row_groups(file: InputFile) -> list[tuple[int, int]]:
    """Offset and number of rows of each row group of a Parquet file; DataError if it is damaged."""
    import pyarrow.parquet  # takes a second, and other formats do not need it

    groups = []
    try:
        with file.open() as raw:
            metadata = pyarrow.parquet.ParquetFile(raw).metadata
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            columns = [group.column(number) for number in range(group.num_columns)]
            # Some writers state 0 if there is no dictionary page.
            offsets = [page for c in columns for page in (c.dictionary_page_offset, c.data_page_offset) if page]
            groups.append((min(offsets), group.num_rows))
    except TorchtrainError:
        raise
    except Exception as error:  # pyarrow has several
        raise DataError(f"{file.location} cannot be read, it seems damaged: {error}") from error
    return groups


def divide_files(files: Sequence[InputFile], readers: int) -> list[FilePart]:
    """The parts of files for so many readers, which read them in another order in each epoch.

    A file that can be read in ranges has parts of about ``PART_BYTES``, so that a run resumes without reading much
    again. Each file has more parts if there were fewer parts than readers, and the largest one as many that the number
    of parts is a multiple of ``readers``: so all readers end an epoch together.
    """
    fewest = math.ceil(readers / len(files))
    counts = []
    for file in files:
        # A part of Parquet has whole row groups, which may be large.
        has_ranges = is_splittable(file.name, file.size) and kind_of(file.name)[0] != "parquet"
        counts.append(max(fewest, -(-file.size // PART_BYTES)) if has_ranges else fewest)
    splittable = [number for number, file in enumerate(files) if is_splittable(file.name, file.size)]
    if splittable:
        counts[max(splittable, key=lambda number: files[number].size)] += -sum(counts) % readers
    parts = ([FilePart(file, number, of) for number in range(of)] for file, of in zip(files, counts, strict=True))
    return list(itertools.chain.from_iterable(parts))
