"""A folder of tokens as a data source, which reads exactly the windows that it needs.

The documents that are not held out (or only those) follow each other in one sequence of tokens. Windows are cut from it
(``CutWindows``) or are made of whole documents (``PackedWindows``), and are read in one order (window_order.py). A
window depends on the number of windows drawn before it alone.
"""

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from torchtrain.datasets.best_fit import PackedWindows, cached_windows, pack_sets
from torchtrain.datasets.data_identity import HASH_DIGITS, DataFile, FileTable
from torchtrain.datasets.data_source import (
    Bytes,
    DataSource,
    Exclusions,
    Piece,
    Place,
    SavedPosition,
    SourceSize,
    State,
    Stream,
    StreamRequest,
    Tokens,
)
from torchtrain.datasets.file_formats import position_of
from torchtrain.datasets.token_folder import COLUMNS, FILES, MANIFEST, DataFolder, Range, Shard, TokenManifest, verify
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.datasets.window_order import WindowOrder, block_size, power_of_two
from torchtrain.errors import DataError
from torchtrain.files import MISSING, parse_json
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger

Integers = npt.NDArray[np.int64]
Interval = tuple[int, int]
"""First token, and number of tokens."""
Span = tuple[int, int]
"""First token, and the one after the last."""

_INDEXES_AT_ONCE = 64  # shards whose indexes are requested together from an object store


@dataclass(frozen=True)
class Selection:
    """The intervals of the tokens of a folder that are read, of which each has ``tokens[i]`` from ``starts[i]`` on."""

    starts: Integers
    tokens: Integers

    @functools.cached_property
    def ends(self) -> Integers:
        """The number of tokens up to the end of each interval."""
        return self.tokens.cumsum()

    def intervals(self, start: int, count: int) -> Iterator[Interval]:
        """Where ``count`` of the selected tokens are in the folder, from number ``start`` on."""
        if len(self.starts) == 1:
            yield int(self.starts[0]) + start, count
            return
        index = int(self.ends.searchsorted(start, side="right"))
        while count:
            rest = int(self.ends[index]) - start
            taken = min(rest, count)
            yield int(self.starts[index] + self.tokens[index]) - rest, taken
            start, count, index = start + taken, count - taken, index + 1


