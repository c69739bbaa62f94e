"""Datasets of the Hugging Face hub, streamed or downloaded.

Only rank 0 queries the hub for the list of files, or downloads them. Each rank then reads its own files; streamed files
are read in ranges, at the revision that rank 0 found.
"""

import contextlib
import errno
import itertools
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import datasets
import fsspec
import huggingface_hub
import pyarrow
import xxhash
from datasets.utils.file_utils import xgetsize
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

from torchtrain.config.schema import SourceConfig
from torchtrain.datasets import text_sources
from torchtrain.datasets.conversion_cache import Record, copies_folder
from torchtrain.datasets.data_identity import DataFile, FileTable, Identity
from torchtrain.datasets.file_formats import (
    SUFFIXES,
    FoundText,
    OnMalformed,
    decode_value,
    documents,
    documents_of_share,
    has_shares,
    kind_of,
    position_in_share,
    require_text,
)
from torchtrain.datasets.local_files import identify, identity_and_key
from torchtrain.datasets.text_sources import DatasetText
from torchtrain.errors import DataError, StorageError, TorchtrainError
from torchtrain.files import TRANSIENT_ERRNOS, hash_of, is_url, with_retries
from torchtrain.logging import logger
from torchtrain.plugins.object_storage.object_store import causes
from torchtrain.plugins.remote_data.remote_files import HEAD_ROWS, RangeFile
from torchtrain.plugins.remote_data.streamed_text import StreamedFile, StreamedText

T = TypeVar("T")


def find_revision(source: SourceConfig, label: str) -> str | None:
    """The newest commit of the dataset; None for a dataset in a local folder.

    Raises:
        DataError: there is no such dataset, or this user may not read it.
        StorageError: the hub does not respond.
    """
    if Path(source.name).exists():
        return None
    api, seconds = huggingface_hub.HfApi(), huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
    ask = partial(api.dataset_info, source.name, revision=source.revision, timeout=seconds)
    return cast(str, with_network_retries(ask, label).sha)


def download(source: SourceConfig, label: str, verify_bytes: float = math.inf) -> bytes:
    """Download a dataset of the hub, unless it is in the cache.

    Args:
        verify_bytes: files of a local folder, and the converted copy, are hashed in full up to this size.

    Returns:
        The pickled dataset, which contains the paths of its files.

    Raises:
        The errors of ``find_revision``.
    """
    datasets.disable_progress_bars()

    def attempt() -> bytes:
        _fetch_card(source)
        files, identity, cache = _local_files(source, label), label, None
        if files:  # the library's own cache identifies local files only by their times
            identified, key = identity_and_key(files, verify_bytes)
            identity, cache = identified.text, str(copies_folder() / key)
        try:
            dataset = datasets.load_dataset(
                source.name, source.subset or None, split=source.split, revision=source.revision, cache_dir=cache
            )
        except (pyarrow.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno):
                raise  # an error of the network or the file system; an error of Arrow has no errno
            folder = _builder(source, cache).cache_dir
            raise DataError(
                f"{label} cannot be opened ({error}). If {folder}, into which it was converted, is damaged, remove it, "
                "and start again"
            ) from error
        _record(_copies(dataset), identity, verify_bytes)
        return pickle.dumps(dataset)

    return with_network_retries(attempt, label)


def open_downloaded(source: SourceConfig, label: str, pickled: bytes, verify_bytes: float = math.inf) -> DatasetText:
    """Open the dataset that ``download`` returned on another rank; download it if this rank has another cache."""
    column = source.text_column
    try:
        dataset = with_retries(lambda: pickle.loads(pickled), Path(datasets.config.HF_DATASETS_CACHE))
    except FileNotFoundError:
        dataset = pickle.loads(download(source, label, verify_bytes))
    _require_intact(_copies(dataset), label, verify_bytes)
    if len(dataset) == 0:
        raise DataError(f"{label} has no documents")
    try:
        require_text(column, dataset.data.schema)
    except DataError as error:
        raise DataError(f"{label}: {error}") from None
    revision = f"revision {dataset._fingerprint}"  # depends on the revision of the hub, and not on paths
    records = [Record.read(copy) for copy in _copies(dataset)]

    def identify_source(whole: bool = False) -> Identity:
        files = _local_files(source, label)
        if not files:
            return Identity(revision)
        if whole or not records or records[0] is None:
            return identify(files, verify_bytes, whole=whole)
        # Of the files at the time of their conversion.
        return Identity(records[0].source, _table_of((str(file), file.stat().st_size) for file in files))

    texts = dataset.select_columns([column]).rename_columns({column: "text"})
    return DatasetText(texts.with_transform(_decode_rows), label, identify_source, texts.data.nbytes)


