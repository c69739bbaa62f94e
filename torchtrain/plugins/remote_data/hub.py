"""Datasets of the Hugging Face hub, streamed or downloaded.

Only rank 0 queries the hub for the list of files. Each rank then reads its own files, in ranges at the revision that
rank 0 found, or opens those that rank 0 has downloaded.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import datasets
import fsspec
import huggingface_hub
import xxhash
from datasets.utils.file_utils import xgetsize
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    disable_progress_bars,
    hf_raise_for_status,
    http_backoff,
)

from torchtrain.datasets.data_identity import DataFile, FileTable, Identity
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.file_formats import kind_of, suffixes
from torchtrain.datasets.local_files import identity_and_key
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.text_input import PAUSES_SECONDS, InputFile, LocalFile, TextFiles
from torchtrain.errors import DataError, StorageError, TorchtrainError
from torchtrain.files import TRANSIENT_ERRNOS, is_url
from torchtrain.logging import logger
from torchtrain.plugins.object_storage.object_store import causes
from torchtrain.plugins.remote_data.remote_files import open_ranges, require_text_in_head
from torchtrain.plugins.remote_data.streamed_text import StreamedText
from torchtrain.progress import progress

T = TypeVar("T")
HubFiles = Sequence[tuple[str, int]]
"""URL, or path in a local folder, and size in bytes of each file of a dataset."""


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


def list_files(source: SourceConfig, label: str) -> HubFiles:
    """The files of the split of a dataset; raises the errors of ``find_revision``, and DataError if they have no text
    in the column."""
    files = with_network_retries(partial(_list_files, source, label), label)
    inputs = [HubFile(*file) for file in files]
    require_text_in_head(inputs, source.text_column, label, skip_not_utf8=source.skip_not_utf8)
    return files


def open_streamed(
    source: SourceConfig, files: HubFiles, label: str, context: SourceContext, held_out: Sequence[str] = ()
) -> StreamedText:
    """Open a dataset for streaming.

    Args:
        source: its config.
        files: the result of ``list_files``.
        label: for messages.
        context: its tokenizer, global batch size and options; files of a local folder are hashed up to its
            ``verify_bytes``.
        held_out: see ``StreamedText``.
    """
    return StreamedText(
        [HubFile(*file) for file in files],
        source.text_column,
        label,
        context,
        lambda: _identity_and_key(files, context.verify_bytes)[0],
        skip_not_utf8=source.skip_not_utf8,
        held_out=held_out,
    )


def open_text(source: SourceConfig, files: HubFiles, label: str, verify_bytes: float) -> TextFiles:
    """Open a dataset to tokenize it: files of a local folder, downloaded ones, or those of the hub itself.

    Args:
        source: its config.
        files: the result of ``list_files``.
        label: for messages.
        verify_bytes: files of a local folder are hashed in full up to this size.
    """
    identity, key = _identity_and_key(files, verify_bytes)
    if _local_paths(files):
        inputs: list[InputFile] = [LocalFile(path) for path in _local_paths(files)]
    elif source.download:
        inputs = [LocalFile(path) for path in download(files, label)]
    else:
        inputs = [HubFile(*file) for file in files]
    return TextFiles(inputs, source.text_column, label, lambda: identity, key, skip_not_utf8=source.skip_not_utf8)


def download(files: HubFiles, label: str) -> list[Path]:
    """Download the files of a dataset of the hub that are not in the cache of ``huggingface_hub``.

    Raises:
        DataError: a file in the cache is damaged.
        StorageError: the hub does not respond.
    """
    disable_progress_bars()
    total, paths = sum(size for _, size in files), []
    for url, size in progress(((file, file[1]) for file in files), f"downloading {label}", total):
        repository, revision, path = _split_url(url)
        request = partial(huggingface_hub.hf_hub_download, repository, path, repo_type="dataset", revision=revision)
        downloaded = Path(with_network_retries(request, url))
        found = downloaded.stat().st_size
        if found != size:
            raise DataError(
                f"{downloaded.resolve()}, to which {url} was downloaded, is damaged: it has {found} bytes, not {size}; "
                "remove it, and start again"
            )
        paths.append(downloaded)
    return paths


class HubFile(InputFile):
    """A file of a dataset, which is read in ranges."""

    def __init__(self, url: str, size: int) -> None:
        super().__init__(url, size, url.rpartition("/")[2])

    def open(self) -> BinaryIO:
        def fetch(start: int, end: int) -> bytes:
            return with_network_retries(partial(_fetch, self.location, self.size, start, end), self.location)

        return open_ranges(self.location, self.size, fetch)


def with_network_retries(request: Callable[[], T], label: str) -> T:
    """Call ``request()``; after transient errors, retry it with growing pauses, or after the time that the hub states.

    Raises:
        DataError: the error is not transient.
        StorageError: the last attempt failed with a transient error.
    """
    for pause in (*PAUSES_SECONDS, None):
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


def _list_files(source: SourceConfig, label: str) -> HubFiles:
    _fetch_card(source)
    builder = datasets.load_dataset_builder(source.name, source.subset or None, revision=source.revision)
    data_files = builder.config.data_files or {}
    if source.split not in data_files:
        raise DataError(f"{label} has no such split; there are {', '.join(map(str, data_files)) or 'none'}")
    urls = [str(url) for url in data_files[source.split]]
    if bad := [url for url in urls if not kind_of(url)[0]]:
        raise DataError(f"{label}: {bad[0]} cannot be read, only {suffixes()}")
    return [(url, size) for url, size in zip(urls, map(xgetsize, urls), strict=True) if size]


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


def _local_paths(files: HubFiles) -> list[Path]:
    return [Path(url) for url, _ in files if not is_url(url)]


def _identity_and_key(files: HubFiles, verify_bytes: float) -> tuple[Identity, str]:
    """The identity of a dataset, and the key of its tokens in the cache: of local files by their content, otherwise by
    their URLs, which contain the revision."""
    if local := _local_paths(files):
        return identity_and_key(local, verify_bytes)
    names = "\0".join(url for url, _ in files)
    text = f"{len(files)} file(s), hash of their names {xxhash.xxh3_128_hexdigest(names.encode())[:16]}"
    return Identity(text, FileTable.of((DataFile(*file) for file in files), len(files))), text


def _split_url(url: str) -> tuple[str, str, str]:
    """Repository, revision and path of hf://datasets/REPOSITORY@REVISION/PATH."""
    repository, _, rest = url.removeprefix("hf://datasets/").partition("@")
    revision, _, path = rest.partition("/")
    if not path:
        raise DataError(f"{url} is not a file of the dataset itself; leave out data.download")
    return repository, revision, path


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
    repository, revision, path = _split_url(url)
    response = http_backoff(
        "GET",
        huggingface_hub.hf_hub_url(repository, path, repo_type="dataset", revision=revision),
        headers={**build_hf_headers(), "range": f"bytes={start}-{end - 1}"},
        timeout=huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT,
        max_retries=0,
    )
    hf_raise_for_status(response)
    return response.content
