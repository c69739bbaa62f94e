"""The interface of data sources, which ``DATA_SOURCES`` (config/registry.py) lists by name.

A source is text, which is tokenized once before it is trained on (``TextInput``; text_input.py has subclasses), or it
returns windows of tokens itself (``DataSource``). To add one, subclass one of them and register the class
(docs/adding-a-data-source.md).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, Union

import numpy as np
import numpy.typing as npt
import xxhash

from torchtrain.config.component import Component
from torchtrain.datasets.data_identity import FileTable, Identity
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError

Tokens = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.float64]
State = npt.NDArray[np.int64]
One = TypeVar("One", bound=SourceConfig)


def utf8(text: str) -> bytes:
    """``text`` in UTF-8, with "?" in place of a lone surrogate, which JSON can contain, as tokenizers read it.

    Hashes are of these bytes, because some formats in which a document is stored cannot contain a lone surrogate.
    """
    return text.encode("utf-8", "replace")


def text_bytes(text: str) -> int:
    """Number of bytes of ``text`` in UTF-8."""
    return len(utf8(text))


def text_hash(text: str) -> str:
    """XXH3 of 128 bits of ``text`` in UTF-8, in hex, by which a document is named wherever it is stored."""
    return xxhash.xxh3_128_hexdigest(utf8(text))


def is_held_out(text: str, share: float) -> bool:
    """Whether the document is in the held-out ``share`` of all documents. Equal documents are on the same side.

    It depends on the high 64 bits of ``text_hash``. A document of a share is in each larger share, too.
    """
    return xxhash.xxh3_128_intdigest(utf8(text)) >> 64 < share * 2**64


@dataclass(frozen=True)
class SavedPosition:
    """The position of a source in a run with another global batch size or sequence length."""

    states: State
    """The state of each row of that global batch, of shape (rows, k)."""
    windows_drawn: int
    seq_len: int


@dataclass(frozen=True)
class Place:
    """Where a document is stored."""

    file: str
    """Path or URL of its file, or the name of the source."""
    position: str = ""
    """Its position in the file, such as "line 7"; empty if the document is the whole file."""


@dataclass(frozen=True)
class Exclusions:
    """Documents that are not trained on (datasets/exclusions.py).

    Their tokens stay where they are, so that all other tokens of all rows do, too. But they are ``IGNORE_INDEX``: they
    have no loss, and no other token sees what they were.
    """

    texts: frozenset[str] = frozenset()
    """``text_hash`` of each document."""
    identity: str = ""
    """Their number, and a hash of the list; "" if there is none."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a window that are of one document."""

    place: Place
    offset: int
    """Number of tokens of the document before them."""
    tokens: int
    """Number of tokens."""
    text_hash: str = ""
    """Of the document's text, where it is known."""
    is_excluded: bool = False
    """Whether it is one of ``Exclusions``."""


class Stream(ABC):
    """Windows of ``seq_len + 1`` tokens of a source for this rank's rows of the global batch."""

    state: State
    """The position of each of these rows besides the number of windows drawn, int64 of shape (rows, k). k may be 0, and
    does not change. Set it to resume there."""

    reads_ahead: bool = False
    """Whether ``read_ahead`` has an effect."""

    can_skip: ClassVar[bool] = False
    """Whether ``fill`` leaves ``state`` as it is, and depends on ``windows_drawn`` alone: then windows can be skipped
    without reading them."""

    def read_ahead(self, windows_drawn: Sequence[int]) -> None:  # noqa: B027
        """Start reading the windows that ``fill`` will be called for."""

    @abstractmethod
    def fill(
        self,
        rows: Sequence[int],
        windows: Sequence[Tokens],
        windows_drawn: Sequence[int],
        sizes: Sequence[Bytes] | None = None,
    ) -> list[int]:
        """Write the next window of each of ``rows``.

        Args:
            rows: numbers among this rank's rows, increasing.
            windows: for each of them an int64 array of shape (seq_len + 1,). A token may be ``IGNORE_INDEX``
                (``Exclusions``).
            windows_drawn: for each of them, how many windows the source has returned before it for all rows of all
                ranks.
            sizes: for each of them, an array for the number of bytes of text that each token stands for.

        Returns:
            The number of tokens written into each window; fewer than fit only at the end of the data.

        Raises:
            DataError: the whole source does not fill one window, although it is repeated.
            StorageError: the file system or network does not respond.
        """

    def locate(self, rows: Sequence[int], windows_drawn: Sequence[int]) -> list[list[Piece]] | None:  # noqa: ARG002
        """The pieces of the windows that ``fill`` would write with these arguments; None if they are not known.

        ``state`` does not change. It may read the data again, and is not called in training.
        """
        return None

    def resume(self, saved: SavedPosition) -> int:  # noqa: ARG002
        """Set ``state`` to continue after ``saved``, and return how many windows of this length count as drawn.

        Raises:
            DataError: this kind of stream cannot continue with another batch or sequence length.
        """
        raise DataError(
            f"{type(self).__name__} cannot continue with another training.global_batch_size or training.seq_len; set "
            "the old ones again, or override its method resume"
        )


