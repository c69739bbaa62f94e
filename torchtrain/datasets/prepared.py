"""Prepared data: documents tokenized once, from which a run reads only the windows that it needs.

A folder holds ``manifest.json`` and, for each shard, ``<shard>.tokens`` (little-endian uint16, or uint32 for a
vocabulary above 65,536: bos, text, eos of one document after the other) and ``<shard>.documents`` (little-endian
int64: where each document begins, and at last the number of tokens).
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

from torchtrain.datasets.order import permute, stream_seed
from torchtrain.datasets.source import Bytes, DataSource, State, Stream, StreamRequest, Tokens
from torchtrain.datasets.text import read_again
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError
from torchtrain.files import MISSING, hash_of, read_file, with_retries

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"  # in place of the manifest until all shards are written
_FORMAT = 1
_OPEN_FILES = 256  # of a source, at most


@dataclass(frozen=True)
class Shard:
    """A shard's entry in the manifest. ``bytes``: of its text in UTF-8; ``skipped``: documents that are not text.

    ``token_bytes``: of its tokens, by the tokenizer; None in data that an earlier version prepared.
    """

    name: str
    tokens: int
    documents: int
    bytes: int
    skipped: int
    tokens_hash: str
    documents_hash: str
    token_bytes: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What a folder of prepared data holds."""

    tokenizer_hash: str
    vocab_size: int
    source: str
    source_fingerprint: str
    shards: tuple[Shard, ...] = ()
    format: int = _FORMAT
    shard_count: int = 0
    """Number of shards, known before they are written; 0 where an earlier version began the folder."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @staticmethod
    def read(path: Path, label: str) -> "Manifest":
        """Raises DataError where the file is missing, damaged or of another version."""
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


class PreparedTokens(DataSource):
    """All tokens of a folder as one sequence, read from disk when they are asked for.

    Raises:
        DataError: a shard is missing, has another size than the manifest says, or (up to ``verify_bytes`` of them)
            another hash; the data were prepared with another tokenizer.
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
        """Bytes of the texts for each of those that the tokenizer's ``token_bytes`` give the tokens."""
        self._file = functools.lru_cache(_OPEN_FILES)(lambda shard: _File(self._paths[shard]))
        if len(self) * manifest.dtype.itemsize <= verify_bytes:
            verify(folder, label)

    def identity(self) -> str:
        """A text that is the same for the same tokens alone."""
        hashes = "".join(shard.tokens_hash for shard in self._manifest.shards)
        return f"{len(self):,} tokens, hash {xxhash.xxh3_128_hexdigest(hashes.encode())[:16]}"

    def streams(self, request: StreamRequest) -> list[Stream]:
        stream = TokenWindowStream(self, request.tokenizer, request.seq_len, request.seed, request.repeat)
        return [stream] * len(request.rows)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts: Sequence[int], outs: Sequence[npt.NDArray[np.int64]]) -> None:
        """Fill each of ``outs`` with the tokens from its start on.

        The file system is asked for all of them at once, and for nothing else: a memory map would read ahead, from a
        cold disk hundreds of times what is used.

        Raises:
            StorageError: the file system fails for minutes.
            DataError: a file is not what it was when it was opened.
        """
        size = self._manifest.dtype.itemsize
        parts = [part for start, out in zip(starts, outs, strict=True) for part in self._parts(start, out)]
        if hasattr(os, "posix_fadvise"):
            for shard, first, out in parts:
                with contextlib.suppress(OSError):  # it will come again when it is read
                    descriptor = self._file(shard).descriptor
                    os.posix_fadvise(descriptor, first * size, len(out) * size, os.POSIX_FADV_WILLNEED)
        for shard, first, out in parts:
            read = functools.partial(self._pread, shard, first * size, len(out) * size)
            out[:] = np.frombuffer(read_again(read, self._paths[shard]), self._manifest.dtype)

    def _parts(self, start: int, out: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
        """``out`` cut by shards: the shard's number, that of its first token in it, and where it goes."""
        assert start + len(out) <= len(self)
        while len(out):
            shard = int(np.searchsorted(self._ends, start, side="right"))  # passes over shards without tokens
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
                self._file.cache_clear()  # the next attempt opens it again
                raise
            if not block:
                raise DataError(f"{self._paths[shard]} is shorter than when the run began: put back what was there")
            content += block
        return content


class TokenWindowStream(Stream):
    """Reads windows of prepared data, in another permutation in each epoch.

    The next window depends only on the number of windows drawn. So one stream serves all rows, and its state is empty.
    """

    _BLOCK = 1024  # The permutation of many numbers takes little more time than that of one.

    def __init__(self, source: PreparedTokens, tokenizer: Tokenizer, seq_len: int, seed: int, repeat: bool):
        self.state: State = ()
        self._source = source
        self._token_bytes = np.array(tokenizer.token_bytes)
        self._seq_len = seq_len
        self._seed = seed
        self._repeat = repeat
        targets = max(0, len(source) - 1)
        self._full = targets // seq_len
        # What is repeated is cut after the last full window; what is read once is read to its end.
        self._windows = self._full if repeat else -(-targets // seq_len)
        self._block = functools.lru_cache(64)(self._make_block)
        if self._windows == 0:
            raise DataError(
                f"{source.name} has too little text: its {len(source)} tokens do not fill a window of "
                f"training.seq_len + 1 = {seq_len + 1} tokens"
            )

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
        """The first token of each of ``_BLOCK`` windows in their order."""
        order = np.arange(block * self._BLOCK, min(self._windows, (block + 1) * self._BLOCK))
        full = order < self._full  # the last window may not be
        order[full] = permute(order[full], self._full, stream_seed(self._seed, epoch))
        return (order * self._seq_len).tolist()


class _File:
    """An open file, closed when nothing refers to it."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead


def verify(folder: Path, label: str) -> Manifest:
    """Read every byte; DataError names the first file whose hash is not that of the manifest."""
    manifest = Manifest.read(folder / MANIFEST, label)
    for shard in manifest.shards:
        if damaged := damaged_file(folder, shard):
            raise DataError(
                f"{label}: {damaged} is damaged or missing: its hash is not that of the manifest; prepare the data "
                "again into an empty folder"
            )
    return manifest


def damaged_file(folder: Path, shard: Shard) -> str | None:
    """Name of a file of ``shard`` that is missing or has another hash; None if all is well."""
    for suffix, expected in (("tokens", shard.tokens_hash), ("documents", shard.documents_hash)):
        path = folder / f"{shard.name}.{suffix}"
        if not path.exists() or with_retries(functools.partial(hash_of, path), path) != expected:
            return path.name
    return None
