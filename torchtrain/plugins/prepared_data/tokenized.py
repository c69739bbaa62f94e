"""Tokenized data, which ``torchtrain.prepare`` writes: a data source that reads exactly the windows that it needs.

A folder contains ``manifest.json`` and two files per shard: ``<shard>.tokens`` (little-endian uint16, or uint32 for a
vocabulary above 65,536: bos, text and eos of each document) and ``<shard>.documents`` (little-endian int64: the offset
of each document in tokens, and the number of tokens).
"""

import functools
import itertools
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from torchtrain.config.parse import from_toml
from torchtrain.config.schema import require
from torchtrain.datasets.data_identity import HASH_DIGITS, DataFile, FileTable
from torchtrain.datasets.data_source import (
    Bytes,
    DataSource,
    Piece,
    Place,
    SavedPosition,
    SourceSize,
    State,
    Stream,
    StreamRequest,
    Tokens,
)
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import ConfigError, DataError
from torchtrain.files import MISSING, is_url, parse_json
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger
from torchtrain.plugins.prepared_data.data_folder import DataFolder, Range
from torchtrain.plugins.prepared_data.window_order import WindowOrder, block_size, power_of_two

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"  # a manifest without shards, until all shards are written
HELD_OUT = "held_out"  # a folder in that of the others, with the documents that data.held_out holds out
_FORMAT: Literal[1] = 1
POSITION = re.compile(r"document ([0-9]{1,18}), from token ([0-9]{1,18})")
SHARD_NAME = re.compile(r"shard-[0-9]{5,}")


@dataclass(frozen=True)
class Shard:
    """The entry of a shard in the manifest."""

    name: str
    tokens: int
    """Number of tokens."""
    documents: int
    """Number of documents."""
    bytes: int
    """Size of its text in UTF-8."""
    skipped: int
    """Number of documents that are not text, which were skipped."""
    tokens_hash: str
    documents_hash: str
    token_bytes: int
    """Bytes that its tokens stand for, by the tokenizer's ``token_bytes``."""
    malformed: int = 0
    """Number of malformed lines of the input, which were skipped."""
    first_malformed: str = ""
    """File and location of the first malformed line."""
    not_utf8: tuple[str, ...] = ()
    """Files of the input that were skipped because they are not UTF-8."""

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Shard":
        """The shard in parsed JSON; TypeError if it is not one."""
        return Shard(**{**content, "not_utf8": tuple(content.get("not_utf8", ()))})


