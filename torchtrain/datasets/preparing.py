"""Tokenize a source once, in many processes, into a folder of prepared data.

The documents are dealt out to shards by number. One process writes a shard, and its record ``<shard>.json`` last. So
the work can be stopped at any time: it goes on with the shards that have no record, or not the hash that the record
names. The bytes of a shard depend on the source and the tokenizer alone.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from torchtrain.config.schema import Source
from torchtrain.datasets.identity import identity_of_files
from torchtrain.datasets.prepared import MANIFEST, UNFINISHED, Manifest, Shard, damaged_file
from torchtrain.datasets.sources import open_text
from torchtrain.datasets.text import LocalText
from torchtrain.errors import DataError, TorchtrainError
from torchtrain.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class _Task:
    """One shard: its name and its documents."""

    name: str
    documents: range


def prepare(source: Source, key: str, tokenizer_path: str, folder: Path, processes: int) -> Manifest:
    """Tokenize all documents of ``source`` into ``folder``, or go on where that was stopped.

    Shows a progress bar with the time left. Returns the manifest; at once if all is done.

    Raises:
        DataError: the folder holds, finished or not, another source or the work of another tokenizer; another process
            is at work in it; or ``source`` is not what it says.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    documents = _open_local(source, key)
    # Their content, and not when it was written: a copy is the same.
    content = identity_of_files(documents.files, whole=True) if documents.files else documents.identity()
    plan = Manifest(tokenizer.content_hash, tokenizer.vocab_size, documents.name, content)
    tasks = _deal(documents.units)
    folder.mkdir(parents=True, exist_ok=True)
    with _writing(folder), _locked(folder):
        for name in (MANIFEST, UNFINISHED):
            if (folder / name).exists():
                _require_same(plan, Manifest.read(folder / name, str(folder)), folder)
        if not (folder / MANIFEST).exists():
            _write_json(folder / UNFINISHED, plan)
            for leftover in folder.glob("*.partial"):
                leftover.unlink()
            _run(_ShardWriter(documents, tokenizer, folder, plan.dtype), tasks, processes)
            shards = tuple(Shard(**json.loads(_record(folder, task.name).read_text())) for task in tasks)
            _flush(path for path in folder.iterdir() if path.name.startswith("shard-"))
            if not any(shard.documents for shard in shards):
                raise DataError(f"{documents.name} has no text in its {documents.units} documents")
            _write_json(folder / MANIFEST, replace(plan, shards=shards))
        for path in (folder / UNFINISHED, *(_record(folder, task.name) for task in tasks)):
            path.unlink(missing_ok=True)
    return Manifest.read(folder / MANIFEST, str(folder))


def _open_local(source: Source, key: str) -> LocalText:
    """The documents of ``source``; those of the hub are downloaded."""
    opened = open_text(replace(source, download=True), key, lanes=1)
    assert isinstance(opened, LocalText)
    return opened


def _deal(documents: int) -> list[_Task]:
    """Enough shards to keep many cores busy with little data, and few enough to be mapped all at once."""
    count = min(documents, max(64, min(4096, documents // 1024)))
    borders = [documents * number // count for number in range(count + 1)]
    return [_Task(f"shard-{n:05}", range(borders[n], borders[n + 1])) for n in range(count)]


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
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. Make room, or give it another disk; what is "
            "complete is kept, and the same command goes on from there"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder alone; the lock ends with the process, however that ends."""
    with open(folder / ".lock", "w") as file:
        try:
            # Not flock, whose lock the worker processes would inherit.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another prepare is at work in {folder}; wait for it, or use another folder") from None
        yield


def _run(writer: "_ShardWriter", tasks: Sequence[_Task], processes: int) -> None:
    """Write the shards that are not complete yet."""
    # A forked process starts at once, with the source and the tokenizer open. It calls nothing that needs a lock which
    # a thread of this process could hold.
    context = multiprocessing.get_context("fork")
    next_task = context.Value("q", 0)
    workers: dict[Connection, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork wherever there are threads
        for _ in range(min(processes, len(tasks))):
            ours, theirs = context.Pipe(duplex=False)
            workers[ours] = context.Process(target=_work, args=(writer, tasks, next_task, theirs), daemon=True)
            workers[ours].start()
            theirs.close()  # so that the pipe ends with the process
    try:
        _follow(workers, str(writer.folder), tasks[-1].documents.stop)
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.join()


def _follow(workers: dict[Connection, Any], name: str, documents: int) -> None:
    """Show how far the workers are, until all have ended."""
    with tqdm(desc=name, total=documents, unit=" documents", dynamic_ncols=True) as progress:
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
                            f"a process that tokenized for {name} ended with code {worker.exitcode}, perhaps out of "
                            "memory; run prepare again to go on, with fewer --prepare.processes"
                        ) from None
                    continue
                if isinstance(message, str):
                    raise DataError(message)
                progress.update(message)


def _work(writer: "_ShardWriter", tasks: Sequence[_Task], next_task: Any, pipe: Connection) -> None:
    """A process: write the next shard that no other has taken, until none is left; report the documents done."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent answers it
    try:
        while True:
            with next_task.get_lock():
                number = next_task.value
                next_task.value += 1
            if number >= len(tasks):
                return
            if not _is_complete(writer.folder, tasks[number].name):
                with _writing(writer.folder):
                    writer.write(tasks[number])
            pipe.send(len(tasks[number].documents))
    except TorchtrainError as error:
        pipe.send(str(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(frozen=True)
class _ShardWriter:
    """Tokenizes documents into the files of a shard."""

    documents: LocalText
    tokenizer: Tokenizer
    folder: Path
    dtype: np.dtype[Any]

    def write(self, task: _Task) -> None:
        """Write the tokens, where documents begin, and at last the record."""
        starts, tokens, size, skipped = [], 0, 0, 0
        hasher = xxhash.xxh3_128()
        path = self.folder / f"{task.name}.tokens"
        with _written_whole(path) as file:
            for text in self.documents.read_all(task.documents):
                if not text:
                    skipped += text is None
                    continue
                ids = np.array(self.tokenizer.encode(text, bos=True, eos=True), dtype=self.dtype)
                file.write(ids.data)
                hasher.update(ids.data)
                starts.append(tokens)
                tokens += len(ids)
                size += len(text.encode("utf-8", "replace"))
        offsets = np.array([*starts, tokens], dtype="<i8")
        with _written_whole(self.folder / f"{task.name}.documents") as file:
            file.write(offsets.data)
        hashes = hasher.hexdigest(), xxhash.xxh3_128(offsets.data).hexdigest()
        _write_json(_record(self.folder, task.name), Shard(task.name, tokens, len(starts), size, skipped, *hashes))


def _is_complete(folder: Path, name: str) -> bool:
    try:
        shard = Shard(**json.loads(_record(folder, name).read_text()))
    except (OSError, ValueError, TypeError):
        return False
    return damaged_file(folder, shard) is None


def _record(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _write_json(path: Path, content: Manifest | Shard) -> None:
    with _written_whole(path) as file:
        file.write((json.dumps(asdict(content), indent=1) + "\n").encode())


@contextmanager
def _written_whole(path: Path) -> Iterator[Any]:
    """A binary file that gets its name once all of it is written. A killed process leaves a ``.partial`` of its own."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb", buffering=1 << 20) as file:
            yield file
        partial.rename(path)
    except OSError:  # as on a full disk, which should not stay full of it
        partial.unlink(missing_ok=True)
        raise


def _flush(paths: Iterable[Path]) -> None:
    """Flush the files to disk, all at the end: after each shard the processes would wait for the disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
