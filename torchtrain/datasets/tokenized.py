"""Tokenized data, which ``torchtrain.prepare`` writes: a data source that reads exactly the windows that it needs.

A folder contains ``manifest.json`` and two files per shard: ``<shard>.tokens`` (little-endian uint16, or uint32 for a
vocabulary above 65,536: bos, text and eos of each document) and ``<shard>.documents`` (little-endian int64: the offset
of each document in tokens, and the number of tokens).
"""

import contextlib
import functools
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from torchtrain.datasets.data_source import (
    Bytes,
    DataSource,
    SavedPosition,
    SourceSize,
    State,
    Stream,
    StreamRequest,
    Tokens,
)
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.text_sources import read_with_retries
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError
from torchtrain.files import MISSING, hash_of, read_file, with_retries

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"  # a manifest without shards, until all shards are written
_FORMAT = 1
_OPEN_FILES = 256  # maximum number of open files of a source


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
    token_bytes: int | None = None
    """Bytes that its tokens stand for, by the tokenizer's ``token_bytes``; None in data of an earlier version."""


@dataclass(frozen=True)
class Manifest:
    """Metadata of a folder of tokenized data."""

    tokenizer_hash: str
    vocab_size: int
    source: str
    """Name of the source."""
    source_fingerprint: str
    """Identity of the source."""
    shards: tuple[Shard, ...] = ()
    format: int = _FORMAT
    shard_count: int = 0
    """Number of shards, also before they are written; 0 in data of an earlier version."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @staticmethod
    def read(path: Path, label: str) -> "Manifest":
        """Read a manifest; DataError if the file is missing, damaged or of another version."""
        try:
            content = json.loads(read_file(path))
            content["shards"] = tuple(Shard(**shard) for shard in content["shards"])
            manifest = Manifest(**content)
        except (*MISSING, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{label}: cannot read its {path.name}: {error!r}; prepare the data again") from error
        if manifest.format != _FORMAT:
            raise DataError(
                f"{label} has format {manifest.format}, this version reads {_FORMAT}; prepare the data again"
            )
        return manifest


class TokenizedDataset(DataSource):
    """All tokens of a folder as one sequence, which is read from disk on demand.

    Args:
        verify_bytes: tokens up to this total size are hashed and compared with the manifest.
        label: name for messages.

    Raises:
        DataError: a shard is missing or does not match the manifest; or the data were prepared with another tokenizer.
    """

    def __init__(self, folder: Path, tokenizer_hash: str, verify_bytes: float, label: str):
        self.name = label
        manifest = Manifest.read(folder / MANIFEST, label)
        if manifest.tokenizer_hash != tokenizer_hash:
            raise DataError(
                f"{label} was prepared with another tokenizer (SHA-256 {manifest.tokenizer_hash[:12]}...) than "
                f"model.tokenizer_path names ({tokenizer_hash[:12]}...); set that one, or prepare the data again"
            )
        self._manifest = manifest
        self.skipped = sum(shard.skipped for shard in manifest.shards)
        self._paths = [folder / f"{shard.name}.tokens" for shard in manifest.shards]
        for path, shard in zip(self._paths, manifest.shards, strict=True):
            expected = shard.tokens * manifest.dtype.itemsize
            size = with_retries(lambda: path.stat().st_size if path.exists() else None, path)  # noqa: B023
            if size != expected:
                found = "is missing" if size is None else f"has {size} bytes, not {expected}"
                raise DataError(f"{label}: {path.name} {found}; prepare the data again into an empty folder")
        self._ends = np.cumsum([shard.tokens for shard in manifest.shards], dtype=np.int64)
        counted = [shard.token_bytes for shard in manifest.shards if shard.token_bytes is not None]
        is_known = len(counted) == len(manifest.shards) and sum(counted) > 0
        self.byte_scale = sum(shard.bytes for shard in manifest.shards) / sum(counted) if is_known else 1.0
        """Bytes of all texts, divided by the sum of the tokenizer's ``token_bytes`` of all tokens."""
        self._file = functools.lru_cache(_OPEN_FILES)(lambda shard: _File(self._paths[shard]))
        if len(self) * manifest.dtype.itemsize <= verify_bytes:
            verify(folder, label)

    def identity(self) -> str:
        """Number and hash of all tokens."""
        hashes = "".join(shard.tokens_hash for shard in self._manifest.shards)
        return f"{len(self):,} tokens, hash {xxhash.xxh3_128_hexdigest(hashes.encode())[:16]}"

    def size(self, tokenizer: Tokenizer) -> SourceSize:  # noqa: ARG002
        return SourceSize(len(self), sum(shard.bytes for shard in self._manifest.shards))

    def streams(self, request: StreamRequest) -> list[Stream]:
        stream = TokenWindowStream(self, request.tokenizer, request.seq_len, request.seed, request.repeat)
        return [stream] * len(request.rows)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts: Sequence[int], outs: Sequence[npt.NDArray[np.int64]]) -> None:
        """Fill each of ``outs`` with the tokens from its start on.

        All of them are requested from the file system before the first is read, and nothing else is: a memory map would
        read ahead, from a cold disk hundreds of times as much as is used.

        Raises:
            StorageError: the file system fails for minutes.
            DataError: a file has changed since it was opened.
        """
        size = self._manifest.dtype.itemsize
        parts = [part for start, out in zip(starts, outs, strict=True) for part in self._parts(start, out)]
        if hasattr(os, "posix_fadvise"):
            for shard, first, out in parts:
                with contextlib.suppress(OSError):  # the read below raises it, too
                    descriptor = self._file(shard).descriptor
                    os.posix_fadvise(descriptor, first * size, len(out) * size, os.POSIX_FADV_WILLNEED)
        for shard, first, out in parts:
            read = functools.partial(self._pread, shard, first * size, len(out) * size)
            out[:] = np.frombuffer(read_with_retries(read, self._paths[shard]), self._manifest.dtype)

    def _parts(self, start: int, out: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
        """Split ``out`` by shards: index of the shard, offset in the shard in tokens, and the part of ``out``."""
        assert start + len(out) <= len(self)
        while len(out):
            shard = int(np.searchsorted(self._ends, start, side="right"))  # skips shards without tokens
            rest = int(self._ends[shard]) - start
            part, out = out[:rest], out[rest:]
            yield shard, self._manifest.shards[shard].tokens - rest, part
            start += rest

    def _pread(self, shard: int, offset: int, size: int) -> bytes:
        content = b""
        while len(content) < size:
            try:
                block = os.pread(self._file(shard).descriptor, size - len(content), offset + len(content))
            except OSError:
                self._file.cache_clear()  # so that the next attempt opens it again
                raise
            if not block:
                raise DataError(f"{self._paths[shard]} is shorter than when the run began: restore it")
            content += block
        return content


class TokenWindowStream(Stream):
    """Reads windows of tokenized data, in another permutation in each epoch.

    The next window depends only on the number of windows drawn. So all rows share one stream, and its state is empty.
    """

    _BLOCK = 1024  # permuting many numbers at once takes little more time than permuting one

    def __init__(self, source: TokenizedDataset, tokenizer: Tokenizer, seq_len: int, seed: int, repeat: bool):
        self.state: State = ()
        self._source = source
        self._token_bytes = np.array(tokenizer.token_bytes)
        self._seq_len = seq_len
        self._seed = seed
        self._repeat = repeat
        targets = max(0, len(source) - 1)
        self._full = targets // seq_len
        # Data that are repeated end after the last full window; data that are read once are read to their end.
        self._windows = self._full if repeat else -(-targets // seq_len)
        self._block = functools.lru_cache(64)(self._make_block)
        if self._windows == 0:
            raise DataError(
                f"{source.name} has too little text: its {len(source)} tokens do not fill a window of "
                f"training.seq_len + 1 = {seq_len + 1} tokens"
            )

    def resume(self, saved: SavedPosition) -> int:
        """Continue in the same epoch, after as many tokens. With another sequence length, the windows of this epoch are
        others, in another order, so that some of them contain tokens that it has already read."""
        if saved.seq_len == self._seq_len:
            return saved.windows_drawn
        targets = len(self._source) - 1
        windows = targets // saved.seq_len if self._repeat else -(-targets // saved.seq_len)
        epoch, number = divmod(saved.windows_drawn, max(1, windows))
        return epoch * self._windows + min(-(-number * saved.seq_len // self._seq_len), self._windows)

    def fill(
        self, windows: Sequence[Tokens], windows_drawn: Sequence[int], sizes: Sequence[Bytes] | None = None
    ) -> list[int]:
        starts, filled = [], []
        for window, drawn in zip(windows, windows_drawn, strict=True):
            epoch, number = divmod(drawn, self._windows)
            block, index = divmod(number, self._BLOCK)
            starts.append(self._block(epoch, block)[index])
            ended = epoch > 0 and not self._repeat
            filled.append(0 if ended else min(len(window), len(self._source) - starts[-1]))
        self._source.read(starts, [window[:count] for window, count in zip(windows, filled, strict=True)])
        for window, count, size in zip(windows, filled, sizes or (), strict=False):
            size[:count] = self._token_bytes[window[:count]] * self._source.byte_scale
        return filled

    def _make_block(self, epoch: int, block: int) -> list[int]:
        """Offsets of the windows number ``block * _BLOCK`` and following in the order of an epoch."""
        order = np.arange(block * self._BLOCK, min(self._windows, (block + 1) * self._BLOCK))
        full = order < self._full  # the last window may not be full
        order[full] = permute(order[full], self._full, stream_seed(self._seed, epoch))
        return (order * self._seq_len).tolist()


class _File:
    """An open file, which is closed with its last reference."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead


def verify(folder: Path, label: str) -> Manifest:
    """Hash all files; DataError names the first file whose hash differs from the manifest."""
    manifest = Manifest.read(folder / MANIFEST, label)
    for shard in manifest.shards:
        if damaged := damaged_file(folder, shard):
            raise DataError(
                f"{label}: {damaged} is damaged or missing: its hash is not that of the manifest; prepare the data "
                "again into an empty folder"
            )
    return manifest


def damaged_file(folder: Path, shard: Shard) -> str | None:
    """Name of a file of ``shard`` that is missing or has another hash; None if there is none."""
    for suffix, expected in (("tokens", shard.tokens_hash), ("documents", shard.documents_hash)):
        path = folder / f"{shard.name}.{suffix}"
        if not path.exists() or with_retries(functools.partial(hash_of, path), path) != expected:
            return path.name
    return None
