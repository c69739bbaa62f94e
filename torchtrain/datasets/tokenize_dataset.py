"""Tokenize a source once, in many processes, into a folder of prepared data.

The documents are dealt out to shards by number. One process writes a shard, and its record ``<shard>.json`` last. So
the work can be stopped at any time: it resumes with the shards that have no record, or not the hash that the record
names. The bytes of a shard depend on the source and the tokenizer alone.
"""

import fcntl
import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
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
from torchtrain.datasets.packing import DocumentSource, text_bytes
from torchtrain.datasets.tokenized import MANIFEST, UNFINISHED, Manifest, Shard, damaged_file
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.files import atomic_write, fsync_folder, open_lock_file

SHARD_BYTES = 1 << 18  # of text, at least


def prepare(
    source: SourceConfig, key: str, tokenizer_path: str, folder: Path, processes: int, verify_bytes: float = math.inf
) -> Manifest:
    """Tokenize all documents of ``source`` into ``folder``, or go on where that was stopped.

    Shows a progress bar with the time left. Returns the manifest; at once if all is done. ``verify_bytes``: a converted
    copy of the source is hashed up to this size before it is read.

    Raises:
        DataError: the folder holds, finished or not, another source or the work of another tokenizer; another process
            is at work in it; or ``source`` is not what it says.
    """
    if any(Path(path, MANIFEST).exists() for path in source.paths):
        raise DataError(
            f"{key}.path = {source.path!r} is prepared already: train on it, or give the texts it was made from"
        )
    tokenizer = load_tokenizer(tokenizer_path)
    context = SourceContext(key, tokenizer, verify_bytes=verify_bytes)
    documents = open_source(replace(source, download=True), context)
    if not isinstance(documents, DocumentSource):
        raise DataError(f"{key}.type = {source.type!r} cannot be prepared: it has no random access to its documents")
    shards = _deal(documents.parts, documents.text_bytes)
    identity = documents.full_identity()
    plan = Manifest(tokenizer.content_hash, tokenizer.vocab_size, documents.name, identity, shard_count=len(shards))
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        for name in (MANIFEST, UNFINISHED):
            if (folder / name).exists():
                found = Manifest.read(folder / name, str(folder))
                _require_same(plan, found, folder)
                if name == UNFINISHED and found.shard_count != len(shards):
                    for path in folder.glob("shard-*"):  # an earlier version dealt the documents out to others
                        path.unlink()
        if not (folder / MANIFEST).exists():
            _write_json(folder / UNFINISHED, plan)
            for leftover in folder.glob("*.partial"):
                leftover.unlink()
            _run(partial(_write_shard, documents, tokenizer, folder, plan.dtype), shards, folder, processes)
            for path in folder.glob("shard-*"):  # at the end: after each shard the processes would wait for the disk
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            written = tuple(Shard(**json.loads((folder / f"{name}.json").read_text())) for name in shards)
            if not any(shard.documents for shard in written):
                raise DataError(f"{documents.name} has no text in its {documents.parts} documents")
            _write_json(folder / MANIFEST, replace(plan, shards=written))
            fsync_folder(folder, MANIFEST)  # before what it was made from is removed
        for path in (folder / UNFINISHED, *(folder / f"{name}.json" for name in shards)):
            path.unlink(missing_ok=True)
    return Manifest.read(folder / MANIFEST, str(folder))


