"""Text files on object stores and other remote file systems: find them by URL, and read them by range requests."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from typing import Any, BinaryIO, cast

import fsspec
import xxhash
from fsspec.caching import BlockCache

from torchtrain.datasets.data_identity import HASH_DIGITS, DataFile, FileTable, Identity, shortened
from torchtrain.datasets.file_formats import NotUTF8Error, kind_of, suffixes
from torchtrain.datasets.local_files import identify
from torchtrain.datasets.text_input import InputFile, Split, read_split
from torchtrain.datasets.token_folder import MANIFEST, UNFINISHED
from torchtrain.errors import DataError
from torchtrain.files import MISSING, is_url, local_path, scheme_of
from torchtrain.logging import logger
from torchtrain.plugins.object_storage.object_store import (
    has_tag,
    open_file_system,
    read_range,
    tag_of,
    with_store_retries,
)
from torchtrain.plugins.remote_data.range_cache import RangeCache

RANGE_BYTES = 1 << 23  # size of a range request for a file other than Parquet


@dataclass(frozen=True)
class ListedFile:
    """An entry of a listing."""

    url: str
    """Its URL, for messages."""
    size: int
    tag: str
    """Its ETag, or what the provider has instead."""
    path: str
    """Its path in the file system of ``given_url``."""
    given_url: str
    """The URL by which it was found. It may contain the host or the account, which ``path`` does not."""

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class RemoteFile(InputFile):
    """A file of a listing; ``cache`` keeps what is read of it."""

    def __init__(self, listed: ListedFile, cache: RangeCache | None = None) -> None:
        super().__init__(listed.url, listed.size, listed.name)
        self._listed = listed
        self._cache = cache

    def open(self) -> BinaryIO:
        return open_ranges(self.location, self.size, self._read)

    def _read(self, start: int, end: int) -> bytes:
        listed, cache = self._listed, self._cache
        file_system, _ = open_file_system(listed.given_url, "the path")
        fetch = partial(read_range, file_system, listed.path, listed.url, start, end)
        if cache is None or not listed.tag:
            return fetch()
        is_same = partial(has_tag, file_system, listed.path, listed.tag)
        return cache.read(f"{listed.url}\0{listed.tag}\0{start}\0{end}", fetch, is_same)


def open_ranges(url: str, size: int, fetch: Callable[[int, int], bytes]) -> BinaryIO:
    """A file that is read by range requests. Its size is known, so no other requests are necessary.

    ``fetch`` returns the bytes from one offset to another.
    """
    return cast(BinaryIO, _RangeFile(url, size, fetch))


class _RangeFile(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    def __init__(self, url: str, size: int, fetch: Callable[[int, int], bytes]):
        self._fetch = fetch
        # The reader of Parquet requests exactly the bytes that it needs. Of other files whole blocks are requested, so
        # that wherever a reader begins, it finds in the RangeCache what another one has read.
        of_parquet, of_others = {"cache_type": "none"}, {"cache_type": "blockcache", "cache_options": {"maxblocks": 2}}
        cache = of_parquet if kind_of(url)[0] == "parquet" else of_others
        super().__init__(None, url, block_size=RANGE_BYTES, size=size, **cache)

    def close(self) -> None:
        if not self.closed and isinstance(self.cache, BlockCache):
            self.cache._fetch_block_cached.cache_clear()  # it refers to itself, and garbage is collected rarely
        super().close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._fetch(start, min(end, self.size))


def find_remote_files(paths: Sequence[str], label: str, option: str) -> list[ListedFile]:
    """The non-empty data files that URLs of files, folders or patterns name, in a fixed order.

    Args:
        paths: the URLs.
        label: the option with its value, for messages.
        option: the option alone.

    Raises:
        DataError: there are none, or a folder has files of several formats.
        ConfigError: a URL cannot be opened.
        StorageError: the store does not respond.
    """
    if not all(map(is_url, paths)):
        raise DataError(f"{label} mixes URLs and local paths; put them into two tables [[data.sources]]")
    if len(set(map(scheme_of, paths))) > 1:
        raise DataError(f"{label} mixes URLs of several file systems; give each a table [[data.sources]]")
    files = list({file.url: file for path in paths for file in _find(path, label, option)}.values())
    if bad := [file.name for file in files if not kind_of(file.name)[0]]:
        raise DataError(f"{label}: {bad[0]} must end in one of {suffixes()}")
    if not files:
        raise DataError(f"{label} has no documents")
    return files


def _find(url: str, label: str, option: str) -> list[ListedFile]:
    file_system, path = open_file_system(url, option)

    def find() -> tuple[dict[str, Any], bool]:
        file_system.invalidate_cache()
        try:
            # A name may have brackets. No name is looked for that has * or ?, which a request may misread.
            info = None if has_magic(path.replace("[", "")) else file_system.info(path)
        except MISSING:
            if not has_magic(path):
                raise
            info = None
        # Without a time limit, because the listing of a large folder takes many requests.
        if info is None:
            return _without_hidden(path, file_system.glob(path, detail=True)), False
        if info["type"] == "directory":
            return file_system.find(path, detail=True), True
        return {info["name"]: info}, False

    try:
        found, is_folder = with_store_retries(find, url)
    except MISSING:
        found, is_folder = {}, False
    if not found:
        raise DataError(f"{label} does not exist: there is no such bucket, folder or file, or it is empty")
    entries = {name: info for name, info in sorted(found.items()) if info["type"] == "file"}
    if tokens := [name for name in entries if name.rpartition("/")[2] in (MANIFEST, UNFINISHED)]:
        raise DataError(
            f"{label} contains a folder of tokens, or of unfinished work ({tokens[0]}); name a folder of tokens in a "
            "table [[data.sources]] of its own"
        )
    if is_folder:
        names = _data_files_of_folder(list(entries), path, url, label)
        entries = {name: entries[name] for name in names}
    is_suffix = url.rstrip("/").endswith(path)  # so that URLs of files begin as the given one does
    start = url.rstrip("/").removesuffix(path)
    return [
        ListedFile(
            start + name if is_suffix else file_system.unstrip_protocol(name), info["size"], tag_of(info), name, url
        )
        for name, info in entries.items()
        if info["size"] > 0
    ]


def _data_files_of_folder(names: Sequence[str], path: str, url: str, label: str) -> list[str]:
    """The data files among all ``names`` in the folder ``path``, without hidden files; and without .md files, which
    often describe the data, if there are others."""
    prefix = len(path.strip("/"))
    kinds = {name: kind_of(name)[0] for name in names if "/." not in name.strip("/")[prefix:]}
    files = [name for name, kind in kinds.items() if kind]
    if not files:
        raise DataError(f"{label} is a folder without data files; they must end in one of {suffixes()}")
    if descriptions := [name for name in files if kinds[name] == "md"]:
        others = [name for name in files if kinds[name] != "md"]
        if others:
            logger.info("%s: left out %d .md file(s): %s", label, len(descriptions), shortened(descriptions))
            files = others
    found = sorted({kinds[name] for name in files})
    if len(found) > 1:
        patterns = [f"{url.rstrip('/')}/**/*.{kind}*" for kind in found]
        raise DataError(
            f"{label} mixes files of several formats (.{', .'.join(found)}), of which some may only describe the data. "
            f"Name those to read by a pattern, or several in a list: path = {json.dumps(patterns)}"
        )
    return files


def _without_hidden(pattern: str, found: dict[str, Any]) -> dict[str, Any]:
    """The entries that ``pattern`` matches without names that begin with a dot, unless it gives these names itself."""
    given = set(pattern.split("/"))
    return {
        name: info
        for name, info in found.items()
        if not any(part.startswith(".") and part not in given for part in name.split("/"))
    }


def identify_listing(files: Sequence[ListedFile], verify_bytes: float) -> Identity:
    """Number, total size and hash of a listing: of formats, sizes and ETags, in the order of the files; and a table.

    Of local files, given as file://, it is their content as in ``identify``.
    """
    local = [path for path in (local_path(file.url) for file in files) if path is not None]
    if local:
        return identify(local, verify_bytes)
    listed = [f"{kind_of(file.name)}\0{file.size}\0{file.tag}" for file in files]
    digest = xxhash.xxh3_128_hexdigest("\0".join(listed).encode())[:16]
    text = f"{len(files)} object(s) of {sum(file.size for file in files):,} bytes, hash of the listing {digest}"
    entries = (
        DataFile(file.url, file.size, xxhash.xxh3_128_hexdigest(entry.encode())[:HASH_DIGITS])
        for file, entry in zip(files, listed, strict=True)
    )
    return Identity(text, FileTable.of(entries, len(files)))


def require_text_in_head(files: Sequence[InputFile], column: str, label: str, *, skip_not_utf8: bool) -> None:
    """Read files up to the first document with text; raise DataError if they have none in ``column``.

    Args:
        files: the files; the others are not read after one with text.
        column: the column that contains the text.
        label: for messages.
        skip_not_utf8: continue with the next file after one that is not UTF-8.
    """
    not_utf8: NotUTF8Error | None = None
    for number, file in enumerate(files):
        try:
            if any(read_split(file, column, Split(number, 0, file.size))):
                return
        except NotUTF8Error as error:
            if not skip_not_utf8:
                raise
            not_utf8 = error
    raise not_utf8 or DataError(f"{label} has no documents")
