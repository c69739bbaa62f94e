"""The interface of data sources, which ``DATA_SOURCES`` (config/registry.py) lists by name.

To add one, subclass ``DocumentSource`` or ``TextSource`` (packing.py), or ``DataSource`` for data that are tokens
already, and register the class (docs/extending.md).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from torchtrain.config.schema import SourceConfig
from torchtrain.datasets.data_identity import FileTable
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError

Tokens = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.float64]
State = tuple[int, ...]
One = TypeVar("One", bound=SourceConfig)


def utf8(text: str) -> bytes:
    """``text`` in UTF-8, with "?" in place of a lone surrogate, which JSON can contain, as tokenizers read it.

    Hashes are of these bytes, because some formats in which a document is stored cannot contain a lone surrogate.
    """
    return text.encode("utf-8", "replace")


@dataclass(frozen=True)
class SavedPosition:
    """The position of a source in a run with another global batch size or sequence length."""

    states: npt.NDArray[np.int64]
    """The state of the stream of each row of that global batch, of shape (rows, k)."""
    windows_drawn: int
    seq_len: int
    readers: int
    """Number of readers of streamed data; consecutive rows share one."""


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
    """``text_hash`` of each document that is named by its text."""
    places: frozenset[Place] = frozenset()
    """Of documents in prepared data."""
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
    """Of the document's text (datasets/exclusions.py), where it is text."""
    is_excluded: bool = False
    """Whether it is one of ``Exclusions``."""


class Stream(ABC):
    """Windows of ``seq_len + 1`` tokens for one or more rows of the batch."""

    state: State
    """Position of the next window; set it to resume there. Always of the same length."""

    reads_ahead: bool = False
    """Whether ``read_ahead`` has an effect."""

    can_skip: ClassVar[bool] = False
    """Whether ``fill`` leaves ``state`` as it is, and depends on ``windows_drawn`` alone: then windows can be skipped
    without reading them."""

    def read_ahead(self, windows_drawn: Sequence[int]) -> None:  # noqa: B027
        """Start reading the windows that ``fill`` will be called for, with these arguments."""

    @abstractmethod
    def fill(
        self, windows: Sequence[Tokens], windows_drawn: Sequence[int], sizes: Sequence[Bytes] | None = None
    ) -> list[int]:
        """Write the next tokens into each window.

        Args:
            windows: int64 arrays of shape (seq_len + 1,). A token may be ``IGNORE_INDEX`` (``Exclusions``).
            windows_drawn: for each window, how many the source has returned for all rows of all ranks before it.
            sizes: for each window, an array for the number of bytes of text that each token stands for.

        Returns:
            The number of tokens written into each window; fewer than fit only at the end of the data.

        Raises:
            DataError: the whole source does not fill one window, although it is repeated.
            StorageError: the file system or network does not respond.
        """

    def locate(self, windows_drawn: Sequence[int]) -> list[list[Piece]] | None:  # noqa: ARG002
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
    readers: int = 1
    """Number of readers of streamed data."""
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
    readers: int
    """Number of readers of streamed data; it divides the global batch size."""
    seed: int
    repeat: bool
    """At its end, read the source again in another order."""
    sequential: bool = False
    """Whether the windows of a step follow each other in one sequence, where the source has its documents at hand, so
    that they do not depend on the global batch size. Not if the data are repeated."""
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


class SourceType(ABC):
    """Opens sources of one type, and answers questions about them before. Its class methods are called, without an
    instance. A ``DataSource`` class is its own type: its ``open`` calls the constructor.
    """

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> Any:  # noqa: ARG003
        """Called on rank 0 only, before ``open``, to query a server once for all ranks. The result is pickled."""
        return None

    @classmethod
    @abstractmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: Any) -> "DataSource":
        """Open a source on each rank. ``answer`` is the result of ``query_on_rank0``.

        Raises:
            DataError: the data are missing, or do not match ``config``. An error of one rank is raised on all ranks.
        """

    @classmethod
    def pin(cls, config: One, saved: Callable[[], Sequence[SourceConfig]], section: str) -> One:  # noqa: ARG003
        """Called on rank 0 only: ``config`` with what may change in the course of a run, such as the newest revision.

        Args:
            config: the config of the source.
            saved: returns the sources in the checkpoint that the run resumes from, if there is one.
            section: the section of ``config``, for messages.
        """
        return config

    @classmethod
    def is_streamed(cls, config: SourceConfig) -> bool:  # noqa: ARG003
        """Whether the source is certain to be streamed: the number of ranks then divides that of readers.

        Of some sources, only opening them tells (``TextSource.one_reader_per_row``).
        """
        return False


class FolderFormat(ABC):
    """Data of which ``data.path`` is a single folder, such as prepared data; see ``FOLDER_FORMATS``."""

    markers: tuple[str, ...] = ()
    """Names of files that only folders of this format have, so that no folder of text contains them."""

    @classmethod
    @abstractmethod
    def recognizes(cls, config: SourceConfig, context: SourceContext) -> bool:
        """Whether ``config.path``, which may also be a list of paths, is such a folder; called on rank 0 only.

        Raises:
            DataError: it is, and cannot be used.
        """

    @classmethod
    @abstractmethod
    def open(cls, config: SourceConfig, context: SourceContext) -> "DataSource":
        """Open the folder on each rank; raises as ``SourceType.open`` does."""


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

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: Any) -> "DataSource":  # noqa: ARG003
        return cls(config, context)  # type: ignore[call-arg]

    @abstractmethod
    def identity(self) -> str:
        """A text that identifies the content of the data, independent of where they are stored; without "; ".

        It is stored in checkpoints: a run does not resume with other data. It must be the same on all ranks.
        """

    def file_table(self) -> FileTable:
        """The files of the source, if it has any. An error names those that differ from the files of a checkpoint."""
        return FileTable()

    def places_in(self, places: Collection[Place]) -> set[Place]:  # noqa: ARG002
        """Those of ``places`` that are in files of the source, if it has its documents by their places."""
        return set()

    def part(self, share: float, *, held_out: bool, section: str) -> "DataSource":  # noqa: ARG002
        """The ``share`` of the documents that is held out (``is_held_out`` in held_out.py), or the others.

        A ``DocumentSource`` need not override it. ``section``: the section of the source's config, for messages.

        Raises:
            DataError: the source cannot be divided, or none of its documents is held out.
        """
        raise DataError(
            f"{section}.held_out = {share:g} needs text or prepared data, and {self.name} is neither: set it to 0, and "
            "give held-out data of their own in [validation]"
        )

    @abstractmethod
    def streams(self, request: StreamRequest) -> list[Stream]:
        """One stream for each of ``request.rows``; rows may share a stream."""

    def size(self, tokenizer: Tokenizer) -> SourceSize:  # noqa: ARG002
        """The size of the source, for the log. It may read a little of the data."""
        return SourceSize()