@dataclass(frozen=True)
class SourceContext:
    """Arguments for opening a source, besides its config."""

    section: str
    """The section of its config, such as "data" or "data.sources[1]", for messages."""
    tokenizer: Tokenizer
    global_batch_size: int = 1
    verify_bytes: float = math.inf
    """Data up to this size are hashed in full."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """``JobConfig.plugins``, for ``section_of``."""
    held_out: bool = False
    """Whether the held-out part of the source is read (``DataSource.part``)."""


@dataclass(frozen=True)
class StreamRequest:
    """The windows that a rank needs from a source."""

    tokenizer: Tokenizer
    seq_len: int
    global_batch_size: int
    rows: range
    """This rank's rows of the global batch."""
    seed: int
    repeat: bool
    """At its end, read the source again in another order."""
    longest_seq_len: int = 0
    """The largest ``seq_len`` that the run is planned to have in any of its parts; 0: this one."""
    packing: str = "cut"
    """``data.packing``."""
    exclude: Exclusions = Exclusions()
    """The documents whose tokens are replaced by ``IGNORE_INDEX``, by a source that ``can_exclude``."""


@dataclass(frozen=True)
class SourceSize:
    """The size of a source; None where it is not known."""

    tokens: int | None = None
    text_bytes: int | None = None
    """Of the text, in UTF-8."""
    is_estimate: bool = False
    """Whether ``tokens`` is an estimate."""


class SourceType(Component, ABC):
    """Opens sources of one type, and answers questions about them before. Its class methods are called, without an
    instance. A source of a type of its own is that type: ``open`` calls the constructor, and ``Options`` are
    those of [data.options].
    """

    @classmethod
    def data_option(cls, config: SourceConfig) -> str:  # noqa: ARG003
        """The option that names the data of ``config``, for messages and checkpoints."""
        return "type"

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> Any:  # noqa: ARG003
        """Called on rank 0 only, before ``open``, to query a server once for all ranks. The result is pickled."""
        return None

    @classmethod
    def open(
        cls,
        config: SourceConfig,
        context: SourceContext,
        answer: Any,  # noqa: ARG003
    ) -> Union["DataSource", "TextInput"]:
        """Open a source on each rank. ``answer`` is the result of ``query_on_rank0``.

        Returns:
            Text, which is then tokenized, or a source of windows.

        Raises:
            DataError: the data are missing, or do not match ``config``. An error of one rank is raised on all ranks.
        """
        opened: DataSource | TextInput = cls(config, context)  # type: ignore[call-arg, assignment]
        return opened

    @classmethod
    def open_text(cls, config: SourceConfig, context: SourceContext) -> "TextInput":
        """Open the text of the source, for torchtrain.prepare; called in each of its processes.

        Raises:
            DataError: the source is not text, or already tokenized.
        """
        opened = cls.open(config, context, cls.query_on_rank0(config, context))
        if isinstance(opened, DataSource):
            raise DataError(
                f"{context.section}: a source of the type {config.source_type!r} cannot be tokenized: it returns tokens"
            )
        return opened

    @classmethod
    def pin(cls, config: One, saved: Callable[[], Sequence[SourceConfig]], section: str) -> One:  # noqa: ARG003
        """Called on rank 0 only: ``config`` with what may change in the course of a run, such as the newest revision.

        Args:
            config: the config of the source.
            saved: returns the sources in the checkpoint that the run resumes from, if there is one.
            section: the section of ``config``, for messages.
        """
        return config


