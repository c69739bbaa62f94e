"""Text as tokens in the cache: tokenized by the first run that reads it, by all of its local processes at once."""

import math
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist
import xxhash

from torchtrain.datasets.cache_folder import VARIABLE, Use, lock_file, locked, tokens_root, used_file
from torchtrain.datasets.data_source import TextInput
from torchtrain.datasets.text_input import TextsInMemory
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.token_folder import MANIFEST, LocalFolder
from torchtrain.datasets.tokenize_text import finish, log_skipped, output_errors, tokenize
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks, on_all_ranks
from torchtrain.environment import cores_of_process
from torchtrain.errors import DataError, StorageError
from torchtrain.logging import logger

T = TypeVar("T")

WAY_OUT = f"Make room, or name another folder by {VARIABLE}"
RULES = 1  # version of how text becomes tokens: increase it if the same text becomes other documents
POLL_SECONDS = 0.5  # between looks for what another host has written
VISIBLE_SECONDS = 120  # until a file system shows it


def tokenized(
    text: TextInput, tokenizer: Tokenizer, verify_bytes: float, group: dist.ProcessGroup | None = None
) -> TokenDataset:
    """The tokens of ``text``: those in the cache or, if it has none, tokenized now. Collective.

    Args:
        text: the text.
        tokenizer: the tokenizer.
        verify_bytes: tokens up to this total size are hashed.
        group: a gloo group of all ranks, which share the work. Ranks of other hosts share it if they have the same
            folder; otherwise each host tokenizes the text. None: this process does it alone.

    Raises:
        DataError: the cache cannot be written, or the text is damaged or changes.
        StorageError: the file system does not respond.
    """
    folder = tokens_folder(text, tokenizer)
    open_cached = partial(_open, folder, text, tokenizer, verify_bytes)
    opened = _on_all(partial(open_cached, warn=True), group)
    if group is not None and not all(gather_from_all_ranks(lambda: opened is not None, group)):
        opened = None
    if opened is None:
        rank, ranks = (0, 1) if group is None else _share(folder, group)
        with ExitStack() as stack:
            _on_all(partial(_prepare_folder, folder, text.name, open_cached, stack) if rank == 0 else _nothing, group)
            _on_all(partial(_write_share, folder, text, tokenizer, rank, ranks, open_cached), group)
            _on_all(partial(_finish, folder, text, tokenizer) if rank == 0 else _nothing, group)
            opened = _on_all(partial(_open_written, folder, open_cached), group)
    return opened


def log_tokens(opened: TokenDataset) -> None:
    """Log where tokens in the cache are, their number and size, and what of the text was skipped."""
    log_skipped(opened.manifest)
    location, size = opened.folder.location, sum(opened.folder.sizes().values())
    logger.info("%s: %s tokens in the cache, %s (%.3g MB)", opened.name, f"{len(opened):,}", location, size / 1e6)


def find_tokens(text: TextInput, tokenizer: Tokenizer, verify_bytes: float) -> TokenDataset | None:
    """The tokens of ``text`` in the cache; None if it has none, or they are damaged."""
    return _open(tokens_folder(text, tokenizer), text, tokenizer, verify_bytes)


def tokenize_in_memory(texts: TextsInMemory, tokenizer: Tokenizer) -> TokenDataset:
    """The tokens of documents in memory, also in the cache. Without communication."""
    return tokenized(texts, tokenizer, math.inf)


