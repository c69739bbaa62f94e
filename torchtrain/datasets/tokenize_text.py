"""Tokenize text once, in many processes on any number of machines, into a folder of tokens.

The text is divided into shards (text_input.py). Process ``rank`` of ``world_size`` writes every ``world_size``-th
shard, and the record ``<shard>.json`` after it, and shares nothing with the others but the output folder. So the work
can be stopped at any time: the same command resumes with the shards that have no record, or not the size or hash that
the record states. The process that finds the records of all shards writes the manifest. The bytes of a shard depend
only on the text and the tokenizer.
"""

import fcntl
import gc
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from torchtrain.datasets.data_identity import shortened
from torchtrain.datasets.data_source import SkippedText, TextInput, text_bytes, utf8
from torchtrain.datasets.text_input import PAUSES_SECONDS
from torchtrain.datasets.token_folder import (
    COLUMNS,
    FILES,
    MANIFEST,
    UNFINISHED,
    DataFolder,
    LocalFolder,
    Shard,
    TokenManifest,
    damaged_file,
)
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.errors import DataError, StorageError, TorchtrainError
from torchtrain.files import (
    MISSING,
    PARTIAL_SUFFIX,
    TRANSIENT_ERRNOS,
    fsync_folder,
    json_object,
    open_lock_file,
    unreadable,
)
from torchtrain.logging import logger
from torchtrain.progress import ProgressBar

WAY_OUT = "Make room, or give it another disk"
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
SIGNAL_SECONDS = 1.0  # until a signal to a process group has reached this process, too
POLL_SECONDS = 10.0  # between listings of the output folder, for the progress of all processes
# Worker processes are started for text of this size, or of so many shards if its size is not in bytes.
LEAST_FORKED = 1 << 20
LEAST_SHARDS_FORKED = 64


