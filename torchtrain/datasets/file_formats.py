"""The documents of one file: the interface of its format, and of how it is compressed.

``FILE_FORMATS`` and ``COMPRESSIONS`` (config/registry.py) list them by the suffix of the files; ``builtin_formats.py``
has those of the core. A row without text, or with an empty one, yields None. A blank or malformed line yields "", so
that document numbers equal row numbers.
"""

import codecs
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

from torchtrain.config.registry import COMPRESSIONS, FILE_FORMATS, suffixes_of
from torchtrain.errors import DataError

HEAD_BYTES = 1 << 12  # the start of a text file, in which its encoding is checked
_BLOCK_BYTES = 1 << 20

OnMalformed = Callable[[str], None]
"""Called with the location of each malformed line, such as "line 3"; the line is skipped."""


class NotUTF8Error(DataError):
    """Text in another encoding than UTF-8."""


def ignore(location: str) -> None:
    """An ``OnMalformed`` that does nothing."""


def read_blocks(raw: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file, or of what decompresses one, from its position on."""
    return iter(lambda: raw.read(_BLOCK_BYTES), b"")


@dataclass(frozen=True)
class Content:
    """An open file, for its format."""

    raw: BinaryIO
    compression: str = ""
    """Entry of ``COMPRESSIONS``; "" if the file is not compressed."""

    def blocks(self) -> Iterator[bytes]:
        """Its bytes, decompressed."""
        blocks: Iterator[bytes] = (
            COMPRESSIONS[self.compression](self.raw) if self.compression else read_blocks(self.raw)
        )
        return blocks


class FileFormat(ABC):
    """How documents are read from files of a suffix. Entries of ``FILE_FORMATS`` are instances without state."""

    is_utf8: ClassVar[bool] = True
    """Whether a file must be text in UTF-8, which is checked."""
    may_be_compressed: ClassVar[bool] = True
    """Whether a file may have a second suffix, of ``COMPRESSIONS``; many binary formats compress by themselves."""

    @abstractmethod
    def read(self, content: Content, column: str, on_malformed: OnMalformed) -> Iterator[str | None]:
        """The documents of a file. Import here the libraries of the format: other data do not need them.

        Args:
            column: the column that contains the text, if the format has columns.
            on_malformed: see ``OnMalformed``.

        Raises:
            NotUTF8Error: the text is in another encoding.
            DataError: the content does not match the format, or there is no text in ``column``.
            Exception: the file is damaged; each format may have its own exceptions.
        """

    def check_head(self, head: bytes) -> None:  # noqa: B027
        """Raise NotUTF8Error if the first ``HEAD_BYTES`` of a file cannot be of this format."""

    def is_splittable(self, size: int) -> bool:  # noqa: ARG002
        """Whether ``read_range`` can read a part of an uncompressed file of ``size`` bytes."""
        return False

    def read_range(
        self, raw: BinaryIO, column: str, start: int, stop: int, on_malformed: OnMalformed
    ) -> Iterator[str | None]:
        """The documents that begin in ``range(start, stop)``, which is in bytes; errors as ``read``.

        Consecutive ranges contain each document of the file once.
        """
        raise NotImplementedError

    def position(self, number: int, documents: int) -> str:  # noqa: ARG002
        """The position of document ``number`` of ``documents`` in a file, in words; "" for one that is the file."""
        return f"row {number}"


def suffixes() -> str:
    """The suffixes of data files, for messages."""
    plain = [f".{suffix}" for suffix in FILE_FORMATS if FILE_FORMATS[suffix].may_be_compressed]
    others = [f".{suffix}" for suffix in FILE_FORMATS if not FILE_FORMATS[suffix].may_be_compressed]
    return (
        f"{', '.join(plain)} (also {_alternatives([f'.{suffix}' for suffix in COMPRESSIONS])}), {_alternatives(others)}"
    )


def _alternatives(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def kind_of(name: str) -> tuple[str, str]:
    """Suffix of the format and of the compression of a file, by its name; ("", "") if it is not a data file."""
    kind, compression = suffixes_of(name)
    if compression and not (kind and FILE_FORMATS[kind].may_be_compressed):
        return "", ""
    return kind, compression


def documents(raw: BinaryIO, name: str, column: str, on_malformed: OnMalformed = ignore) -> Iterator[str | None]:
    """The documents of a file, whose ``name`` determines its format; see ``FileFormat.read``."""
    kind, compression = kind_of(name)
    read: Iterator[str | None] = FILE_FORMATS[kind].read(Content(raw, compression), column, on_malformed)
    return read


def is_splittable(name: str, size: int) -> bool:
    """Whether ``documents_in_range`` can read a part of the file ``name`` of ``size`` bytes."""
    kind, compression = kind_of(name)
    return not compression and bool(FILE_FORMATS[kind].is_splittable(size))


def documents_in_range(
    raw: BinaryIO, name: str, column: str, start: int, stop: int, on_malformed: OnMalformed = ignore
) -> Iterator[str | None]:
    """The documents of a part of a file; see ``FileFormat.read_range``."""
    read: Iterator[str | None] = FILE_FORMATS[kind_of(name)[0]].read_range(raw, column, start, stop, on_malformed)
    return read


def position_of(name: str, number: int, documents: int) -> str:
    """The position of document ``number`` of ``documents`` in the file ``name``: its line from 1 on, or its row or
    number from 0 on; "" for the only document of a text file, or if ``name`` is not a data file."""
    kind, _ = kind_of(name)
    if kind:
        return str(FILE_FORMATS[kind].position(number, documents))
    return f"document {number}" if documents > 1 else ""


def require_utf8(head: bytes) -> None:
    """Raise NotUTF8Error if ``head``, the first bytes of a text file, is not UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
        offset = head.find(b"\0")  # as in UTF-16
    except UnicodeDecodeError as error:
        offset = error.start
    if offset >= 0:
        raise NotUTF8Error(f"it is not UTF-8 at byte {offset}; convert the file, as by iconv, or leave it out")


def require_utf8_file(raw: BinaryIO, name: str, *, whole: bool) -> None:
    """Raise NotUTF8Error if a file of a text format is not UTF-8; without ``whole``, only its first block is read."""
    kind, compression = kind_of(name)
    if not FILE_FORMATS[kind].is_utf8:
        return
    blocks: Iterator[bytes] = itertools.islice(Content(raw, compression).blocks(), None if whole else 1)
    first = next(blocks, b"")
    FILE_FORMATS[kind].check_head(first[:HEAD_BYTES])
    blocks = itertools.chain([first], blocks)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    for block in itertools.chain(blocks, [b""] if whole else []):
        begun = len(decoder.getstate()[0])  # bytes of a character that the block before began
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise NotUTF8Error(
                f"line {line} is not UTF-8 at byte {offset - begun + error.start} of the text; convert the file, as by "
                "iconv"
            ) from None
        offset += len(block)
        line += block.count(b"\n")
