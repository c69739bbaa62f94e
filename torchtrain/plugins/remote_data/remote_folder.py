"""Folders of tokens on an object store."""

import contextlib
import errno
import functools
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.token_folder import DataFolder, Range
from torchtrain.errors import ConfigError, DataError
from torchtrain.files import BLOCK_BYTES, MISSING
from torchtrain.plugins.object_storage.object_store import (
    has_tag,
    open_file_system,
    read_range,
    tag_of,
    upload_file,
    with_store_retries,
    with_timeout,
)
from torchtrain.plugins.remote_data.range_cache import RangeCache, cache_of

_CONNECTIONS = 32  # maximum number of concurrent requests to an object store
_READ_AHEAD = 4096  # maximum number of ranges that are read ahead


def open_remote_folder(location: str, option: str, context: SourceContext | None) -> DataFolder:
    """The folder at a URL, which need not exist; ranges of it are kept in the cache that ``context`` asks for.

    Raises:
        ConfigError: the scheme of the URL is unknown, its package is not installed, or the cache cannot be written.
    """
    return RemoteFolder(location, option, None if context is None else cache_of(context))


class RemoteFolder(DataFolder):
    """A folder of an object store, by URL. Objects are read by range requests, several at a time."""

    reads_ahead = True

    def __init__(self, url: str, option: str = "", cache: RangeCache | None = None) -> None:
        self.location = url.rstrip("/")
        self._option = option or "the folder"
        self._cache = cache
        self._listed: dict[str, tuple[int, str]] = {}
        """Size and tag of each object in the last listing."""
        self._process = 0
        self._connect()

    def _connect(self) -> None:
        """Open the file system. Connections of fsspec do not survive a fork, so each process has its own."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._file_system, self._path = open_file_system(self.location, self._option)
            self._pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="object-store")
            self._pending: OrderedDict[Range, Future[bytes]] = OrderedDict()

    def _key(self, name: str) -> str:
        self._connect()
        return f"{self._path}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.location}/{name}"

    def sizes(self) -> dict[str, int]:
        self._connect()

        def list_objects() -> dict[str, int]:
            self._file_system.invalidate_cache()
            entries = with_timeout(self._file_system, "ls")(self._path, detail=True)
            files = [entry for entry in entries if entry["type"] == "file" and entry["name"].strip("/") != self._path]
            by_name = {entry["name"].rpartition("/")[2]: entry for entry in files}
            self._listed = {name: (entry["size"], tag_of(entry)) for name, entry in by_name.items()}
            return {name: entry["size"] for name, entry in by_name.items()}

        try:
            return with_store_retries(list_objects, self.location)
        except MISSING:
            return {}

    def read(self, name: str) -> bytes:
        key = self._key(name)
        read = functools.partial(with_timeout(self._file_system, "cat_file"), key)
        content: bytes = with_store_retries(read, self._url(name))
        return content

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        self._connect()
        futures = []
        for one in ranges:
            is_pending = one in self._pending
            futures.append(self._pending.pop(one) if is_pending else self._pool.submit(self._read_range, *one))
        return [future.result() for future in futures]

    def read_ahead(self, ranges: Iterable[Range]) -> None:
        self._connect()
        for one in ranges:
            if one not in self._pending:
                self._pending[one] = self._pool.submit(self._read_range, *one)
        while len(self._pending) > _READ_AHEAD:  # left by a loader that went to another position
            self._pending.popitem(last=False)[1].cancel()

    def _read_range(self, name: str, start: int, size: int) -> bytes:
        key, url = self._key(name), self._url(name)
        fetch = functools.partial(read_range, self._file_system, key, url)
        end, (listed_size, tag) = start + size, self._listed.get(name, (0, ""))
        if self._cache is None or not tag or end > listed_size:
            return fetch(start, end)
        is_same = functools.partial(has_tag, self._file_system, key, tag)
        return self._cache.read_part(f"{url}\0{tag}", start, end, listed_size, fetch, is_same)

    def hash_of(self, name: str) -> str:
        key, url = self._key(name), self._url(name)
        info = functools.partial(with_timeout(self._file_system, "info"), key)
        size = int(with_store_retries(info, url)["size"])
        digest = xxhash.xxh3_128()
        for start in range(0, size, BLOCK_BYTES):
            digest.update(read_range(self._file_system, key, url, start, min(size, start + BLOCK_BYTES)))
        return digest.hexdigest()

    @contextmanager
    def write(self, name: str) -> Iterator[Any]:
        key = self._key(name)
        # An upload from a file can be retried as a whole, and a killed process leaves no truncated object.
        with tempfile.NamedTemporaryFile() as file:
            try:
                yield file
                file.flush()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise DataError(
                    f"{tempfile.gettempdir()}, which holds each file of {self.location} until it is uploaded, is full; "
                    "free space there, or set TMPDIR to another disk"
                ) from error
            with self._bucket_exists():
                upload_file(self._file_system, Path(file.name), key, self._url(name))

    def create(self, name: str, content: bytes) -> bool:
        key = self._key(name)
        try:
            with self._bucket_exists():
                create = with_timeout(self._file_system, "pipe_file", len(content))
                with_store_retries(functools.partial(create, key, content, mode="create"), self._url(name))
        except FileExistsError:
            return False
        return True

    @contextmanager
    def _bucket_exists(self) -> Iterator[None]:
        """Raise ConfigError if an object cannot be written because there is no such bucket."""
        try:
            yield
        except MISSING as error:
            raise ConfigError(
                f"{self._option} = {self.location!r} cannot be written: there is no such bucket; create it first"
            ) from error

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            key = self._key(name)
            with contextlib.suppress(FileNotFoundError):
                remove = with_timeout(self._file_system, "rm_file")
                with_store_retries(functools.partial(remove, key), self._url(name))