def tokenize(
    text: TextInput,
    tokenizer: Tokenizer,
    output: DataFolder,
    processes: int,
    way_out: str = WAY_OUT,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> TokenManifest | None:
    """Tokenize this process's share of ``text``, or resume after a stop.

    Args:
        text: the text.
        tokenizer: the tokenizer.
        output: the output folder.
        processes: number of worker processes that this process starts.
        way_out: what to do if the folder cannot be written, for messages.
        rank, world_size: number of this process, and of all processes that tokenize the text into the folder.

    Returns:
        The manifest; None if other processes have not written all of their shards yet.

    Raises:
        DataError: the folder contains other text or the work of another tokenizer, complete or not; or the text is
            damaged, or changes.
        StorageError: the file system does not respond.
    """
    names, plan = _names(text), _plan(text, tokenizer)
    with output_errors(output.location, way_out):
        if not _begin(output, plan, alone=world_size == 1):
            sizes = output.sizes()
            write = partial(_with_input_retries, partial(_write_shard, text, tokenizer, output, plan.dtype))
            is_complete = partial(_is_complete, text, output, sizes, plan)
            progress = _Progress(
                output, text, dict(zip(names, text.shard_sizes, strict=True)), way_out, rank, world_size
            )
            own = {name: number for number, name in enumerate(names) if number % world_size == rank}
            _run(write, is_complete, own, processes, progress)
            text.require_unchanged()
        manifest = _finish(output, plan, names, text.files)
    if manifest is None and world_size == 1:
        raise StorageError(
            f"{output.location} lacks files that this command has written, or they have other sizes: run it again when "
            "the storage keeps what is written"
        )
    return manifest


def finish(text: TextInput, tokenizer: Tokenizer, output: DataFolder, way_out: str) -> TokenManifest | None:
    """The manifest, if all of several processes have written their shards; the arguments are those of ``tokenize``."""
    with output_errors(output.location, way_out):
        return _finish(output, _plan(text, tokenizer), _names(text), text.files)


def _names(text: TextInput) -> list[str]:
    return [f"shard-{number:05}" for number in range(len(text.shard_sizes))]


def _plan(text: TextInput, tokenizer: Tokenizer) -> TokenManifest:
    """The manifest without shards."""
    fields = tokenizer.content_hash, tokenizer.vocab_size, text.name, text.identify().text
    return TokenManifest(*fields, shard_count=len(text.shard_sizes), options=text.options)


def _begin(output: DataFolder, plan: TokenManifest, *, alone: bool) -> bool:
    """Write the plan unless the folder has it; returns whether the work is complete."""
    sizes = output.sizes()
    if MANIFEST in sizes:
        _require_same(plan, TokenManifest.read(output, output.location), output)
        return True
    if UNFINISHED not in sizes and output.create(UNFINISHED, _as_json(plan)):
        return False
    try:
        found = TokenManifest.read(output, output.location, UNFINISHED)
    except DataError:
        if MANIFEST in output.sizes():  # another process has finished meanwhile
            return True
        raise
    _require_same(plan, found, output)
    if alone:
        output.remove(filter(_is_partial, sizes))  # left by a killed process
    return False


def _finish(
    output: DataFolder, plan: TokenManifest, names: Sequence[str], files: Sequence[str]
) -> TokenManifest | None:
    """Write the manifest if all shards are complete, and remove the records; None if shards are missing.

    Args:
        files: the names of the files of text.
    """
    sizes = output.sizes()
    records = [f"{name}.json" for name in names]
    if MANIFEST not in sizes:
        if not sizes.keys() >= set(records):
            return None
        with ThreadPoolExecutor(32) as pool:
            try:
                found = list(pool.map(output.read, records))
            except MISSING:  # another process has written the manifest meanwhile, and removes the records
                return TokenManifest.read(output, output.location)
        parsed = [record.shard for record in map(_parse_record, found) if record]
        written = [shard for shard in parsed if _has_sizes(shard, sizes, plan.dtype)]
        if len(written) < len(names):
            return None
        if not any(shard.documents for shard in written):
            skipped = sum(shard.skipped for shard in written)
            raise DataError(f"{plan.source} has no text in its {skipped} documents")
        try:
            with output.write(FILES) as file:
                file.write(json.dumps(list(files), indent=0).encode())
            with output.write(MANIFEST) as file:
                file.write(_as_json(replace(plan, shards=tuple(written))))
        except MISSING:  # another process that finishes at the same time has removed the partial file
            if MANIFEST not in output.sizes():
                raise
        if isinstance(output, LocalFolder):
            fsync_folder(output.path, MANIFEST)  # before the records are removed
    manifest = TokenManifest.read(output, output.location)
    output.remove(name for name in (UNFINISHED, *records) if name in sizes)
    output.remove(filter(_is_partial, sizes))
    return manifest


def _is_partial(name: str) -> bool:
    """Whether a file is an unfinished one of this module, which the folder may have beside files of others."""
    target = name.rsplit(".", 2)[0]
    return name.endswith(PARTIAL_SUFFIX) and (target in (MANIFEST, UNFINISHED, FILES) or target.startswith("shard-"))


def log_skipped(manifest: TokenManifest) -> None:
    """Warn of what was skipped."""
    not_utf8 = [file for shard in manifest.shards for file in shard.not_utf8]
    if not_utf8:
        logger.warning(
            "%s: skipped %d file(s) that are not UTF-8: %s", manifest.source, len(not_utf8), shortened(not_utf8)
        )
    malformed = sum(shard.malformed for shard in manifest.shards)
    if malformed:
        first = next(shard.first_malformed for shard in manifest.shards if shard.malformed)
        logger.warning("%s: skipped %d malformed line(s), the first of them %s", manifest.source, malformed, first)
    skipped = sum(shard.skipped for shard in manifest.shards)
    if skipped:
        logger.info("%s: skipped %d document(s) that are empty, null or not text", manifest.source, skipped)


def _require_same(plan: TokenManifest, found: TokenManifest, output: DataFolder) -> None:
    if found.tokenizer_hash != plan.tokenizer_hash:
        raise DataError(
            f"{output.location} was begun with another tokenizer (SHA-256 {found.tokenizer_hash[:12]}..., now "
            f"{plan.tokenizer_hash[:12]}...); use that one, or an empty folder"
        )
    saved, current = sorted((found.source_identity, plan.source_identity), key=len)
    # One of them may lack the hash of all content, which comes last: it depends on data.verify_gib.
    if current != saved and not (saved and current.startswith(f"{saved}, ")):
        raise _other_data(plan, found.source, output)
    if (found.options, found.shard_count) != (plan.options, plan.shard_count):
        raise DataError(
            f"{output.location} was begun with other options ({found.options}, {found.shard_count} shards; now "
            f"{plan.options}, {plan.shard_count} shards); use an empty folder"
        )


def _other_data(plan: TokenManifest, source: str, output: DataFolder) -> DataError:
    return DataError(
        f"{output.location} was begun with other data ({source}, now {plan.source}, or the content of its files has "
        "changed since); use an empty folder"
    )


@contextmanager
def alone(folder: Path, *, is_shared: bool) -> Iterator[None]:
    """Lock the folder against other commands; processes of one command share the lock. It ends with the process.

    Raises:
        DataError: another command has it.
    """
    with ExitStack() as stack:
        with output_errors(str(folder), WAY_OUT):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(os.fdopen(open_lock_file(folder / ".lock"), "r+"))
            try:
                # Not flock, whose lock the worker processes would inherit.
                fcntl.lockf(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # POSIX allows both
                raise DataError(f"another prepare is at work in {folder}; wait for it, or use another folder") from None
        yield


@contextmanager
def output_errors(location: str, way_out: str) -> Iterator[None]:
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
            f"{location} cannot be written: {error.strerror or error}. {way_out}; what is complete is kept, and the "
            "same command continues from there"
        ) from error


class _InputError(Exception):
    """The file system failed while the input was read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _read_input(text: TextInput, shard: int, skipped: SkippedText) -> Iterator[tuple[int, int, str | None]]:
    """The documents of a shard; errors of the file system are raised as ``_InputError``."""
    try:
        yield from text.read(shard, skipped)
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
    """Call ``write(name, number)`` for each shard that is not complete: in worker processes, unless there is little."""
    is_daemon = multiprocessing.current_process().daemon  # which may not have children
    is_little = progress.total < LEAST_FORKED and len(progress.shard_sizes) < LEAST_SHARDS_FORKED
    if processes == 1 or is_little or is_daemon:
        with progress:
            for name, number in shards.items():
                tokens = is_complete(name, number)
                progress.add(name, write(name, number) if tokens is None else tokens, is_new=tokens is None)
        return
    # A forked process starts immediately, with the source and the tokenizer open. It calls nothing that needs a lock
    # which a thread of this process could hold. Objects are frozen so that it does not collect the garbage of this
    # process: the destructor of a process group would wait for threads that do not exist there.
    context = multiprocessing.get_context("fork")
    next_shard = context.Value("q", 0)
    workers: dict[Connection, Any] = {}
    # A signal that arrives while workers are started is handled afterwards, here and in a new process, which is still a
    # copy of this one. It is blocked for the new process, and noted here, where another thread may get it.
    received: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # a thread of a run leaves signals to the main thread
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

    def __init__(
        self,
        output: DataFolder,
        text: TextInput,
        shard_sizes: Mapping[str, int],
        way_out: str,
        rank: int,
        world_size: int,
    ) -> None:
        self._output = output
        self._name = text.name
        self._way_out = way_out
        self.shard_sizes = shard_sizes
        self.total = sum(shard_sizes.values())
        self._done: set[str] = set()
        self._tokens = self._new_tokens = 0
        self.reads_records = rank == 0 and world_size > 1
        """Whether ``read_records`` counts complete shards, instead of the messages of the workers."""
        self._listed_at = -math.inf

    def __enter__(self) -> "_Progress":
        self._began = time.monotonic()
        self._bar = ProgressBar(f"tokenizing {self._name}", self.total)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, name: str, tokens: int, *, is_new: bool) -> None:
        """Count a complete shard. ``is_new``: it was written by this command.

        Raises:
            DataError: the rest will not fit on the disk.
        """
        if name in self._done:
            return
        self._done.add(name)
        self._tokens += tokens
        self._new_tokens += tokens * is_new
        rate = self._new_tokens / max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix_str(f", {self._tokens:,} tokens, {rate:,.0f} tokens/s", refresh=False)
        if is_new or self._bar.disable:
            self._bar.update(self.shard_sizes[name])
        else:  # the rate, and so the time left, is of the work of this command
            self._bar.initial += self.shard_sizes[name]
            self._bar.n += self.shard_sizes[name]
        if is_new:
            self._require_room()

    def _require_room(self) -> None:
        """After 1, 2, 4, ... shards, raise DataError if the tokens of the shards that are left do not fit on the disk,
        as by those that are complete."""
        if not isinstance(self._output, LocalFolder) or len(self._done).bit_count() != 1:
            return
        sizes = self._output.sizes()
        complete = [name for name in self.shard_sizes if f"{name}.json" in sizes]  # also of other processes
        written = sum(sizes.get(f"{name}.{suffix}", 0) for name in complete for suffix in ("tokens", "documents"))
        done = sum(self.shard_sizes[name] for name in complete)
        left = written / max(1, done) * (self.total - done)
        free = shutil.disk_usage(self._output.path).free
        if left > free:
            raise DataError(
                f"the tokens of {self._name} need about {left / 2**30:.1f} GiB more in {self._output.location}, and "
                f"its disk has {free / 2**30:.1f} GiB free. {self._way_out}; what is complete is kept"
            )

    def read_records(self) -> None:
        """Count the shards whose records are in the output folder, at most every ``POLL_SECONDS``."""
        if time.monotonic() - self._listed_at < POLL_SECONDS:
            return
        is_first, self._listed_at = self._listed_at == -math.inf, time.monotonic()
        names = {name.removesuffix(".json") for name in self._output.sizes() if name.endswith(".json")}
        for name in sorted(names & self.shard_sizes.keys() - self._done):
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
                            f"a process that tokenizes ended with code {worker.exitcode}, perhaps out of memory: run "
                            "the same command again to resume, torchtrain.prepare with fewer --prepare.processes"
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
    text: TextInput,
    tokenizer: Tokenizer,
    output: DataFolder,
    dtype: np.dtype[Any],
    name: str,
    number: int,
) -> int:
    """Write the tokens of a shard, the index of its documents, and then its record; returns the number of tokens."""
    tokens, size, skipped, starts = 0, 0, 0, []
    index: list[tuple[int, ...]] = []
    numbers: dict[int, int] = {}  # of documents of each file
    token_bytes = np.array(tokenizer.token_bytes)
    hasher = xxhash.xxh3_128()
    counts = SkippedText()
    with output.write(f"{name}.tokens") as file:
        for of_file, document, content in _read_input(text, number, counts):
            numbers[of_file] = document + 1
            if not content:
                skipped += content is None
                continue
            ids = np.array(tokenizer.encode(content, bos=True, eos=True), dtype=dtype)
            if not len(ids):  # the tokenizer does not know any character of it
                continue
            file.write(ids.data)
            hasher.update(ids.data)
            starts.append(tokens)
            hashed, own_bytes = xxhash.xxh3_128_intdigest(utf8(content)), text_bytes(content)
            high, low = hashed >> 64, hashed & (2**64 - 1)
            index.append((own_bytes, int(token_bytes[ids].sum()), of_file, document, high, low))
            tokens += len(ids)
            size += own_bytes
    # One column after the other (token_folder.COLUMNS). Hashes need all 64 bits.
    columns = np.array(index, dtype="<u8").reshape(-1, len(COLUMNS)).T
    content_of_index = np.concatenate([np.array([*starts, tokens], dtype="<u8"), columns.ravel()])
    with output.write(f"{name}.documents") as file:
        file.write(content_of_index.data)
    first = min(numbers, default=0)
    shard = Shard(
        name,
        tokens,
        documents=len(starts),
        bytes=size,
        skipped=skipped,
        tokens_hash=hasher.hexdigest(),
        documents_hash=xxhash.xxh3_128(content_of_index.data).hexdigest(),
        first_file=first,
        numbers=tuple(numbers.get(of_file, 0) for of_file in range(first, max(numbers, default=-1) + 1)),
        malformed=counts.malformed,
        first_malformed=counts.first_malformed,
        not_utf8=tuple(counts.not_utf8),
    )
    _write_record(output, _Record(shard, text.content_hash(number)))
    return tokens


@dataclass(frozen=True)
class _Record:
    """The content of ``<shard>.json``, which is written after the shard."""

    shard: Shard
    input_hash: str
    """``TextInput.content_hash`` of the shard."""


def _write_record(output: DataFolder, record: _Record) -> None:
    content = {**asdict(record.shard), "input_hash": record.input_hash}
    with output.write(f"{record.shard.name}.json") as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _is_complete(
    text: TextInput,
    output: DataFolder,
    sizes: Mapping[str, int],
    plan: TokenManifest,
    name: str,
    number: int,
) -> int | None:
    """The number of tokens of a shard that an earlier command wrote; None if it is missing or damaged.

    Args:
        sizes: the files of ``output``. Objects of a store are verified by their sizes, files also by their hashes.

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
    if record.input_hash and text.content_hash(number) != record.input_hash:
        raise _other_data(plan, plan.source, output)
    return record.shard.tokens


def _has_sizes(shard: Shard, sizes: Mapping[str, int], dtype: np.dtype[Any]) -> bool:
    """Whether the files of a shard have the sizes that its record states."""
    expected = {f"{shard.name}.tokens": shard.tokens * dtype.itemsize}
    expected[f"{shard.name}.documents"] = shard.index_bytes
    return all(sizes.get(file) == size for file, size in expected.items())


def _parse_record(content: bytes) -> _Record | None:
    """The record of a shard; None if it is damaged."""
    try:
        fields = json_object(content) or {}
        input_hash = fields.pop("input_hash", "")
        return _Record(Shard.from_json(fields), input_hash)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _as_json(content: TokenManifest) -> bytes:
    return (json.dumps(asdict(content), indent=1) + "\n").encode()
