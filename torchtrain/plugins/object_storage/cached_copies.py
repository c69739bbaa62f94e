"""Local copies of files and folders that options name by URL, such as a tokenizer: a cache that processes share.

A copy is a folder in the cache, whose name has a hash of the URL, and of the names, sizes and tags of the objects:
another version of an object is another copy. The first process of a machine that needs a copy writes it, under a lock
for which the others wait.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import xxhash

from torchtrain.config.urls import URLReader
from torchtrain.errors import ConfigError, StorageError
from torchtrain.files import (
    MISSING,
    NO_LOCKS,
    NO_SPACE,
    discard,
    hash_of,
    open_lock_file,
    require_folder,
    scheme_of,
)
from torchtrain.logging import logger
from torchtrain.plugins.object_storage.object_store import (
    has_tag,
    md5_of,
    md5_of_file,
    missing_bucket,
    open_file_system,
    tag_of,
    with_store_retries,
    with_timeout,
)
from torchtrain.plugins.object_storage.partial_folder import partial_folder

WEB = ("http", "https")  # servers without folders
FILES_AT_ONCE = 4
CONTENT = "content="  # begins the tag of a file that the server gives none: its hash
SIGNATURE = re.compile(r"[?&](?:[^&=]*signature|sig)=", re.IGNORECASE)  # of a URL that grants access for some time


class StoredFile(NamedTuple):
    """A file in a store, as it was found."""

    path: str
    """In the file system of its URL."""
    name: str
    size: int | None
    """None if the server does not tell it."""
    tag: str
    """Its ETag, or what the provider has instead."""
    md5: bytes | None
    """None if the store does not tell it."""


class CachedCopies(URLReader):
    """Copies in ``torchtrain/urls`` in the cache of the user."""

    def names(self, url: str, option: str) -> list[str]:
        if scheme_of(url) in WEB:
            raise ConfigError(
                f"{option} = {url!r} names a folder, which a web server does not list: give the URL of a bucket, or "
                "copy the folder to a disk"
            )
        return [file.name for file in _Store(url, option).files_in_folder()]

    def fetch(self, url: str, option: str, names: Sequence[str] = ()) -> Path:
        return _fetch(url, option, tuple(names))


CACHED_COPIES = CachedCopies()


@cache
def _fetch(url: str, option: str, names: tuple[str, ...]) -> Path:
    store = _Store(url, option)
    files, is_folder = store.find(names)
    listed = "\0".join(f"{file.name}\0{file.size}\0{file.tag}" for file in files)
    digest = xxhash.xxh3_128_hexdigest(f"{url}\0{listed}".encode())
    root = cache_folder()
    require_folder(root, f"the cache in {root} (XDG_CACHE_HOME)")
    folder = root / f"{re.sub('[^A-Za-z0-9._-]', '_', _name(url))}-{digest}"
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if not _is_whole(folder, files):
            if folder.exists():
                discard(folder, folder)
            store.copy(files, folder)
    return folder if is_folder else folder / files[0].name


def cache_folder() -> Path:
    """The folder of all copies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torchtrain", "urls")


def _name(url: str) -> str:
    """The last part of the path of a URL."""
    return urlsplit(url).path.rstrip("/").rpartition("/")[2]


