"""A held-out part of a text source, by the content of its documents, and what is left of it for training."""

import xxhash

from torchtrain.datasets.data_identity import FileTable
from torchtrain.datasets.data_source import DataSource, Place, SourceSize, utf8
from torchtrain.datasets.packing import DocumentSource
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError


def is_held_out(text: str, share: float) -> bool:
    """Whether the document is in the held-out ``share`` of all documents. Equal documents are on the same side.

    A document of a share is in each larger share, too.
    """
    return xxhash.xxh3_64_intdigest(utf8(text)) < share * 2**64


def part_of(source: DataSource, share: float, *, held_out: bool, section: str) -> DataSource:
    """The held-out documents of a source, or the others: ``DataSource.part``."""
    if isinstance(source, DocumentSource):
        return SourcePart(source, share, held_out=held_out, section=section)
    return source.part(share, held_out=held_out, section=section)


class SourcePart(DocumentSource):
    """The held-out documents of a source, or the others. The numbers of documents stay, those of the other part are
    empty.

    Args:
        source: the whole source.
        share: the share of documents that are held out.
        held_out: whether this is the held-out part.
        section: the section of the source's config, for messages.

    Raises:
        DataError: none of the documents is held out.
    """

    def __init__(self, source: DocumentSource, share: float, *, held_out: bool, section: str) -> None:
        super().__init__(source.parts, source.name)
        self._source = source
        self._share = share
        self._held_out = held_out
        if source.text_bytes is not None:
            self.text_bytes = round(source.text_bytes * (share if held_out else 1 - share))
        if held_out and not any(map(self.document, range(self.parts))):
            raise DataError(
                f"{section}.held_out = {share} holds out none of the {self.parts:,} documents of {source.name}: raise "
                "it, or set it to 0. A text file is one document: to hold out a part of it, divide it into .jsonl, or "
                "validate on another file, by [validation]"
            )

    def document(self, number: int) -> str | None:
        text = self._source.document(number)
        if not text:
            return "" if self._held_out else text  # so that it is counted once
        return text if is_held_out(text, self._share) == self._held_out else ""

    def identity(self) -> str:
        return f"{self._source.identity()}, held out {self._share:g}"

    def file_table(self) -> FileTable:
        return self._source.file_table()

    def describe(self, seed: int, part: int, number: int) -> Place:
        return self._source.describe(seed, part, number)

    def size(self, tokenizer: Tokenizer) -> SourceSize:
        whole, share = self._source.size(tokenizer), self._share if self._held_out else 1 - self._share
        tokens = None if whole.tokens is None else round(whole.tokens * share)
        return SourceSize(tokens, self.text_bytes, is_estimate=True)
