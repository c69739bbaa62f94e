"""Tokenize a source once, in many processes on any number of machines, into a folder of tokenized data.

The input is divided into shards (input_splits.py). Process ``rank`` of ``world_size`` writes every ``world_size``-th
shard, and the record ``<shard>.json`` after it, and shares nothing with the others but the output folder. So the work
can be stopped at any time: the same command resumes with the shards that have no record, or not the size or hash that
the record states. The process that finds the records of all shards writes the manifest. The bytes of a shard depend
only on the source and the tokenizer.
"""

import fcntl
import gc
import json
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from torchtrain.config.schema import SourceConfig
from torchtrain.datasets.builtin_sources import open_source
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.local_files import (
    are_plain_text,
    find_text_files,
    identify,
    log_malformed,
    log_not_utf8,
    open_plain_text,
    require_utf8_files,
)
from torchtrain.datasets.packing import DocumentSource, text_bytes
from torchtrain.datasets.text_sources import PAUSES_SECONDS
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.errors import DataError, StorageError, TorchtrainError
from torchtrain.files import (
    MISSING,
    TRANSIENT_ERRNOS,
    fsync_folder,
    is_url,
    json_object,
    local_path,
    open_lock_file,
    unreadable,
    with_retries,
)
from torchtrain.logging import logger
from torchtrain.plugins.prepared_data.data_folder import DataFolder, LocalFolder
from torchtrain.plugins.prepared_data.input_splits import (
    InputCounts,
    LocalInputFile,
    RemoteInputFile,
    ShardedDocuments,
    ShardedFiles,
    ShardedInput,
    ShardedPart,
)
from torchtrain.plugins.prepared_data.open_folder import open_folder
from torchtrain.plugins.prepared_data.tokenized import (
    HELD_OUT,
    MANIFEST,
    UNFINISHED,
    PreparedManifest,
    Shard,
    damaged_file,
)
from torchtrain.plugins.remote_data.remote_files import find_remote_files, identify_remote, require_text_in_head
from torchtrain.progress import Stderr

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
SIGNAL_SECONDS = 1.0  # until a signal to a process group has reached this process, too
POLL_SECONDS = 10.0  # between listings of the output folder, for the progress of all processes