class TokenDataset(DataSource):
    """All documents of a folder of tokens, or a part of them.

    Args:
        folder: the folder.
        tokenizer_hash: ``content_hash`` of the tokenizer of the run.
        verify_bytes: tokens up to this total size are hashed and compared with the manifest; not on an object store,
            which verifies its objects itself.
        label: name for messages.
        files: the files of text and their names, if they are known; otherwise by the folder.

    Raises:
        DataError: a shard is missing or does not match the manifest; or the text was tokenized by another tokenizer.
    """

    can_exclude = True
    packings = ("cut", "best_fit")

    def __init__(
        self,
        folder: DataFolder,
        tokenizer_hash: str,
        verify_bytes: float,
        label: str,
        files: tuple[Sequence[str], FileTable] | None = None,
    ) -> None:
        self.name = label
        self.folder = folder
        manifest = TokenManifest.read(folder, label)
        if manifest.tokenizer_hash != tokenizer_hash:
            raise DataError(
                f"{label} was tokenized by another tokenizer (SHA-256 {manifest.tokenizer_hash[:12]}...) than "
                f"model.tokenizer_path names ({tokenizer_hash[:12]}...); set that one, or tokenize the text again"
            )
        self.manifest = manifest
        self._dtype = manifest.dtype
        self._files = files
        self._share = 0.0, False  # that is held out, and whether it is read
        self.skipped = sum(shard.skipped for shard in manifest.shards)
        sizes = folder.sizes()
        for shard in manifest.shards:
            expected = {"tokens": shard.tokens * self._dtype.itemsize, "documents": shard.index_bytes}
            for suffix, size_bytes in expected.items():
                size = sizes.get(f"{shard.name}.{suffix}")
                if size != size_bytes:
                    found = "is missing" if size is None else f"has {size} bytes, not {size_bytes}"
                    raise DataError(
                        f"{label}: {shard.name}.{suffix} {found}; tokenize the text again into an empty folder"
                    )
        self._ends = np.cumsum([0, *(shard.tokens for shard in manifest.shards)], dtype=np.int64)[1:]
        if not self._ends[-1:].any():
            raise DataError(f"{label} has no tokens: its {MANIFEST} is damaged; tokenize the text again")
        self._selection = Selection(np.zeros(1, np.int64), self._ends[-1:])
        if not folder.reads_ahead and len(self) * self._dtype.itemsize <= verify_bytes:
            verify(folder, label)

    def __len__(self) -> int:
        return int(self._selection.ends[-1])

    def documents_hash(self) -> str:
        """A hash of where the documents begin, and of which are selected."""
        text = "".join(shard.documents_hash for shard in self.manifest.shards)
        return xxhash.xxh3_128_hexdigest(f"{text}, {self._share}".encode())

    def identity(self) -> str:
        """Number and hash of all tokens of the folder, and the share that is held out."""
        hashes = "".join(shard.tokens_hash for shard in self.manifest.shards)
        text = f"{int(self._ends[-1]):,} tokens, hash {xxhash.xxh3_128_hexdigest(hashes.encode())[:16]}"
        return f"{text}, held out {self._share[0]:g}" if self._share[0] else text

    def file_table(self) -> FileTable:
        """The files of text, if they are known; else those of tokens."""
        if self._files is not None:
            return self._files[1]
        entries = (
            DataFile(
                f"{self.folder.location}/{shard.name}.tokens",
                shard.tokens * self._dtype.itemsize,
                shard.tokens_hash[:HASH_DIGITS],
            )
            for shard in self.manifest.shards
        )
        return FileTable.of(entries, len(self.manifest.shards))

    def size(self, tokenizer: Tokenizer) -> SourceSize:  # noqa: ARG002
        whole = sum(shard.bytes for shard in self.manifest.shards)
        share = len(self) / max(1, int(self._ends[-1]))
        return SourceSize(len(self), round(whole * share))

    def part(self, share: float, *, held_out: bool, section: str) -> DataSource:
        part = copy.copy(self)
        part._share = share, held_out
        starts, tokens, limit = [], [], np.uint64(math.ceil(share * 2**64))
        for index, (offsets, hashes) in self._indexes("offsets", "hash_high"):
            is_own = (hashes.view(np.uint64) < limit) == held_out
            changes = np.diff(np.concatenate(([False], is_own, [False])).astype(np.int8))
            offsets = offsets + self._first_token(index)
            begins, ends = (offsets[np.flatnonzero(changes == sign)] for sign in (1, -1))
            starts.append(begins)
            tokens.append(ends - begins)
        part._selection = Selection(np.concatenate(starts), np.concatenate(tokens))
        if not len(part._selection.starts) or not len(part):
            documents = sum(shard.documents for shard in self.manifest.shards)
            raise DataError(
                f"{section}.held_out = {share:g} holds out {'none' if held_out else 'all'} of the {documents:,} "
                f"documents of {self.name}: {'raise' if held_out else 'lower'} it, or set it to 0. A text file is one "
                "document: to hold out a part of it, divide it into .jsonl, or validate on another file, by "
                "[validation]"
            )
        if held_out:
            part.name = f"{self.name} (held out)"
        return part

    def stream(self, request: StreamRequest) -> Stream:
        return TokenStream(self, request)

    def document_starts(self) -> Integers:
        """The first token of each selected document, and the number of tokens, int64 of shape (documents + 1,)."""
        starts = np.concatenate([of[:-1] + self._first_token(index) for index, (of,) in self._indexes("offsets")])
        ends = np.append(starts[1:], self._ends[-1])
        if len(self) < self._ends[-1]:
            interval = np.searchsorted(self._selection.starts, starts, side="right") - 1
            is_own = (interval >= 0) & (starts < (self._selection.starts + self._selection.tokens)[interval])
            starts, ends = starts[is_own], ends[is_own]
        return np.cumsum([0, *(ends - starts)], dtype=np.int64)

    def excluded(self, exclude: Exclusions) -> list[Span]:
        """Where each document is in the folder that ``exclude`` names."""
        if not exclude.texts:
            return []
        wanted = {(int(name[:16], 16), int(name[16:], 16)) for name in exclude.texts}
        high = np.array([pair[0] for pair in wanted], dtype=np.uint64)
        found = []
        for index, (column,) in self._indexes("hash_high"):
            highs = column.view(np.uint64)
            candidates = np.flatnonzero(np.isin(highs, high))
            if len(candidates):
                lows = self._column(index, "hash_low").view(np.uint64)
                offsets, first = self._offsets(index), self._first_token(index)
                found += [
                    (first + int(offsets[number]), first + int(offsets[number + 1]))
                    for number in candidates.tolist()
                    if (int(highs[number]), int(lows[number])) in wanted
                ]
        return found

    def intervals(self, parts: Sequence[Interval]) -> list[Interval]:
        """Where selected tokens are in the folder."""
        return [interval for part in parts for interval in self._selection.intervals(*part)]

    def read(self, intervals: Sequence[Interval], outs: Sequence[Tokens]) -> None:
        """Fill each of ``outs`` with the tokens of its interval of the folder.

        Raises:
            StorageError: the file system or network fails for minutes.
            DataError: a file has changed since it was opened.
        """
        ranges = [list(self._ranges(*interval)) for interval in intervals]
        contents = iter(self.folder.read_ranges(list(itertools.chain.from_iterable(ranges))))
        for out, of_interval in zip(outs, ranges, strict=True):
            filled = 0
            for _ in of_interval:
                tokens = np.frombuffer(next(contents), self._dtype)
                if tokens.max(initial=0) >= self.manifest.vocab_size:
                    raise DataError(
                        f"{self.name} has the token {tokens.max()}, beyond its vocabulary of "
                        f"{self.manifest.vocab_size}: it is damaged; tokenize the text again"
                    )
                out[filled : filled + len(tokens)] = tokens
                filled += len(tokens)

    def read_ahead(self, intervals: Sequence[Interval]) -> None:
        """Start reading intervals that ``read`` will be called for."""
        self.folder.read_ahead(one for interval in intervals for one in self._ranges(*interval))

    def documents_in(self, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """The documents of an interval of the folder: number of the shard, number in the shard, offset in the document,
        and number of tokens."""
        for index, token, rest in self._in_shards(start, count):
            offsets = self._offsets(index)
            while rest:
                number = int(offsets.searchsorted(token, side="right")) - 1
                taken = min(int(offsets[number + 1]) - token, rest)
                yield index, number, token - int(offsets[number]), taken
                token, rest = token + taken, rest - taken

    def byte_shares(self, start: int, token_bytes: Integers) -> Bytes:
        """Bytes of text that each token stands for, from the token ``start`` of the folder on; those of all tokens of a
        document add up to the size of its text.

        Within a document they are proportional to ``token_bytes``, the tokenizer's of these tokens. So the sum is exact
        even if the tokenizer adds a space, normalizes a character or does not know it.
        """
        shares: list[Bytes] = []
        for index, token, count in self._in_shards(start, len(token_bytes)):
            offsets = self._offsets(index)
            first, last = offsets.searchsorted(token, side="right") - 1, offsets.searchsorted(token + count)
            sizes, counted = (self._column(index, name)[first:last] for name in ("bytes", "token_bytes"))
            borders = offsets[first : last + 1].copy()
            lengths = borders[1:] - borders[:-1]
            borders[0], borders[-1] = token, token + count  # the first and the last document may be read in part
            counts = borders[1:] - borders[:-1]
            scale: Bytes = np.repeat(sizes / np.maximum(counted, 1), counts)
            of_tokens = token_bytes[:count] * scale
            if not counted.all():  # of some documents no token stands for any byte
                even = np.repeat(counted == 0, counts)
                of_tokens[even] = np.repeat(sizes / np.maximum(lengths, 1), counts)[even]
            shares.append(of_tokens)
            token_bytes = token_bytes[count:]
        return shares[0] if len(shares) == 1 else np.concatenate(shares)

    def describe(self, index: int, number: int) -> Place:
        """Where a document of a shard is stored: its file, and its line, row or number there."""
        shard, files = self.manifest.shards[index], self._file_names
        file, row = (int(self._column(index, name)[number]) for name in ("file", "number"))
        own = [other for other in self.manifest.shards if 0 <= file - other.first_file < len(other.numbers)]
        counts = [other.numbers[file - other.first_file] for other in own]
        row += sum(counts[: own.index(shard)]) if shard in own else 0
        if not files:
            return Place(self.name, f"document {row}")
        if not 0 <= file < len(files):
            raise self._damaged_index(shard, f"it names the file {file} of {len(files):,}")
        return Place(files[file], position_of(files[file], row, sum(counts)))

    def text_hash(self, index: int, number: int) -> str:
        """``text_hash`` of a document of a shard."""
        high, low = (self._column(index, name).view(np.uint64)[number] for name in ("hash_high", "hash_low"))
        return f"{high:016x}{low:016x}"

    @functools.cached_property
    def _file_names(self) -> Sequence[str]:
        if self._files is not None:
            return self._files[0]
        try:
            names = parse_json(self.folder.read(FILES), f"{self.name}: its {FILES}", DataError)
        except MISSING:
            raise DataError(f"{self.name}: its {FILES} is missing; tokenize the text again") from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{self.name}: its {FILES} is damaged: it is no list of names; tokenize the text again")
        return names

    def _first_token(self, index: int) -> int:
        return int(self._ends[index]) - self.manifest.shards[index].tokens

    def _offsets(self, index: int) -> Integers:
        """The offset of each document of a shard in tokens, and the number of tokens; DataError if they are damaged."""
        return self._column(index, "offsets")

    def _column(self, index: int, name: str) -> Integers:
        """``_offsets``, or another column of the index of a shard."""
        return _cached_column(self, index, name)

    def read_column(self, index: int, name: str) -> Integers:
        """``_column`` without the cache."""
        (content,) = self.folder.read_ranges([self._range_of_column(index, name)])
        return self._parse_column(index, name, content)

    def _indexes(self, *names: str) -> Iterator[tuple[int, list[Integers]]]:
        """The number of each shard, and columns of its index; many shards are requested at once."""
        for first in range(0, len(self.manifest.shards), _INDEXES_AT_ONCE):
            indexes = range(len(self.manifest.shards))[first : first + _INDEXES_AT_ONCE]
            ranges = [self._range_of_column(index, name) for index in indexes for name in names]
            contents = iter(self.folder.read_ranges(ranges))
            for index in indexes:
                yield index, [self._parse_column(index, name, next(contents)) for name in names]

    def _range_of_column(self, index: int, name: str) -> Range:
        shard = self.manifest.shards[index]
        first, count = 0, shard.documents + 1
        if name != "offsets":
            first, count = count + COLUMNS.index(name) * shard.documents, shard.documents
        return f"{shard.name}.documents", 8 * first, 8 * count

    def _parse_column(self, index: int, name: str, content: bytes) -> Integers:
        shard, column = self.manifest.shards[index], np.frombuffer(content, "<i8")
        if name == "offsets" and (column[0] != 0 or column[-1] != shard.tokens or (np.diff(column) < 0).any()):
            raise self._damaged_index(shard, f"it does not have the places of {shard.documents:,} documents")
        return column

    def _damaged_index(self, shard: Shard, why: str) -> DataError:
        return DataError(
            f"{self.name}: {shard.name}.documents is damaged: {why}; tokenize the text again into an empty folder"
        )

    def _ranges(self, start: int, count: int) -> Iterator[Range]:
        """The ranges of files that contain ``count`` tokens from ``start`` on."""
        size = self._dtype.itemsize
        for index, token, taken in self._in_shards(start, count):
            yield f"{self.manifest.shards[index].name}.tokens", token * size, taken * size

    def _in_shards(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where ``count`` tokens from ``start`` on are: number of the shard, first token in it, number of tokens."""
        assert start + count <= self._ends[-1]
        while count:
            index = int(self._ends.searchsorted(start, side="right"))  # skips shards without tokens
            rest = int(self._ends[index]) - start
            taken = min(rest, count)
            yield index, self.manifest.shards[index].tokens - rest, taken
            start, count = start + taken, count - taken


@functools.lru_cache(256)
def _cached_column(source: TokenDataset, index: int, name: str) -> Integers:
    return source.read_column(index, name)


class Windows(Protocol):
    """The windows of a sequence of tokens."""

    def __len__(self) -> int: ...

    def order(self, block: int, seed: int) -> WindowOrder:
        """The order of the full windows, by blocks of ``block`` tokens."""
        ...

    def intervals(self, window: int, /) -> list[Interval]:
        """The intervals of the sequence that a window consists of."""
        ...


@dataclass(frozen=True)
class CutWindows:
    """Windows of ``seq_len + 1`` of ``tokens`` tokens, each from the last token of the one before on.

    The last window, with what is left of the tokens, is not full.
    """

    tokens: int
    seq_len: int

    def __len__(self) -> int:
        return -(-(self.tokens - 1) // self.seq_len)

    def order(self, block: int, seed: int) -> WindowOrder:
        full = (self.tokens - 1) // self.seq_len

        def first_windows(blocks: Integers) -> Integers:
            return np.minimum(-(-blocks * block // self.seq_len), full)

        return WindowOrder((self.tokens - 1) // block, first_windows, full, seed)  # what is left is in the last group

    def intervals(self, window: int) -> list[Interval]:
        start = window * self.seq_len
        return [(start, min(self.seq_len + 1, self.tokens - start))]


class TokenStream(Stream):
    """Reads windows of tokens, in another order in each epoch (``WindowOrder``).

    The next window depends only on the number of windows drawn. The state is the size of the order's blocks, which a
    run keeps.
    """

    can_skip = True

    def __init__(self, source: TokenDataset, request: StreamRequest) -> None:
        if source.manifest.vocab_size != request.tokenizer.vocab_size:
            raise DataError(
                f"{source.name} has a vocabulary of {source.manifest.vocab_size} tokens, and its tokenizer has "
                f"{request.tokenizer.vocab_size}: its manifest is damaged; tokenize the text again"
            )
        self._source = source
        self._token_bytes = np.array(request.tokenizer.token_bytes)
        self._seq_len = request.seq_len
        self._seed = request.seed
        self._repeat = request.repeat
        self._rows = len(request.rows)
        self._packs = request.packing == "best_fit"
        self._excluded = source.excluded(request.exclude)
        self._excluded_ends = np.array([end for _, end in self._excluded], dtype=np.int64)
        if self._excluded:
            logger.info("%s: leaves out %d document(s) of data.exclude", source.name, len(self._excluded))
        self.reads_ahead = source.folder.reads_ahead
        longest = max(request.longest_seq_len, request.seq_len)
        self._set_block(block_size(len(source) - 1, longest))
        if self._of_epoch == 0:
            raise DataError(
                f"{source.name} has too little text: its {len(source)} tokens do not fill a window of "
                f"training.seq_len + 1 = {self._seq_len + 1} tokens"
            )

    @property
    def state(self) -> State:
        return np.full((self._rows, 1), self._block, dtype=np.int64)

    @state.setter
    def state(self, state: State) -> None:
        block = int(state[0, 0]) if state.shape[1] == 1 else 0
        if block < 1 or block != power_of_two(block) or not (state == block).all():
            raise DataError(
                f"the saved position in {self._source.name} is of other data, or of another version of torchtrain"
            )
        if block != self._block:
            self._set_block(block)

    def _set_block(self, block: int) -> None:
        self._block = block
        self._order, self._windows = self._order_of(self._seq_len, block)
        self._of_epoch = self._windows_of(self._order, self._seq_len)

    def _order_of(self, seq_len: int, block: int) -> tuple[WindowOrder, Windows]:
        source = self._source
        windows = packed_windows(source, seq_len, block) if self._packs else CutWindows(len(source), seq_len)
        return windows.order(block, self._seed), windows

    def _windows_of(self, order: WindowOrder, seq_len: int) -> int:
        """Windows of an epoch. Data that are repeated end after the last full window, others with their last token."""
        return order.windows if self._repeat or self._packs else len(CutWindows(len(self._source), seq_len))

    def resume(self, saved: SavedPosition) -> int:
        """Continue in the same epoch. With another sequence length, the windows that are left of the group of the last
        one are left out, so that nothing is read twice."""
        self.state = saved.states
        if saved.seq_len == self._seq_len:
            return saved.windows_drawn
        old, _ = self._order_of(saved.seq_len, self._block)
        of_old_epoch = max(1, self._windows_of(old, saved.seq_len))
        epoch, number = divmod(saved.windows_drawn, of_old_epoch)
        self._set_block(max(self._block, power_of_two(self._seq_len)))
        new, of_epoch = self._order, self._of_epoch
        first = epoch * of_epoch
        if number == 0 or (epoch > 0 and not self._repeat):
            return first
        if self._block > saved.states[0, 0]:
            done = number / of_old_epoch
            logger.warning(
                "%s: training.seq_len = %d is longer than the %d tokens by which the data were ordered: the rest of "
                "this epoch has %.0f%% of its tokens, in another order, and some of them were read before",
                *(self._source.name, self._seq_len, saved.states[0, 0], 100 * (1 - done)),
            )
            return first + min(-(-number * of_epoch // of_old_epoch), of_epoch)
        group, begun = old.find(epoch, number)
        if begun:
            # After the full windows of the last group, data that are read once have a window that is not full.
            end = int(old.ends(epoch)[group]) if group + 1 < old.groups else of_old_epoch
            logger.info(
                "%s: with another training.seq_len, %s windows of a group of %s are left out in this epoch (%.2f%%)",
                *(self._source.name, f"{end - number:,}", f"{end - number + begun:,}"),
                100 * (end - number) / of_old_epoch,
            )
            group += 1
        if group == new.groups:
            return first + of_epoch
        return first + (int(new.ends(epoch)[group - 1]) if group else 0)

    def fill(
        self,
        rows: Sequence[int],  # noqa: ARG002
        windows: Sequence[Tokens],
        windows_drawn: Sequence[int],
        sizes: Sequence[Bytes] | None = None,
    ) -> list[int]:
        filled, intervals, outs = [], [], []
        places: list[tuple[int, int]] = []  # row and place of each interval
        for row, (window, drawn) in enumerate(zip(windows, windows_drawn, strict=True)):
            begin = 0
            for start, count in self._intervals(drawn):
                intervals.append((start, count))
                outs.append(window[begin : begin + count])
                places.append((row, begin))
                begin += count
            if self._packs and begin:
                window[begin:], begin = IGNORE_INDEX, len(window)  # padding
            filled.append(begin)
        self._source.read(intervals, outs)
        if sizes is not None:
            for (row, begin), (start, _), out in zip(places, intervals, outs, strict=True):
                sizes[row][begin : begin + len(out)] = self._source.byte_shares(start, self._token_bytes[out])
        for (start, count), out in zip(intervals if self._excluded else (), outs, strict=False):
            first = int(self._excluded_ends.searchsorted(start, side="right"))
            for begin, end in self._excluded[first:]:
                if begin >= start + count:
                    break
                out[max(begin - start, 0) : min(end - start, count)] = IGNORE_INDEX
        return filled

    def read_ahead(self, windows_drawn: Sequence[int]) -> None:
        self._source.read_ahead([interval for drawn in windows_drawn for interval in self._intervals(drawn)])

    def locate(self, rows: Sequence[int], windows_drawn: Sequence[int]) -> list[list[Piece]]:  # noqa: ARG002
        excluded, source = dict(self._excluded), self._source
        located = []
        for drawn in windows_drawn:
            pieces = []
            for start, count in self._intervals(drawn):
                for index, number, offset, tokens in source.documents_in(start, count):
                    place, hashed = source.describe(index, number), source.text_hash(index, number)
                    pieces.append(Piece(place, offset, tokens, hashed, start - offset in excluded))
                    start += tokens
            located.append(pieces)
        return located

    def _intervals(self, drawn: int) -> list[Interval]:
        """Where the tokens of the window ``drawn`` are in the folder; none after the end of data that are read once."""
        epoch, number = divmod(drawn, self._of_epoch)
        if epoch > 0 and not self._repeat:
            return []
        is_full = number < self._order.windows
        return self._source.intervals(self._windows.intervals(self._order.window(epoch, number) if is_full else number))


@functools.lru_cache(8)
def packed_windows(source: TokenDataset, seq_len: int, block: int) -> PackedWindows:
    """The windows of ``data.packing = "best_fit"``, which are computed once and then are in the cache."""

    def compute() -> PackedWindows:
        logger.info("%s: packing its documents into windows of %d tokens", source.name, seq_len)
        return pack_sets(source.document_starts(), seq_len, block)

    return cached_windows(f"{source.documents_hash()}, {seq_len}, {block}", compute)