def _copies(dataset: datasets.Dataset) -> list[Path]:
    return [Path(file["filename"]) for file in dataset.cache_files]


def _record(copies: Sequence[Path], source: str, verify_bytes: float) -> None:
    """Write a record beside each copy that has none."""
    hashed = sum(copy.stat().st_size for copy in copies) <= verify_bytes
    for copy in copies:
        if Record.read(copy) is None:
            try:
                Record(source, copy.stat().st_size, hash_of(copy) if hashed else "").write(copy)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):  # the cache of another user
                    raise


def _require_intact(copies: Sequence[Path], label: str, verify_bytes: float) -> None:
    """Raise DataError if a copy that the library ``datasets`` made does not match its record."""
    records = {copy: record for copy in copies if (record := Record.read(copy))}
    hashed = sum(record.bytes for record in records.values()) <= verify_bytes
    for copy, record in records.items():
        if not record.fits(copy, math.inf if hashed else 0):
            raise DataError(
                f"{copy}, into which {label} was converted, is damaged: its size or hash is not that of the record "
                f"beside it; remove the folder {copy.parent}, and start again"
            )


def _decode_rows(rows: Mapping[str, Sequence[Any]]) -> dict[str, list[str | None]]:
    return {"text": [decode_value(value, "a document") for value in rows["text"]]}


def list_files(source: SourceConfig, label: str) -> list[tuple[str, int]]:
    """URL and size in bytes of each file of a dataset to stream; raises the errors of ``find_revision``."""
    return with_network_retries(partial(_list_files, source, label), label)


def open_streamed(
    source: SourceConfig,
    readers: int,
    label: str,
    files: Sequence[tuple[str, int]],
    verify_bytes: float = math.inf,
    held_out: Sequence[str] = (),
) -> StreamedText:
    """Open a dataset of the hub for streaming.

    Args:
        readers: number of readers.
        files: the result of ``list_files``.
        verify_bytes: files of a local folder are hashed in full up to this total size.
        held_out: see ``StreamedText``.
    """
    streamed = [_streamed_file(url, size, source.text_column) for url, size in files]
    names = "\0".join(url for url, _ in files)  # URLs contain the revision
    of_names = f"{len(files)} file(s), hash of their names {xxhash.xxh3_128_hexdigest(names.encode())[:16]}"

    def identify_source() -> Identity:
        local = _local_files(source, label)
        return identify(local, verify_bytes) if local else Identity(of_names, _table_of(files))

    return StreamedText(streamed, readers, label, identify_source, held_out=held_out)


def _table_of(files: Iterable[tuple[str, int]]) -> FileTable:
    """The table of files with these names and sizes, whose content is not hashed."""
    entries = [DataFile(name, size) for name, size in files]
    return FileTable.of(entries, len(entries))


def _local_files(source: SourceConfig, label: str) -> list[Path]:
    """The files of a dataset in a local folder; an empty list for a dataset of the hub."""
    if not Path(source.name).exists():
        return []
    splits = with_network_retries(partial(_builder, source), label).config.data_files or {}
    urls = [url for split, urls in splits.items() if str(split) in source.split for url in urls]  # or "train[:10%]"
    return [Path(url) for url in urls if not is_url(url)]


def with_network_retries(request: Callable[[], T], label: str) -> T:
    """Call ``request()``; after transient errors, retry it with growing pauses, or after the time that the hub states.

    Raises:
        DataError: the error is not transient.
        StorageError: the last attempt failed with a transient error.
    """
    for pause in (*text_sources.PAUSES_SECONDS, None):
        try:
            return request()
        except TorchtrainError:
            raise
        except Exception as error:  # the clients of the hub and of HTTP have dozens of exception types
            chain = causes(error)
            reason = ", because of ".join(dict.fromkeys(" ".join(str(cause).split()) or repr(cause) for cause in chain))
            if not _is_transient(chain):
                raise DataError(f"cannot open {label}: {reason}") from error
            if pause is None:
                raise StorageError(
                    f"{label}: the hub or the network does not respond: {reason}. Start again later; nothing is lost"
                ) from error
            seconds = max(pause, *map(_retry_after, chain))
            logger.error("%s: next attempt in %g s: %s", label, seconds, reason)
            time.sleep(seconds)
    raise AssertionError


def _is_transient(chain: Sequence[BaseException]) -> bool:
    """Whether an error of the hub, the network or a file system may disappear with a retry."""
    for error in chain:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status in (408, 425, 429) or status >= 500
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            return True
    # The base classes of exceptions of httpx, requests and aiohttp.
    kinds = {kind.__name__ for error in chain for kind in type(error).__mro__}
    return bool(kinds & {"ConnectionError", "TimeoutError", "HTTPError", "RequestException", "ClientError"})