def _on_all(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    return function() if group is None else on_all_ranks(function, group)


def _nothing() -> None:
    pass


def tokens_folder(text: TextInput, tokenizer: Tokenizer) -> Path:
    """The folder of the cache for the tokens of ``text``: by its content, the tokenizer and the rules."""
    key = repr((RULES, text.cache_key(), text.options, tokenizer.content_hash))
    return tokens_root() / xxhash.xxh3_128_hexdigest(key.encode())


class CachedFolder(LocalFolder):
    """A folder of tokens in the cache. torchtrain.cache does not remove it while this object exists."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._use = Use(used_file(path))


def _open(
    folder: Path, text: TextInput, tokenizer: Tokenizer, verify_bytes: float, *, warn: bool = False
) -> TokenDataset | None:
    """The tokens in ``folder``; None if they are not complete, or damaged. ``warn``: log the damage."""
    if not (folder / MANIFEST).exists():
        return None
    files = text.files, text.identify().files
    try:
        return TokenDataset(CachedFolder(folder), tokenizer.content_hash, verify_bytes, text.name, files)
    except DataError as error:
        if warn:
            logger.warning("its tokens in the cache, %s, are damaged, and are written again: %s", folder, error)
        return None


class _OpenCached(Protocol):
    """``_open`` with its first arguments."""

    def __call__(self, *, warn: bool = False) -> TokenDataset | None: ...


def _share(folder: Path, group: dist.ProcessGroup) -> tuple[int, int]:
    """The number of this rank among those that write the same folder, and their number. Collective.

    Hosts may have caches of their own; and of text above ``verify_bytes``, whose times are part of the key, hosts with
    copies of their own have folders of their own.
    """
    rank = dist.get_rank(group)
    probe = broadcast_from_rank0(lambda: f".{uuid.uuid4().hex}", group) + f".{folder.name}."

    def write_probe() -> None:
        with output_errors(str(folder.parent), WAY_OUT):
            folder.parent.mkdir(parents=True, exist_ok=True)
            (folder.parent / f"{probe}{rank}").touch()

    def first_seen() -> int:
        with output_errors(str(folder.parent), WAY_OUT):
            names = os.listdir(folder.parent)
        return min((int(name.removeprefix(probe)) for name in names if name.startswith(probe)), default=rank)

    gather_from_all_ranks(write_probe, group)
    seen = gather_from_all_ranks(first_seen, group)
    with suppress(OSError):
        (folder.parent / f"{probe}{rank}").unlink()
    same = [number for number, first in enumerate(seen) if first == seen[rank]]
    return same.index(rank), len(same)


def _prepare_folder(folder: Path, name: str, open_cached: _OpenCached, stack: ExitStack) -> None:
    """Lock the folder, so that one run at a time writes it, and remove it if it is damaged."""

    def on_wait() -> None:
        logger.info("%s: another run tokenizes it into %s; waiting for it", name, folder)

    with output_errors(str(folder.parent), WAY_OUT):
        stack.enter_context(locked(lock_file(folder), on_wait))
        if (folder / MANIFEST).exists() and open_cached() is None:
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)


def _write_share(
    folder: Path, text: TextInput, tokenizer: Tokenizer, rank: int, ranks: int, open_cached: _OpenCached
) -> None:
    """Tokenize the share of ``rank`` of ``ranks``, unless another run has written the tokens."""
    if open_cached() is None:
        tokenize(text, tokenizer, LocalFolder(folder), cores_of_process(), WAY_OUT, rank=rank, world_size=ranks)


def _finish(folder: Path, text: TextInput, tokenizer: Tokenizer) -> None:
    """Write the manifest, after all ranks have written their shares."""
    output = LocalFolder(folder)
    _wait_for(lambda: finish(text, tokenizer, output, WAY_OUT) is not None, folder)


def _open_written(folder: Path, open_cached: _OpenCached) -> TokenDataset:
    _wait_for((folder / MANIFEST).exists, folder)
    opened = open_cached(warn=True)
    if opened is None:
        raise _not_kept(folder)
    return opened


def _wait_for(is_visible: Callable[[], bool], folder: Path) -> None:
    """Wait until this host sees what others have written; StorageError after ``VISIBLE_SECONDS``."""
    ends = time.monotonic() + VISIBLE_SECONDS
    while not is_visible():
        if time.monotonic() > ends:
            raise _not_kept(folder)
        time.sleep(POLL_SECONDS)


def _not_kept(folder: Path) -> StorageError:
    return StorageError(f"{folder} lacks what was just written, or it is damaged: its disk does not keep it")
