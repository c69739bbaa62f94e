"""Text sources: documents on a local disk or in memory."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from torchtrain.datasets.data_identity import FileTable, Identity
from torchtrain.datasets.data_source import Place
from torchtrain.datasets.file_formats import OnMalformed
from torchtrain.datasets.packing import DocumentSource
from torchtrain.errors import DataError
from torchtrain.files import MISSING, with_retries

if TYPE_CHECKING:  # takes a second to import, and text files that are read in place do not need it
    import datasets

T = TypeVar("T")
Documents = Callable[[int, OnMalformed], Iterator[str | None]]

# Pauses before each retry of reading data, about four minutes in total.
PAUSES_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60)


def read_with_retries(read: Callable[[], T], path: Path) -> T:
    """Call ``read()``, which reads a file that existed at the start of the run, with retries for about four minutes."""
    try:
        return with_retries(read, path, PAUSES_SECONDS)
    except MISSING as error:
        raise DataError(f"{path} was there when the run began, and is missing now: restore it") from error


class Texts(Protocol):
    """Documents by their number; None is a document that is not text."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> str | None: ...


class LocalText(DocumentSource):
    """Documents on a local disk or in memory.

    Args:
        texts: the documents.
        identify: returns the identity of the documents. Of local files above data.verify_gib it hashes only parts,
            unless ``whole=True``.
        text_bytes: total size of all documents in UTF-8.
        place_of: returns where the document of a number is stored; None if only its number is known.
    """

    def __init__(
        self,
        texts: Texts,
        name: str,
        identify: Callable[..., Identity],
        text_bytes: int,
        place_of: Callable[[int], Place] | None = None,
    ):
        super().__init__(len(texts), name)
        self._place_of = place_of
        self._texts = texts
        self._identify = identify
        self.text_bytes = text_bytes

    @cached_property
    def _identity(self) -> Identity:
        return self._identify()

    def identity(self) -> str:
        return self._identity.text

    def file_table(self) -> FileTable:
        return self._identity.files

    def full_identity(self) -> str:
        return self._identify(whole=True).text

    def document(self, number: int) -> str | None:
        return self._texts[number]

    def describe(self, seed: int, part: int, number: int) -> Place:
        return super().describe(seed, part, number) if self._place_of is None else self._place_of(part)


class TextColumn:
    """The column "text" of a dataset."""

    def __init__(self, dataset: "datasets.Dataset"):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int, /) -> str | None:
        text: str | None = self.dataset[number]["text"]
        return text


class DatasetText(LocalText):
    """The documents in the column "text" of a dataset."""

    def __init__(
        self,
        dataset: "datasets.Dataset",
        name: str,
        identify: Callable[..., Identity],
        text_bytes: int,
        place_of: Callable[[int], Place] | None = None,
    ):
        super().__init__(TextColumn(dataset), name, identify, text_bytes, place_of)
        self._dataset = dataset

    def read_all(self, numbers: range) -> Iterator[str | None]:
        for rows in self._dataset.select(numbers).iter(256):
            yield from rows["text"]