def _is_whole(folder: Path, files: Sequence[StoredFile]) -> bool:
    """Whether ``folder`` has copies of all ``files``."""
    try:
        sizes = [(folder / file.name).stat().st_size for file in files]
    except FileNotFoundError:
        return False
    return all(file.size in (None, size) for file, size in zip(files, sizes, strict=True))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with os.fdopen(open_lock_file(path), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # without locks, several processes may write the same copy
                raise
        yield


class _Store:
    """What is behind a URL."""

    def __init__(self, url: str, option: str) -> None:
        if SIGNATURE.search(url):
            raise ConfigError(
                f"{option} is a URL with a signature in it, which would be logged and stored in checkpoints: name the "
                "object by the URL of its bucket, and pass credentials in the environment of the provider"
            )
        self.url, self.option = url, option
        self.file_system, self.path = open_file_system(url, option)
        self.is_web = scheme_of(url) in WEB

    def find(self, names: Sequence[str]) -> tuple[list[StoredFile], bool]:
        """The files to copy, and whether the URL names a folder; see ``local_copy``."""
        info = self._info(self.path)
        if info is None:
            raise ConfigError(
                f"{self.option} = {self.url!r} does not exist: there is no such bucket, folder or file, or this user "
                "may not see it"
            )
        if info["type"] == "directory":
            files = [file for file in self.files_in_folder() if file.name in names]
            if not files:
                lacks = f"without any of {', '.join(names)}" if names else "and must be a file"
                raise ConfigError(f"{self.option} = {self.url!r} is a folder {lacks}")
            return files, True
        file = self._stored(info, _name(self.url))
        folder = (self.path.partition("?")[0] if self.is_web else self.path).rpartition("/")[0]

        def beside(name: str) -> StoredFile | None:
            # Where objects may not be listed, the answer for one that does not exist is that access is denied.
            with suppress(ConfigError):
                found = self._info(f"{folder}/{name}")
                return self._stored(found, name) if found and found["type"] == "file" else None
            return None

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            others = list(pool.map(beside, (name for name in names if name != file.name)))
        return [file, *(other for other in others if other is not None)], False

    def files_in_folder(self) -> list[StoredFile]:
        """The files directly in the folder, by name; none if it does not exist."""

        def request() -> list[dict[str, Any]]:
            self.file_system.invalidate_cache()
            entries: list[dict[str, Any]] = with_timeout(self.file_system, "ls")(self.path, detail=True)
            return [entry for entry in entries if entry["type"] == "file"]

        try:
            entries = with_store_retries(request, self.url)
        except MISSING as error:
            self._require_bucket(error)
            return []
        found = [self._stored(entry, entry["name"].rpartition("/")[2]) for entry in entries]
        return sorted((file for file in found if file.name), key=lambda file: file.name)

    def _info(self, path: str) -> dict[str, Any] | None:
        """What the store says of an object or folder; None if there is none."""

        def request() -> dict[str, Any]:
            self.file_system.invalidate_cache()
            try:
                info: dict[str, Any] = with_timeout(self.file_system, "info")(path)
            except FileNotFoundError as error:
                if self.is_web and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None  # fsspec has it for each failure of a web server
                raise
            return info

        try:
            return with_store_retries(request, self.url)
        except MISSING as error:
            self._require_bucket(error)
            return None

    def _require_bucket(self, error: BaseException) -> None:
        if reason := missing_bucket(error):
            raise ConfigError(f"{self.option} = {self.url!r} cannot be used: {reason}") from error

    def _stored(self, info: dict[str, Any], name: str) -> StoredFile:
        tag = tag_of(info)
        if not tag:  # as of some web servers: a copy is that of the content
            content = with_store_retries(lambda: with_timeout(self.file_system, "cat_file")(info["name"]), self.url)
            tag = CONTENT + xxhash.xxh3_128_hexdigest(content)
        return StoredFile(info["name"], name, info.get("size"), tag, md5_of(info))

    def copy(self, files: Sequence[StoredFile], folder: Path) -> None:
        """Write copies of ``files`` to ``folder``, which does not exist.

        Raises:
            StorageError: the store does not respond, or an object has changed since it was found.
        """
        size = sum(file.size or 0 for file in files)
        logger.info(f"{self.url}: fetching {len(files)} file(s) of {size / 2**20:,.1f} MiB to {folder}")
        with partial_folder(folder) as partial:
            partial.mkdir()
            with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                list(pool.map(lambda file: self._copy_file(file, partial / file.name), files))
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, as there are no locks
                    raise

    def _copy_file(self, file: StoredFile, target: Path) -> None:
        def request() -> None:
            try:
                with_timeout(self.file_system, "get_file", file.size or 0)(file.path, str(target))
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise ConfigError(
                    f"{self.option} = {self.url!r} is copied to {target.parent.parent}, which is full: free space, or "
                    "set XDG_CACHE_HOME to another disk"
                ) from error
            size = target.stat().st_size
            if file.size not in (None, size):
                raise ConnectionError(f"received {size} of {file.size} bytes")
            if file.md5 is not None and file.md5 != md5_of_file(target):
                raise ConnectionError("received other bytes than those whose MD5 the store has")

        try:
            with_store_retries(request, f"{self.url} ({file.name})")
        except MISSING as error:
            raise self._changed(file) from error
        if file.tag == CONTENT + hash_of(target) if file.tag.startswith(CONTENT) else self._has_tag(file):
            return
        raise self._changed(file)

    def _has_tag(self, file: StoredFile) -> bool:
        return has_tag(self.file_system, file.path, file.tag)

    def _changed(self, file: StoredFile) -> StorageError:
        return StorageError(
            f"{self.option} = {self.url!r}: {file.name} was replaced or removed while it was fetched. Start again"
        )