def prepare(
    source: SourceConfig,
    key: str,
    tokenizer_path: str,
    location: str | Path,
    processes: int,
    verify_bytes: float = math.inf,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> PreparedManifest | None:
    """``tokenize`` a single ``source``, which ``open_input`` opens."""
    tokenizer = load_tokenizer(tokenizer_path)
    documents = open_input(source, key, tokenizer, verify_bytes, rank=rank, world_size=world_size)
    held_out = source.held_out
    return tokenize(documents, tokenizer, location, processes, held_out, rank=rank, world_size=world_size)


def open_input(
    source: SourceConfig,
    key: str,
    tokenizer: Tokenizer,
    verify_bytes: float = math.inf,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> ShardedInput:
    """Open the texts of ``source``, and check what would otherwise stop the work later.

    Args:
        source: the source.
        key: its section, for messages.
        tokenizer: the tokenizer.
        verify_bytes: the input is hashed, and its encoding checked, in full up to this size.
        rank, world_size: number of this process, and of all processes, which divide the check among them.

    Raises:
        DataError: ``source`` does not match its config, or its text is not UTF-8.
    """
    if any(MANIFEST in open_folder(path, f"{key}.path").sizes() for path in source.paths):
        raise DataError(
            f"{key}.path = {source.path!r} is prepared already: train on it, or give the texts it was made from"
        )
    context = SourceContext(key, tokenizer, verify_bytes=verify_bytes)
    return with_retries(partial(_open_input, source, context, rank, world_size), key)


def tokenize(
    documents: ShardedInput,
    tokenizer: Tokenizer,
    location: str | Path,
    processes: int,
    held_out: float = 0.0,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> PreparedManifest | None:
    """Tokenize this process's share of ``documents``, or resume after a stop.

    Args:
        documents: the input.
        tokenizer: the tokenizer.
        location: the output folder.
        processes: number of worker processes that this process starts.
        held_out: the share of the documents that goes to the folder ``HELD_OUT`` in that folder; they are read again
            for it.
        rank, world_size: number of this process, and of all processes that tokenize the source.

    Returns:
        The manifest; None if other processes have not written all of their shards yet.

    Raises:
        DataError: the folder contains another source or the work of another tokenizer, complete or not; another process
            is writing to it; or the input is damaged.
    """
    if held_out:
        identity, write = documents.identity(), partial(_tokenize, rank=rank, world_size=world_size)
        rest, inner = (ShardedPart(documents, identity, held_out, held_out=part) for part in (False, True))
        manifest = write(rest, tokenizer, location, processes, held_out)
        return manifest if write(inner, tokenizer, f"{location}/{HELD_OUT}", processes, 0.0) else None
    return _tokenize(documents, tokenizer, location, processes, 0.0, rank=rank, world_size=world_size)


def _tokenize(
    documents: ShardedInput,
    tokenizer: Tokenizer,
    location: str | Path,
    processes: int,
    held_out: float,
    *,
    rank: int,
    world_size: int,
) -> PreparedManifest | None:
    """``tokenize`` into one folder; ``held_out``: the share of the documents that ``documents`` is without."""
    names = [f"shard-{number:05}" for number in range(len(documents.shard_sizes))]
    fields = tokenizer.content_hash, tokenizer.vocab_size, documents.name, documents.identity()
    plan = PreparedManifest(*fields, shard_count=len(names), held_out=held_out)
    output = open_folder(str(location), "prepare.output")
    is_local = isinstance(output, LocalFolder)
    # One process flushes its files at the end, because after each shard the workers would wait for the disk.
    flush = world_size > 1 or not is_local
    with (
        _output_errors(output.location),
        _locked(output.path, exclusive=world_size == 1) if isinstance(output, LocalFolder) else nullcontext(),
    ):
        if not _begin(output, plan, alone=world_size == 1):
            sizes = output.sizes()
            write = partial(_with_input_retries, partial(_write_shard, documents, tokenizer, output, plan.dtype, flush))
            is_complete = partial(_is_complete, documents, output, sizes, plan, flush)
            progress = _Progress(output, dict(zip(names, documents.shard_sizes, strict=True)), rank, world_size)
            own = {name: number for number, name in enumerate(names) if number % world_size == rank}
            _run(write, is_complete, own, processes, progress)
            documents.require_unchanged()
        manifest = _finish(output, plan, names, documents.file_count, flushed=flush)
    if manifest is None and world_size == 1:
        raise StorageError(
            f"{output.location} lacks files that this command has written, or they have other sizes: run it again when "
            "the storage keeps what is written"
        )
    return manifest


def _open_input(source: SourceConfig, context: SourceContext, rank: int, world_size: int) -> ShardedInput:
    if source.source_type in ("files", "remote_files"):
        option = f"{context.section}.path"
        label = f"{option} = {source.path!r}"
        make_input = partial(ShardedFiles, column=source.text_column, name=label, skip_not_utf8=source.skip_not_utf8)
        if any(map(is_url, source.paths)):
            remote = find_remote_files(source.paths, label, option)
            require_text_in_head(remote, source.text_column, skip_not_utf8=source.skip_not_utf8)

            def identity_now() -> str:
                return identify_remote(find_remote_files(source.paths, label, option), context.verify_bytes).text

            paths = [local_path(file.url) for file in remote]
            inputs = [
                RemoteInputFile(file) if path is None else LocalInputFile(path)
                for file, path in zip(remote, paths, strict=True)
            ]
            return make_input(
                inputs,
                identify=partial(identify_remote, remote, context.verify_bytes),
                identity_now=None if any(paths) else identity_now,
            )
        found = find_text_files(
            source.paths, source.text_column, label, split=source.split, skip_not_utf8=source.skip_not_utf8
        )
        files = [LocalInputFile(file) for file in found]
        if are_plain_text(found):
            return ShardedDocuments(open_plain_text(found, label, context.verify_bytes), files)
        if not source.skip_not_utf8:
            require_utf8_files(found[rank::world_size], label, context.verify_bytes)
        return make_input(files, identify=partial(identify, found, context.verify_bytes))
    opened = open_source(replace(source, download=True), context)
    if not isinstance(opened, DocumentSource):
        raise DataError(
            f"{context.section}.type = {source.type!r} cannot be prepared: it has no random access to its documents"
        )
    return ShardedDocuments(opened)


def _begin(output: DataFolder, plan: PreparedManifest, *, alone: bool) -> bool:
    """Write the plan unless the folder has it; returns whether the work is complete."""
    sizes = output.sizes()
    if MANIFEST in sizes:
        _require_same(plan, PreparedManifest.read(output, output.location), output)
        return True
    if UNFINISHED not in sizes and output.create(UNFINISHED, _as_json(plan)):
        return False
    try:
        found = PreparedManifest.read(output, output.location, UNFINISHED)
    except DataError:
        if MANIFEST in output.sizes():  # another process has finished meanwhile
            return True
        raise
    _require_same(plan, found, output)
    if found.shard_count != plan.shard_count:  # as with another data.skip_not_utf8
        if not alone:
            raise DataError(
                f"{output.location} was begun with other options, which make {found.shard_count} shards "
                f"of the data, not {plan.shard_count}: remove it, or name another folder"
            )
        output.remove(name for name in sizes if name.startswith("shard-"))
        output.remove([UNFINISHED])
        output.create(UNFINISHED, _as_json(plan))
    if alone:
        output.remove(name for name in sizes if name.endswith(".partial"))  # left by a killed process
    return False


def _finish(
    output: DataFolder, plan: PreparedManifest, names: Sequence[str], files: int, *, flushed: bool
) -> PreparedManifest | None:
    """Write the manifest if all shards are complete, and remove the records; None if shards are missing.

    Args:
        files: number of files of the input.
        flushed: only shards whose files are on disk are complete. False: all shards are flushed now.
    """
    sizes = output.sizes()
    records = [f"{name}.json" for name in names]
    if MANIFEST not in sizes:
        with ThreadPoolExecutor(32) as pool:
            try:
                found = list(pool.map(output.read, (record for record in records if record in sizes)))
            except MISSING:  # another process has written the manifest meanwhile, and removes the records
                return PreparedManifest.read(output, output.location)
        parsed = [record for record in map(_parse_record, found) if record and (record.flushed or not flushed)]
        written = [record.shard for record in parsed if _has_sizes(record.shard, sizes, plan.dtype)]
        if len(written) < len(names):
            logger.info(
                "%s: this process has written its share; %d of %d shards are complete. The process that finishes last "
                "writes the manifest; if one was killed, run the same command again",
                *(output.location, len(written), len(names)),
            )
            return None
        if isinstance(output, LocalFolder) and not flushed:
            for name in sizes:
                if name.startswith("shard-"):
                    with open(output.path / name, "rb") as file:
                        os.fsync(file.fileno())
        if not any(shard.documents for shard in written):
            skipped = sum(shard.skipped for shard in written)
            raise DataError(f"{plan.source} has no text in its {skipped} documents")
        try:
            with output.write(MANIFEST, flush=True) as file:
                file.write(_as_json(replace(plan, shards=tuple(written))))
        except MISSING:  # another process that finishes at the same time has removed the partial file
            if MANIFEST not in output.sizes():
                raise
        if isinstance(output, LocalFolder):
            fsync_folder(output.path, MANIFEST)  # before the records are removed
    manifest = PreparedManifest.read(output, output.location)
    output.remove(name for name in (UNFINISHED, *records) if name in sizes)
    output.remove(name for name in sizes if name.endswith(".partial"))
    not_utf8 = [file for shard in manifest.shards for file in shard.not_utf8]
    log_not_utf8(plan.source, not_utf8, files)
    first = next((shard.first_malformed for shard in manifest.shards if shard.malformed), "")
    log_malformed(plan.source, sum(shard.malformed for shard in manifest.shards), first)
    return manifest


def _require_same(plan: PreparedManifest, found: PreparedManifest, output: DataFolder) -> None:
    if found.tokenizer_hash != plan.tokenizer_hash:
        raise DataError(
            f"{output.location} was begun with another tokenizer (SHA-256 {found.tokenizer_hash[:12]}..., now "
            f"{plan.tokenizer_hash[:12]}...); use that one, or an empty folder"
        )
    if found.held_out != plan.held_out:
        raise DataError(
            f"{output.location} was begun with data.held_out = {found.held_out:g}, not {plan.held_out:g}: set it to "
            "that, or use an empty folder"
        )
    saved, current = sorted((found.source_fingerprint, plan.source_fingerprint), key=len)
    # One of them may lack the hash of all content, which comes last: it depends on data.verify_gib.
    if current != saved and not (saved and current.startswith(f"{saved}, ")):
        raise _other_data(plan, found.source, output)


def _other_data(plan: PreparedManifest, source: str, output: DataFolder) -> DataError:
    return DataError(
        f"{output.location} was begun with other data ({source}, now {plan.source}, or the content of its files has "
        "changed since); use an empty folder"
    )


@contextmanager
def _locked(folder: Path, *, exclusive: bool) -> Iterator[None]:
    """Lock the folder against other commands; processes of one command share the lock. It ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_lock_file(folder / ".lock"), "r+") as file:
        try:
            # Not flock, whose lock the worker processes would inherit.
            fcntl.lockf(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both
            raise DataError(f"another prepare is at work in {folder}; wait for it, or use another folder") from None
        yield


@contextmanager
def _output_errors(location: str) -> Iterator[None]:
    """Raise errors of the output's file system: StorageError if they may pass, else DataError. Those of the input are
    not OSErrors (``_InputError``)."""
    try:
        yield
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS:
            raise StorageError(
                f"{location} cannot be written: {error.strerror}. What is complete is kept: start the same command "
                "again when the file system answers"
            ) from error
        raise DataError(
            f"{location} cannot be written: {error.strerror or error}. Make room, or give it another disk; what is "
            "complete is kept, and the same command continues from there"
        ) from error


class _InputError(Exception):
    """The file system failed while the input was read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _read_input(documents: ShardedInput, number: int, counts: InputCounts) -> Iterator[str | None]:
    """The documents of a shard; errors of the file system are raised as ``_InputError``."""
    try:
        yield from documents.read(number, counts)
    except OSError as error:
        raise _InputError(error) from error


def _with_input_retries(write: Callable[[str, int], int], name: str, number: int) -> int:
    """``write(name, number)``; if the input cannot be read, the shard is written again after each of the pauses.

    Raises:
        StorageError: the last attempt failed, too.
    """
    for pause in (*PAUSES_SECONDS, None):
        try:
            return write(name, number)
        except _InputError as failed:
            error = failed.error
            if pause is None:
                raise unreadable("the input", error, len(PAUSES_SECONDS) + 1) from error
            logger.warning("%s: next attempt in %g s: %s", error.filename or "the input", pause, error.strerror)
            time.sleep(pause)
    raise AssertionError


def _run(
    write: Callable[[str, int], int],
    is_complete: Callable[[str, int], int | None],
    shards: Mapping[str, int],
    processes: int,
    progress: "_Progress",
) -> None:
    """Call ``write(name, number)`` in worker processes for each shard that is not complete."""
    # A forked process starts immediately, with the source and the tokenizer open. It calls nothing that needs a lock
    # which a thread of this process could hold. Objects are frozen so that it does not collect the garbage of this
    # process: the destructor of a process group would wait for threads that do not exist there.
    context = multiprocessing.get_context("fork")
    next_shard = context.Value("q", 0)
    workers: dict[Connection, Any] = {}
    # A signal that arrives while workers are started is handled afterwards, here and in a new process, which is still a
    # copy of this one. It is blocked for the new process, and noted here, where another thread may get it.
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in STOP_SIGNALS}
    signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def handle_signals() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received.pop())

    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork wherever there are threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            gc.freeze()
            for _ in range(min(processes, len(shards))):
                if received or signal.sigpending() & STOP_SIGNALS:
                    break
                ours, theirs = context.Pipe(duplex=False)
                arguments = (write, is_complete, shards, next_shard, theirs, signals_before)
                worker = context.Process(target=_work, args=arguments, daemon=True)
                worker.start()
                workers[ours] = worker
                theirs.close()  # so that the pipe ends with the process
        handle_signals()
        _follow(workers, progress)
    finally:
        gc.unfreeze()
        for worker in workers.values():
            worker.terminate()
            worker.join()
        handle_signals()


class _Progress:
    """A line with the share of the work that is done, tokens, tokens per second, and the time left.

    With one process the workers report their shards. With several, rank 0 shows the progress of all, by the records in
    the output folder, until its own share is complete.
    """

    def __init__(self, output: DataFolder, shard_sizes: Mapping[str, int], rank: int, world_size: int) -> None:
        self._output = output
        self._shard_sizes = shard_sizes
        self._done: set[str] = set()
        self._tokens = self._new_tokens = 0
        self.reads_records = rank == 0 and world_size > 1
        """Whether ``read_records`` counts complete shards, instead of the messages of the workers."""
        self._listed_at = -math.inf
        self._is_shown = rank == 0

    def __enter__(self) -> "_Progress":
        self._began = time.monotonic()
        self._bar = tqdm(
            total=sum(self._shard_sizes.values()),
            desc=self._output.location,
            bar_format="{desc}: {percentage:3.0f}%|{bar}|{postfix}, {remaining} left",
            dynamic_ncols=True,
            file=Stderr(),
            disable=not self._is_shown,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, name: str, tokens: int, *, is_new: bool) -> None:
        """Count a complete shard. ``is_new``: it was written by this command."""
        if name in self._done:
            return
        self._done.add(name)
        self._tokens += tokens
        self._new_tokens += tokens * is_new
        rate = self._new_tokens / max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix_str(f" {self._tokens:,} tokens, {rate:,.0f} tokens/s", refresh=False)
        if is_new or self._bar.disable:
            self._bar.update(self._shard_sizes[name])
        else:  # the rate, and so the time left, is of the work of this command
            self._bar.initial += self._shard_sizes[name]
            self._bar.n += self._shard_sizes[name]

    def read_records(self) -> None:
        """Count the shards whose records are in the output folder, at most every ``POLL_SECONDS``."""
        if time.monotonic() - self._listed_at < POLL_SECONDS:
            return
        is_first, self._listed_at = self._listed_at == -math.inf, time.monotonic()
        names = {name.removesuffix(".json") for name in self._output.sizes() if name.endswith(".json")}
        for name in sorted(names & self._shard_sizes.keys() - self._done):
            with suppress(*MISSING):  # another process has written the manifest, and removes the records
                record = _parse_record(self._output.read(f"{name}.json"))
                if record is not None:
                    self.add(name, record.shard.tokens, is_new=not is_first)


def _follow(workers: dict[Connection, Any], progress: _Progress) -> None:
    """Show the progress until all workers have ended; raise the error of one of them."""
    with progress:
        while workers:
            if progress.reads_records:
                progress.read_records()
            for pipe in wait(list(workers), POLL_SECONDS if progress.reads_records else None):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    worker = workers.pop(pipe)
                    worker.join()
                    if worker.exitcode == -signal.SIGTERM:
                        time.sleep(SIGNAL_SECONDS)  # for a signal to all processes, which ends this one, too
                    if worker.exitcode:
                        raise DataError(
                            f"a worker process of prepare ended with code {worker.exitcode}, perhaps out of memory; "
                            "run prepare again to resume, with fewer --prepare.processes"
                        ) from None
                    continue
                if isinstance(message, Exception):
                    raise message
                if not progress.reads_records:
                    name, tokens, is_new = message
                    progress.add(name, tokens, is_new=is_new)


def _work(
    write: Callable[[str, int], int],
    is_complete: Callable[[str, int], int | None],
    shards: Mapping[str, int],
    next_shard: Any,
    pipe: Connection,
    signals: Collection[int],
) -> None:
    """A worker process: write the next shard that no other worker has taken, until none is left; report each.

    ``signals``: those to block, as before the start of the workers.
    """
    # Signals may reach all processes: the parent handles them, and ends the workers by SIGTERM.
    for ignored in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for position, (name, number) in enumerate(shards.items()):
            with next_shard.get_lock():
                if position < next_shard.value:
                    continue
                next_shard.value = position + 1
            tokens = is_complete(name, number)
            is_new = tokens is None
            pipe.send((name, write(name, number) if tokens is None else tokens, is_new))
    except (TorchtrainError, OSError) as error:
        pipe.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_shard(
    documents: ShardedInput,
    tokenizer: Tokenizer,
    output: DataFolder,
    dtype: np.dtype[Any],
    flush: bool,
    name: str,
    number: int,
) -> int:
    """Write the tokens of a shard, the offsets of its documents, and then its record; returns the number of tokens."""
    starts, tokens, size, counted, skipped = [], 0, 0, 0, 0
    token_bytes = np.array(tokenizer.token_bytes)
    hasher = xxhash.xxh3_128()
    counts = InputCounts()
    with output.write(f"{name}.tokens", flush=flush) as file:
        for text in _read_input(documents, number, counts):
            if not text:
                skipped += text is None
                continue
            ids = np.array(tokenizer.encode(text, bos=True, eos=True), dtype=dtype)
            file.write(ids.data)
            hasher.update(ids.data)
            starts.append(tokens)
            tokens += len(ids)
            size += text_bytes(text)
            counted += int(token_bytes[ids].sum())
    offsets = np.array([*starts, tokens], dtype="<i8")
    with output.write(f"{name}.documents", flush=flush) as file:
        file.write(offsets.data)
    shard = Shard(
        name,
        tokens,
        documents=len(starts),
        bytes=size,
        skipped=skipped,
        tokens_hash=hasher.hexdigest(),
        documents_hash=xxhash.xxh3_128(offsets.data).hexdigest(),
        token_bytes=counted,
        malformed=counts.malformed,
        first_malformed=counts.first_malformed,
        not_utf8=tuple(counts.not_utf8),
    )
    _write_record(output, _Record(shard, flush, documents.content_hash(number)))
    return tokens


@dataclass(frozen=True)
class _Record:
    """The content of ``<shard>.json``, which is written after the shard."""

    shard: Shard
    flushed: bool
    """Whether the files of the shard were flushed to disk before."""
    input_hash: str
    """``ShardedInput.content_hash`` of the shard."""


def _write_record(output: DataFolder, record: _Record) -> None:
    content = {**asdict(record.shard), "flushed": record.flushed, "input_hash": record.input_hash}
    with output.write(f"{record.shard.name}.json", flush=record.flushed) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _is_complete(
    documents: ShardedInput,
    output: DataFolder,
    sizes: Mapping[str, int],
    plan: PreparedManifest,
    flush: bool,
    name: str,
    number: int,
) -> int | None:
    """The number of tokens of a shard that an earlier command wrote; None if it is missing or damaged.

    Args:
        sizes: the files of ``output``. Objects of a store are verified by their sizes, files also by their hashes.
        flush: whether to flush the shard to disk, if the earlier command did not.

    Raises:
        DataError: it was written from other content of the input.
    """
    if f"{name}.json" not in sizes:
        return None
    try:
        record = _parse_record(output.read(f"{name}.json"))
    except MISSING:
        return None
    if record is None or not _has_sizes(record.shard, sizes, plan.dtype):
        return None
    if not output.reads_ahead and damaged_file(output, record.shard) is not None:
        return None
    if record.input_hash and documents.content_hash(number) != record.input_hash:
        raise _other_data(plan, plan.source, output)
    if flush and not record.flushed:
        if isinstance(output, LocalFolder):
            fsync_folder(output.path, f"{name}.tokens", f"{name}.documents")
        _write_record(output, replace(record, flushed=True))
    return record.shard.tokens


def _has_sizes(shard: Shard, sizes: Mapping[str, int], dtype: np.dtype[Any]) -> bool:
    """Whether the files of a shard have the sizes that its record states."""
    expected = {f"{shard.name}.tokens": shard.tokens * dtype.itemsize}
    expected[f"{shard.name}.documents"] = 8 * (shard.documents + 1)
    return all(sizes.get(file) == size for file, size in expected.items())


def _parse_record(content: bytes) -> _Record | None:
    """The record of a shard; None if it is damaged."""
    try:
        fields = json_object(content) or {}
        flushed, input_hash = fields.pop("flushed", False), fields.pop("input_hash", "")
        return _Record(Shard.from_json(fields), flushed, input_hash)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _as_json(content: PreparedManifest) -> bytes:
    return (json.dumps(asdict(content), indent=1) + "\n").encode()