def _retry_after(error: BaseException) -> float:
    """Seconds to wait according to the header Retry-After; 0 without it."""
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
        return float(error.response.headers["Retry-After"])  # type: ignore[attr-defined]
    return 0.0


def _list_files(source: SourceConfig, label: str) -> list[tuple[str, int]]:
    _fetch_card(source)
    data_files = _builder(source).config.data_files or {}
    if source.split not in data_files:
        raise DataError(f"{label} has no such split; there are {', '.join(map(str, data_files)) or 'none'}")
    urls = [str(url) for url in data_files[source.split]]
    if bad := [url for url in urls if not kind_of(url)[0]]:
        raise DataError(f"{label}: {bad[0]} cannot be streamed, only {SUFFIXES}; set data.download = true")
    files = [(url, xgetsize(url)) for url in urls]
    try:
        empty = not files or not _head(*files[0], source.text_column)
    except DataError as error:
        raise DataError(f"{label}: {urls[0].rpartition('/')[2]}: {error}") from None
    if empty:
        raise DataError(f"{label} has no documents")
    return files


def _head(url: str, size: int, column: str) -> list[str | None]:
    """The first documents of a file."""
    with _open(url, size) as raw:
        head = documents(raw, url.rpartition("/")[2], column, text_by_line=True, head=HEAD_ROWS)
        return list(itertools.islice(head, HEAD_ROWS + 1))


def _builder(source: SourceConfig, cache: str | None = None) -> datasets.DatasetBuilder:
    subset = source.subset or None
    return datasets.load_dataset_builder(source.name, subset, revision=source.revision, cache_dir=cache)


def _fetch_card(source: SourceConfig) -> None:
    """Download the dataset's README into the cache, because ``datasets`` treats a failed download as a missing file."""
    if Path(source.name).exists():
        return
    try:
        huggingface_hub.hf_hub_download(source.name, "README.md", repo_type="dataset", revision=source.revision)
    except LocalEntryNotFoundError as error:  # raised if the hub does not respond
        raise ConnectionError(str(error)) from error
    except EntryNotFoundError:
        pass


def _streamed_file(url: str, size: int, column: str) -> StreamedFile:
    name = url.rpartition("/")[2]

    def read(share: int, shares: int, start: int, on_malformed: OnMalformed) -> Iterator[str | None]:
        def on_malformed_line(location: str) -> None:
            on_malformed(f"{name}: {location}")

        with _open(url, size) as raw:
            yield from documents_of_share(
                *(raw, name, size, column, share, shares, start),
                text_by_line=True,
                on_malformed=on_malformed_line,
                in_file=in_file,
            )

    def position(share: int, shares: int, number: int) -> str:
        with _open(url, size) as raw:
            return position_in_share(raw, name, size, share, shares, number, text_by_line=is_text)

    is_text, in_file = kind_of(name)[0] in ("txt", "md"), FoundText()
    # A share of Parquet may need a whole row group, which may be large.
    divided_bytes = 0 if kind_of(name)[0] == "parquet" else size
    return StreamedFile(divided_bytes, has_shares(name, size, text_by_line=True), read, url, position)


def _open(url: str, size: int) -> RangeFile:
    def fetch(start: int, end: int) -> bytes:
        return with_network_retries(partial(_fetch, url, size, start, end), url)

    return RangeFile(url, size, fetch)


def _fetch(url: str, size: int, start: int, end: int) -> bytes:
    if url.startswith("hf://"):
        content = _fetch_of_hub(url, start, end)
    else:
        file_system, path = fsspec.core.url_to_fs(url)
        content = file_system.cat_file(path, start=start, end=end)
    if len(content) == size:  # the server does not support ranges
        content = content[start:end]
    if len(content) != end - start:
        raise ConnectionError(f"received {len(content)} bytes instead of {end - start}")
    return content


def _fetch_of_hub(url: str, start: int, end: int) -> bytes:
    """Fetch a range of hf://datasets/REPOSITORY@REVISION/PATH."""
    repository, _, rest = url.removeprefix("hf://datasets/").partition("@")
    revision, _, path = rest.partition("/")
    response = http_backoff(
        "GET",
        huggingface_hub.hf_hub_url(repository, path, repo_type="dataset", revision=revision),
        headers={**build_hf_headers(), "range": f"bytes={start}-{end - 1}"},
        timeout=huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT,
        max_retries=0,
    )
    hf_raise_for_status(response)
    return response.content