def _deal(documents: int, text_bytes: int | None) -> dict[str, range]:
    """The documents of each shard: enough shards to keep many cores busy, and not too many files for little data."""
    largest = documents if text_bytes is None else max(1, text_bytes // SHARD_BYTES)
    count = min(documents, largest, max(64, min(4096, documents // 1024)))
    borders = [documents * number // count for number in range(count + 1)]
    return {f"shard-{n:05}": range(borders[n], borders[n + 1]) for n in range(count)}


def _require_same(plan: Manifest, found: Manifest, folder: Path) -> None:
    if found.tokenizer_hash != plan.tokenizer_hash:
        raise DataError(
            f"{folder} was begun with another tokenizer (SHA-256 {found.tokenizer_hash[:12]}..., now "
            f"{plan.tokenizer_hash[:12]}...); use that one, or an empty folder"
        )
    if found.source_fingerprint != plan.source_fingerprint:
        raise DataError(
            f"{folder} was begun with other data ({found.source}, now {plan.source}, or its files hold something "
            "else since); use an empty folder"
        )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder alone, to write to it; the lock ends with the process, however that ends."""
    try:
        with os.fdopen(open_lock_file(folder / ".lock"), "r+") as file:
            try:
                # Not flock, whose lock the worker processes would inherit.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # as POSIX has it; others say that there are no locks
                raise DataError(f"another prepare is at work in {folder}; wait for it, or use another folder") from None
            yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. Make room, or give it another disk; what is "
            "complete is kept, and the same command continues from there"
        ) from error


def _run(write: Callable[[str, range], None], shards: Mapping[str, range], folder: Path, processes: int) -> None:
    """Call ``write`` in processes for each shard, of which those that are complete are passed over."""
    # A forked process starts at once, with the source and the tokenizer open. It calls nothing that needs a lock which
    # a thread of this process could hold, and with frozen objects it does not collect this one's garbage: the end of a
    # process group would wait for threads that are not there.
    context = multiprocessing.get_context("fork")
    next_shard = context.Value("q", 0)
    workers: dict[Connection, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork wherever there are threads
        gc.freeze()
        for _ in range(min(processes, len(shards))):
            ours, theirs = context.Pipe(duplex=False)
            workers[ours] = context.Process(target=_work, args=(write, shards, folder, next_shard, theirs), daemon=True)
            workers[ours].start()
            theirs.close()  # so that the pipe ends with the process
        gc.unfreeze()
    try:
        _follow(workers, folder, sum(map(len, shards.values())))
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.join()


class _Stderr:
    """stderr, whose errors are suppressed, so that a closed terminal does not end the work."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def _follow(workers: dict[Connection, Any], folder: Path, documents: int) -> None:
    """Show how far the workers are, until all have ended."""
    bar = {"desc": str(folder), "unit": " documents", "dynamic_ncols": True, "file": _Stderr()}
    with tqdm(total=documents, **bar) as progress:
        while workers:
            for pipe in wait(list(workers)):
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    worker = workers.pop(pipe)
                    worker.join()
                    if worker.exitcode:
                        raise DataError(
                            f"a process that tokenized for {folder} ended with code {worker.exitcode}, perhaps out of "
                            "memory; run prepare again to go on, with fewer --prepare.processes"
                        ) from None
                    continue
                if isinstance(message, Exception):
                    raise message
                progress.update(message)


def _work(
    write: Callable[[str, range], None], shards: Mapping[str, range], folder: Path, next_shard: Any, pipe: Connection
) -> None:
    """A process: write the next shard that no other has taken, until none is left; report the documents done."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent answers it
    try:
        for number, (name, documents) in enumerate(shards.items()):
            with next_shard.get_lock():
                if number < next_shard.value:
                    continue
                next_shard.value = number + 1
            if not _is_complete(folder, name):
                write(name, documents)
            pipe.send(len(documents))
    except (TorchtrainError, OSError) as error:
        pipe.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_shard(
    documents: DocumentSource, tokenizer: Tokenizer, folder: Path, dtype: np.dtype[Any], name: str, numbers: range
) -> None:
    """Write the tokens, where documents begin, and at last the record."""
    starts, tokens, size, counted, skipped = [], 0, 0, 0, 0
    token_bytes = np.array(tokenizer.token_bytes)
    hasher = xxhash.xxh3_128()
    with atomic_write(folder / f"{name}.tokens") as file:
        for text in documents.read_all(numbers):
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
    with atomic_write(folder / f"{name}.documents") as file:
        file.write(offsets.data)
    hashes = hasher.hexdigest(), xxhash.xxh3_128(offsets.data).hexdigest()
    _write_json(folder / f"{name}.json", Shard(name, tokens, len(starts), size, skipped, *hashes, counted))


def _is_complete(folder: Path, name: str) -> bool:
    try:
        shard = Shard(**json.loads((folder / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return False
    return damaged_file(folder, shard) is None


def _write_json(path: Path, content: Manifest | Shard) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(asdict(content), indent=1) + "\n").encode())