@dataclass
class SkippedText:
    """What was skipped while a shard of text was read."""

    malformed: int = 0
    """Malformed lines."""
    first_malformed: str = ""
    """File and location of the first malformed line."""
    not_utf8: list[str] = field(default_factory=list)
    """Files that are not UTF-8."""

    def count_malformed(self, location: str) -> None:
        self.malformed += 1
        self.first_malformed = self.first_malformed or location


class TextInput(SourceType):
    """Documents of text, divided into shards that processes read independently of each other, each from its beginning.

    The division depends on the content and its size alone, so that any number of processes tokenizes the same shards.
    """

    name: str
    """A name for messages."""
    shard_sizes: Sequence[int]
    """Size of each shard, in bytes or another unit, for the progress."""
    files: Sequence[str] = ()
    """Path or URL of each file, if the text is in files."""
    options: str = ""
    """The options that select the documents of its content."""

    @abstractmethod
    def identify(self) -> Identity:
        """A text that identifies the content, independent of where it is stored, and the table of its files."""

    def size(self, tokenizer: Tokenizer) -> SourceSize:  # noqa: ARG002
        """The size of the text, as far as it is known before it is tokenized."""
        return SourceSize()

    def cache_key(self) -> str:
        """A text that differs if the content may: by default the identity."""
        return self.identify().text

    @abstractmethod
    def read(self, shard: int, skipped: SkippedText) -> Iterator[tuple[int, int, str | None]]:
        """Number of the file, number of the document in it (from the beginning of the shard on), and text of each
        document of a shard; None for a document that is not text, and "" for a line that is skipped."""

    def texts(self) -> Iterator[str]:
        """All documents in their order, without those that are empty or not text."""
        for shard in range(len(self.shard_sizes)):
            for _, _, text in self.read(shard, SkippedText()):
                if text:
                    yield text

    def content_hash(self, shard: int) -> str:  # noqa: ARG002
        """A hash of the input of a shard; "" if ``identify`` hashes all content.

        Raises:
            DataError: the input has changed since it was opened.
        """
        return ""

    def require_unchanged(self) -> None:
        """Raise DataError if the text has changed since it was opened."""


class DataSource(SourceType):
    """A source of windows of tokens. It is opened in one thread and read in another.

    The window of a row of a step may depend on ``StreamRequest`` without ``rows``, on the config of the source, on the
    row's number in the global batch and on the step, but not on which rank reads it.
    """

    name: str
    """A name for messages."""
    can_exclude: ClassVar[bool] = False
    """Whether its streams leave out ``StreamRequest.exclude``."""
    packings: ClassVar[tuple[str, ...]] = ("cut",)
    """The values of ``StreamRequest.packing`` that its streams know."""

    @abstractmethod
    def identity(self) -> str:
        """A text that identifies the content of the data, independent of where they are stored; without "; ".

        It is stored in checkpoints: a run does not resume with other data. It must be the same on all ranks.
        """

    def file_table(self) -> FileTable:
        """The files of the source, if it has any. An error names those that differ from the files of a checkpoint."""
        return FileTable()

    def part(self, share: float, *, held_out: bool, section: str) -> "DataSource":  # noqa: ARG002
        """The ``share`` of the documents that is held out (``is_held_out``), or the others.

        ``section``: the section of the source's config, for messages.

        Raises:
            DataError: the source cannot be divided, or none of its documents is held out.
        """
        raise DataError(
            f"{section}.held_out = {share:g} needs text, and {self.name} is none: set it to 0, and "
            "give held-out data of their own in [validation]"
        )

    @abstractmethod
    def stream(self, request: StreamRequest) -> Stream:
        """The windows for ``request.rows``."""

    def size(self, tokenizer: Tokenizer) -> SourceSize:  # noqa: ARG002
        """The size of the source, for the log. It may read a little of the data."""
        return SourceSize()
