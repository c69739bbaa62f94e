"""Text files on object stores and other remote file systems: find them by URL, and read them by range requests."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from typing import Any, BinaryIO, cast

import fsspec
import xxhash
from fsspec.caching import BlockCache

from torchtrain.config.registry import FOLDER_FORMATS
from torchtrain.datasets.data_identity import HASH_DIGITS, DataFile, FileTable, Identity
from torchtrain.datasets.file_formats import (
    SUFFIXES,
    FoundText,
    NotUTF8Error,
    OnMalformed,
    Reader,
    documents,
    documents_of_share,
    has_shares,
    ignore,
    kind_of,
    position_in_share,
)
from torchtrain.datasets.local_files import identify
from torchtrain.datasets.mixed_folder import kinds_of_descriptions, log_left_out
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.files import MISSING, is_url, local_path, scheme_of
from torchtrain.plugins.object_storage.object_store import (
    has_tag,
    open_file_system,
    read_range,
    tag_of,
    with_store_retries,
)
from torchtrain.plugins.remote_data.range_cache import RangeCache
from torchtrain.plugins.remote_data.streamed_text import StreamedFile

RANGE_BYTES = 1 << 23  # size of a range request for a file other than Parquet

HEAD_ROWS = 100  # number of rows of the first file in which the text column is checked


@dataclass(frozen=True)
class RemoteFile:
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

    def open(self, cache: RangeCache | None = None) -> BinaryIO:
        return cast(BinaryIO, RangeFile(self.url, self.size, partial(self._read, cache)))

    def _read(self, cache: RangeCache | None, start: int, end: int) -> bytes:
        file_system, _ = open_file_system(self.given_url, "the path")
        fetch = partial(read_range, file_system, self.path, self.url, start, end)
        if cache is None or not self.tag:
            return fetch()
        is_same = partial(has_tag, file_system, self.path, self.tag)
        return cache.read(f"{self.url}\0{self.tag}\0{start}\0{end}", fetch, is_same)


class RangeFile(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    """A file that is read by range requests. Its size is known, so no other requests are necessary.

    Args:
        fetch: returns the bytes from one offset to another.
    """

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


def find_remote_files(paths: Sequence[str], label: str, option: str) -> list[RemoteFile]:
    """The non-empty data files that URLs of files, folders or patterns name, in a fixed order.

    Args:
        paths: the URLs.
        label: the option with its value, for messages.
        option: the option alone.

    Raises:
        DataError: there are none, or they are of several kinds.
        ConfigError: a URL cannot be opened.
        StorageError: the store does not respond.
    """
    if not all(map(is_url, paths)):
        raise DataError(f"{label} mixes URLs and local paths; put them into two tables [[data.sources]]")
    if len(set(map(scheme_of, paths))) > 1:
        raise DataError(f"{label} mixes URLs of several file systems; give each a table [[data.sources]]")
    files = list({file.url: file for path in paths for file in _find(path, label, option)}.values())
    if bad := [file.name for file in files if not kind_of(file.name)[0]]:
        raise DataError(f"{label}: {bad[0]} must end in one of {SUFFIXES}")
    kinds = {"txt" if kind == "md" else kind for kind in (kind_of(file.name)[0] for file in files)}
    if len(kinds) > 1:
        raise DataError(
            f"{label} mixes files of several kinds (.{', .'.join(sorted(kinds))}), and a source has files of one kind: "
            f"name one kind, such as '*.{min(kinds)}', or a table [[data.sources]] for each"
        )
    if not files:
        raise DataError(f"{label} has no documents")
    return files


def _find(url: str, label: str, option: str) -> list[RemoteFile]:
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
    entries = sorted((name, info) for name, info in found.items() if info["type"] == "file")
    formats = {marker: of for of in FOLDER_FORMATS for marker in FOLDER_FORMATS[of].markers}
    for name, _ in entries:
        found_format = formats.get(name.rpartition("/")[2])
        if found_format is not None:
            raise DataError(
                f"{label} contains {found_format} data, or unfinished work ({name}); name a folder of {found_format} "
                "data in a table [[data.sources]] of its own"
            )
    if is_folder:
        prefix = len(path.strip("/"))
        hidden = {name for name, _ in entries if "/." in name.strip("/")[prefix:]}
        entries = [(name, info) for name, info in entries if name not in hidden and kind_of(name)[0]]
        of_descriptions = kinds_of_descriptions(name for name, _ in entries)
        log_left_out(label, [name for name, _ in entries if kind_of(name)[0] in of_descriptions])
        entries = [entry for entry in entries if kind_of(entry[0])[0] not in of_descriptions]
        if not entries:
            raise DataError(f"{label} is a folder without data files; they must end in one of {SUFFIXES}")
    is_suffix = url.rstrip("/").endswith(path)  # so that URLs of files begin as the given one does
    start = url.rstrip("/").removesuffix(path)
    return [
        RemoteFile(
            start + name if is_suffix else file_system.unstrip_protocol(name), info["size"], tag_of(info), name, url
        )
        for name, info in entries
        if info["size"] > 0
    ]


def _without_hidden(pattern: str, found: dict[str, Any]) -> dict[str, Any]:
    """The entries that ``pattern`` matches without names that begin with a dot, unless it gives these names itself."""
    given = set(pattern.split("/"))
    return {
        name: info
        for name, info in found.items()
        if not any(part.startswith(".") and part not in given for part in name.split("/"))
    }


def identify_remote(files: Sequence[RemoteFile], verify_bytes: float) -> Identity:
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


def documents_of_remote(
    file: RemoteFile,
    column: str,
    on_malformed: OnMalformed = ignore,
    read: Reader | None = None,
    start: int = 0,
    cache: RangeCache | None = None,
) -> Iterator[str | None]:
    """The documents of a file from number ``start`` on, or those that ``read`` returns. Errors name the file."""
    try:
        with file.open(cache) as raw:
            if read is None:
                texts = documents(raw, file.name, column, start, on_malformed=on_malformed)
            else:
                texts = read(raw, on_malformed)
            yield from texts
    except NotUTF8Error as error:
        raise NotUTF8Error(f"{file.url}: {error}") from None
    except DataError as error:
        message = str(error)
        raise DataError(message if file.url in message else f"{file.url}: {message}") from None
    except TorchtrainError:
        raise
    except Exception as error:  # each format's reader has its own errors for a damaged file
        raise DataError(f"{file.url} cannot be read, it seems damaged: {error!r}") from error


def require_text_in_head(
    files: Sequence[RemoteFile], column: str, *, skip_not_utf8: bool, cache: RangeCache | None = None
) -> None:
    """Raise DataError if the first rows of the first file have no text in ``column``.

    Args:
        files: the files.
        column: the column that contains the text.
        skip_not_utf8: check the first file that begins with UTF-8 instead.
        cache: keeps what is read.
    """
    for number, file in enumerate(files, 1):
        read = partial(_read_head, file.name, column)
        try:
            deque(documents_of_remote(file, column, ignore, read, cache=cache), maxlen=0)
            return
        except NotUTF8Error:
            if not skip_not_utf8 or number == len(files):
                raise


def _read_head(name: str, column: str, raw: BinaryIO, on_malformed: OnMalformed) -> Iterator[str | None]:
    return itertools.islice(documents(raw, name, column, head=HEAD_ROWS, on_malformed=on_malformed), HEAD_ROWS + 1)


def streamed_file(file: RemoteFile, column: str, cache: RangeCache | None) -> StreamedFile:
    """``file`` for ``StreamedText``."""
    in_file = FoundText()

    def read(share: int, shares: int, start: int, on_malformed: OnMalformed) -> Iterator[str | None]:
        def on_malformed_line(location: str) -> None:
            on_malformed(f"{file.name}: {location}")

        def read_share(raw: BinaryIO, on_malformed: OnMalformed) -> Iterator[str | None]:
            return documents_of_share(
                *(raw, file.name, file.size, column, share, shares, start), on_malformed=on_malformed, in_file=in_file
            )

        return documents_of_remote(file, column, on_malformed_line, read_share, cache=cache)

    def position(share: int, shares: int, number: int) -> str:
        with file.open(cache) as raw:
            return position_in_share(raw, file.name, file.size, share, shares, number)

    # A share of Parquet may need a whole row group, which may be large.
    divided_bytes = 0 if kind_of(file.name)[0] == "parquet" else file.size
    return StreamedFile(divided_bytes, has_shares(file.name, file.size), read, file.url, position)