@dataclass(frozen=True)
class PreparedManifest:
    """Metadata of a folder of tokenized data."""

    tokenizer_hash: str
    vocab_size: int
    source: str
    """Name of the source."""
    source_fingerprint: str
    """Identity of the source."""
    shard_count: int
    """Number of shards, also before they are written."""
    shards: tuple[Shard, ...] = ()
    held_out: float = 0.0
    """The share of the documents that is in the folder ``HELD_OUT`` instead."""
    format: Literal[1] = _FORMAT

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @staticmethod
    def read(folder: DataFolder, label: str, name: str = MANIFEST) -> "PreparedManifest":
        """Read a manifest; DataError if the file is missing, damaged or of another version."""
        try:
            content = parse_json(folder.read(name), f"{label}: its {name}", DataError)
        except MISSING as error:
            raise DataError(f"{label}: cannot read its {name}: {error!r}; prepare the data again") from error
        try:
            manifest = from_toml(PreparedManifest, _without_null(content))
            _check(manifest)
        except (ConfigError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{label}: its {name} is damaged: {error}; prepare the data again") from error
        return manifest


def _without_null(content: Any) -> Any:
    """``content`` without the keys whose value is null, which have their defaults."""
    if isinstance(content, list):
        return [_without_null(item) for item in content]
    if isinstance(content, dict):
        return {key: _without_null(value) for key, value in content.items() if value is not None}
    return content


def _check(manifest: PreparedManifest) -> None:
    """Raise ConfigError if the values of ``manifest`` contradict each other."""
    names = [shard.name for shard in manifest.shards]
    require(len(set(names)) == len(names), "it names a shard twice")
    require(manifest.vocab_size >= 1, f"vocab_size = {manifest.vocab_size}")
    for shard in manifest.shards:
        require(SHARD_NAME.fullmatch(shard.name) is not None, f"{shard.name!r} is not the name of a shard")
        counts = {key: value for key, value in vars(shard).items() if isinstance(value, int)}
        for key, count in counts.items():
            require(0 <= count < 2**60, f"{shard.name} has {key} = {count}")


class TokenizedDataset(DataSource):
    """All tokens of a folder as one sequence, which is read on demand.

    Args:
        verify_bytes: tokens up to this total size are hashed and compared with the manifest; not on an object store,
            which verifies its objects itself.
        label: name for messages.

    Raises:
        DataError: a shard is missing or does not match the manifest; or the data were prepared with another tokenizer.
    """

    can_exclude = True

    def __init__(self, folder: DataFolder, tokenizer_hash: str, verify_bytes: float, label: str):
        self.name = label
        self.folder = folder
        manifest = PreparedManifest.read(folder, label)
        if manifest.tokenizer_hash != tokenizer_hash:
            raise DataError(
                f"{label} was prepared with another tokenizer (SHA-256 {manifest.tokenizer_hash[:12]}...) than "
                f"model.tokenizer_path names ({tokenizer_hash[:12]}...); set that one, or prepare the data again"
            )
        self._manifest = manifest
        self._dtype = manifest.dtype
        self._verify_bytes = verify_bytes
        self.held_out = manifest.held_out
        """The share of the documents that is not in this folder, but in its folder ``HELD_OUT``."""
        self.skipped = sum(shard.skipped for shard in manifest.shards)
        sizes = self._sizes = folder.sizes()
        for shard in manifest.shards:
            name, expected = f"{shard.name}.tokens", shard.tokens * manifest.dtype.itemsize
            size = sizes.get(name)
            if size != expected:
                found = "is missing" if size is None else f"has {size} bytes, not {expected}"
                raise DataError(f"{label}: {name} {found}; prepare the data again into an empty folder")
        self._ends = np.cumsum([shard.tokens for shard in manifest.shards], dtype=np.int64)
        counted = sum(shard.token_bytes for shard in manifest.shards)
        self.byte_scale = sum(shard.bytes for shard in manifest.shards) / counted if counted > 0 else 1.0
        """Bytes of all texts, divided by the sum of the tokenizer's ``token_bytes`` of all tokens."""
        if not folder.reads_ahead and len(self) * manifest.dtype.itemsize <= verify_bytes:
            verify(folder, label)

    def identity(self) -> str:
        """Number and hash of all tokens."""
        hashes = "".join(shard.tokens_hash for shard in self._manifest.shards)
        return f"{len(self):,} tokens, hash {xxhash.xxh3_128_hexdigest(hashes.encode())[:16]}"

    def file_table(self) -> FileTable:
        """The files of tokens, by the manifest."""
        entries = (
            DataFile(
                self._file(shard),
                shard.tokens * self._manifest.dtype.itemsize,
                shard.tokens_hash[:HASH_DIGITS],
            )
            for shard in self._manifest.shards
        )
        return FileTable.of(entries, len(self._manifest.shards))

    def size(self, tokenizer: Tokenizer) -> SourceSize:  # noqa: ARG002
        return SourceSize(len(self), sum(shard.bytes for shard in self._manifest.shards))

    def part(self, share: float, *, held_out: bool, section: str) -> DataSource:
        # A larger share has the documents of ``share``, too.
        if share > self.held_out or (held_out and share != self.held_out):
            raise DataError(
                f"{section}.held_out = {share:g} must be that with which {self.name} was prepared, {self.held_out:g}: "
                f"set it to that, or prepare the data again with --data.held_out {share:g}"
            )
        if not held_out:
            return self
        inner = self.folder.inner(HELD_OUT)
        if MANIFEST not in inner.sizes():
            raise DataError(
                f"{inner.location}, the part of {self.name} that {section}.held_out holds out, is missing or only "
                "partly prepared: run torchtrain.prepare again to finish it"
            )
        return TokenizedDataset(inner, self._manifest.tokenizer_hash, self._verify_bytes, f"{self.name} (held out)")

    def streams(self, request: StreamRequest) -> list[Stream]:
        stream = TokenWindowStream(self, request)
        return [stream] * len(request.rows)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts: Sequence[int], outs: Sequence[npt.NDArray[np.int64]]) -> None:
        """Fill each of ``outs`` with the tokens from its start on.

        Raises:
            StorageError: the file system or network fails for minutes.
            DataError: a file has changed since it was opened.
        """
        ranges = [list(self._ranges(start, len(out))) for start, out in zip(starts, outs, strict=True)]
        contents = iter(self.folder.read_ranges(list(itertools.chain.from_iterable(ranges))))
        for out, of_window in zip(outs, ranges, strict=True):
            filled = 0
            for _ in of_window:
                tokens = np.frombuffer(next(contents), self._dtype)
                if tokens.max(initial=0) >= self._manifest.vocab_size:
                    raise DataError(
                        f"{self.name} has the token {tokens.max()}, beyond its vocabulary of "
                        f"{self._manifest.vocab_size}: it is damaged; prepare the data again"
                    )
                out[filled : filled + len(tokens)] = tokens
                filled += len(tokens)

    def read_ahead(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Start reading ``counts`` tokens from each of ``starts`` on, which ``read`` will be called for."""
        self.folder.read_ahead(one for pair in zip(starts, counts, strict=True) for one in self._ranges(*pair))

    def locate(self, start: int, count: int) -> list[Piece]:
        """The pieces of ``count`` tokens from ``start`` on, by shard and number of the document in it."""
        pieces = []
        while count:
            index = int(np.searchsorted(self._ends, start, side="right"))
            shard = self._manifest.shards[index]
            token = start - (int(self._ends[index]) - shard.tokens)
            offsets = self._offsets(shard)
            document = int(np.searchsorted(offsets, token, side="right")) - 1
            first, end = offsets[document : document + 2].tolist()
            taken = min(end - token, count)
            place = Place(self._file(shard), f"document {document}, from token {first}")
            pieces.append(Piece(place, token - first, taken))
            start, count = start + taken, count - taken
        return pieces

    def _file(self, shard: Shard) -> str:
        return f"{self.folder.location}/{shard.name}.tokens"

    def places_in(self, places: Collection[Place]) -> set[Place]:
        own = {location(self._file(shard)) for shard in self._manifest.shards}
        return {place for place in places if location(place.file) in own}

    def find(self, places: Collection[Place]) -> list[tuple[int, int]]:
        """Start and end, in tokens of all shards, of those documents of ``places`` that are in this folder.

        Raises:
            DataError: a shard of this folder has no such document.
        """
        found = []
        for shard, end in zip(self._manifest.shards, self._ends.tolist(), strict=True):
            first = end - shard.tokens
            own = location(self._file(shard))
            for position in sorted(place.position for place in places if location(place.file) == own):
                match = POSITION.fullmatch(position)
                offsets = self._offsets(shard)
                document = int(match[1]) if match else -1
                if match is None or not document < len(offsets) - 1 or offsets[document] != int(match[2]):
                    raise DataError(f"{self._file(shard)} has no {position!r}, which data.exclude names")
                found.append((first + int(offsets[document]), first + int(offsets[document + 1])))
        return sorted(found)

    @functools.lru_cache(16)  # noqa: B019
    def _offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """The offset of each document of a shard in tokens, and the number of tokens; DataError if they are damaged."""
        name, size_bytes = f"{shard.name}.documents", 8 * (shard.documents + 1)
        if self._sizes.get(name) == size_bytes:
            (content,) = self.folder.read_ranges([(name, 0, size_bytes)])
            offsets = np.frombuffer(content, "<i8")
            if offsets[0] == 0 and offsets[-1] == shard.tokens and (np.diff(offsets) >= 0).all():
                return offsets
        raise DataError(
            f"{self.name}: {name} is missing or damaged: it does not have the places of {shard.documents:,} documents; "
            "prepare the data again into an empty folder"
        )

    def _ranges(self, start: int, count: int) -> Iterator[Range]:
        """The ranges of files that contain ``count`` tokens from ``start`` on, which may be in several shards."""
        assert start + count <= len(self)
        size = self._dtype.itemsize
        while count:
            index = int(np.searchsorted(self._ends, start, side="right"))  # skips shards without tokens
            shard = self._manifest.shards[index]
            rest = int(self._ends[index]) - start
            taken = min(rest, count)
            yield f"{shard.name}.tokens", (shard.tokens - rest) * size, taken * size
            start, count = start + taken, count - taken


class TokenWindowStream(Stream):
    """Reads windows of tokenized data, in another order in each epoch (``WindowOrder``).

    The next window depends only on the number of windows drawn. So all rows share one stream. Its state is the size of
    the order's blocks, which a run keeps.
    """

    can_skip = True

    def __init__(self, source: TokenizedDataset, request: StreamRequest):
        self._source = source
        self._token_bytes = np.array(request.tokenizer.token_bytes)
        self._seq_len = request.seq_len
        self._seed = request.seed
        self._repeat = request.repeat
        self._targets = max(0, len(source) - 1)
        self._places = source.places_in(request.exclude.places)
        self._excluded = source.find(self._places) if self._places else []
        self._ends = [end for _, end in self._excluded]
        if self._excluded:
            logger.info("%s: leaves out %d document(s) of data.exclude", source.name, len(self._excluded))
        self.reads_ahead = source.folder.reads_ahead
        self.state = (block_size(self._targets, max(request.longest_seq_len, request.seq_len)),)
        if self._windows_of(self._order) == 0:
            raise DataError(
                f"{source.name} has too little text: its {len(source)} tokens do not fill a window of "
                f"training.seq_len + 1 = {self._seq_len + 1} tokens"
            )

    @property
    def state(self) -> State:
        return (self._order.block,)

    @state.setter
    def state(self, state: State) -> None:
        if len(state) != 1 or state[0] < 1 or state[0] != power_of_two(state[0]):
            raise DataError(
                f"the saved position in {self._source.name} is of other data, or of another version of torchtrain"
            )
        self._order = self._order_of(self._seq_len, state[0])

    def _order_of(self, seq_len: int, block: int) -> WindowOrder:
        return WindowOrder(self._targets, seq_len, block, self._seed)

    def _windows_of(self, order: WindowOrder) -> int:
        """Windows of an epoch. Data that are repeated end after the last full window, others with their last token."""
        return order.windows if self._repeat else -(-self._targets // order.seq_len)

    def resume(self, saved: SavedPosition) -> int:
        """Continue in the same epoch. With another sequence length, the windows that are left of the group of the last
        one are left out, so that nothing is read twice."""
        self.state = tuple(saved.states[0].tolist())
        old = self._order_of(saved.seq_len, self._order.block)
        if saved.seq_len == self._seq_len:
            return saved.windows_drawn
        new = self._order_of(self._seq_len, max(old.block, power_of_two(self._seq_len)))
        epoch, number = divmod(saved.windows_drawn, max(1, self._windows_of(old)))
        self._order = new
        first = epoch * self._windows_of(new)
        if number >= old.windows:  # of data that are read once: they have ended, or nearly so
            return first + (self._windows_of(new) if number else 0)
        if new.block > old.block:
            logger.warning(
                "%s: training.seq_len = %d is longer than the %d tokens by which the data were ordered: the rest of "
                "this epoch has %.0f%% of its tokens, in another order, and some of them were read before",
                *(self._source.name, self._seq_len, old.block, 100 * (1 - number / old.windows)),
            )
            return first + min(-(-number * saved.seq_len // self._seq_len), new.windows)
        group, begun = old.find(epoch, number)
        if begun:
            end, group = int(old.ends(epoch)[group]), group + 1
            logger.info(
                "%s: with another training.seq_len, %s tokens of a group of %s are left out in this epoch (%.2f%%)",
                self._source.name,
                f"{(end - number) * saved.seq_len:,}",
                f"{(end - number + begun) * saved.seq_len:,}",
                100 * (end - number) * saved.seq_len / self._targets,
            )
        if group == len(new.ends(epoch)):
            return first + self._windows_of(new)
        return first + int(new.ends(epoch)[group - 1] if group else 0)

    def fill(
        self, windows: Sequence[Tokens], windows_drawn: Sequence[int], sizes: Sequence[Bytes] | None = None
    ) -> list[int]:
        starts, filled = self._locate(windows_drawn)
        self._source.read(starts, [window[:count] for window, count in zip(windows, filled, strict=True)])
        for window, count, size in zip(windows, filled, sizes or (), strict=False):
            size[:count] = self._token_bytes[window[:count]] * self._source.byte_scale
        if self._excluded:
            for window, start, count in zip(windows, starts, filled, strict=True):
                self._mask_excluded(window, start, count)
        return filled

    def _mask_excluded(self, window: Tokens, start: int, count: int) -> None:
        first = bisect_right(self._ends, start)
        for begin, end in itertools.takewhile(lambda of: of[0] < start + count, self._excluded[first:]):
            window[max(begin - start, 0) : min(end - start, count)] = IGNORE_INDEX

    def read_ahead(self, windows_drawn: Sequence[int]) -> None:
        self._source.read_ahead(*self._locate(windows_drawn))

    def locate(self, windows_drawn: Sequence[int]) -> list[list[Piece]]:
        found = [self._source.locate(*pair) for pair in zip(*self._locate(windows_drawn), strict=True)]
        excluded = {(location(place.file), place.position) for place in self._places}
        return [
            [
                replace(piece, is_excluded=(location(piece.place.file), piece.place.position) in excluded)
                for piece in pieces
            ]
            for pieces in found
        ]

    def _locate(self, windows_drawn: Sequence[int]) -> tuple[list[int], list[int]]:
        """Offset and number of tokens of each window."""
        starts, counts = [], []
        for drawn in windows_drawn:
            epoch, number = divmod(drawn, self._windows_of(self._order))
            starts.append(self._order.start(epoch, number))
            ended = epoch > 0 and not self._repeat
            counts.append(0 if ended else min(self._seq_len + 1, len(self._source) - starts[-1]))
        return starts, counts


def location(file: str) -> str:
    """A local path as an absolute one."""
    return file if is_url(file) else str(Path(file).absolute())


def verify(folder: DataFolder, label: str) -> PreparedManifest:
    """Hash all files; DataError names the first file whose hash differs from the manifest."""
    manifest = PreparedManifest.read(folder, label)
    for shard in manifest.shards:
        if damaged := damaged_file(folder, shard):
            raise DataError(
                f"{label}: {damaged} is damaged or missing: its hash is not that of the manifest; prepare the data "
                "again into an empty folder"
            )
    return manifest


def damaged_file(folder: DataFolder, shard: Shard) -> str | None:
    """Name of a file of ``shard`` that is missing or has another hash; None if there is none."""
    for suffix, expected in (("tokens", shard.tokens_hash), ("documents", shard.documents_hash)):
        name = f"{shard.name}.{suffix}"
        try:
            if folder.hash_of(name) != expected:
                return name
        except MISSING:
            return name
    return None
