"""Verified storage for distributed checkpoints (DCP): a ``step-N`` folder that exists is complete, and can prove it.

A checkpoint is written into ``step-N.partial``. Every file is hashed while it is written; the manifest, with size and
hash of each file, comes last; when all of them are flushed to disk, the folder is renamed. The data is in DCP's own
format, so that PyTorch's tools read it too, but nothing here ever unpickles more than the few types of DCP's metadata.
"""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtrain.errors import CheckpointError

MANIFEST = "manifest.json"
METADATA = ".metadata"
CONFIG = "config.toml"
PARTIAL_SUFFIX = ".partial"
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of one file."""

    name: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class HashedWriteResult(WriteResult):
    """DCP's receipt for one tensor, with the record of the file that holds it."""

    file: FileRecord


class _HashingFile:
    """A file open for writing that hashes what passes through; writes only go forward."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._size_bytes = 0
        self._size_sent_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        data = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            self._hash.update(block)
            try:
                self._size_bytes += self._file.write(block)
            except OSError as error:
                self.error = error
                raise
            if self._size_bytes - self._size_sent_bytes >= BLOCK_BYTES:
                self._send()
        return len(data)

    def _send(self) -> None:
        """Let the disk begin with what was written since the last call, so that it does not idle until the fsync."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            length = self._size_bytes - self._size_sent_bytes
            # To drop pages, Linux first starts writing them, and does not wait for that.
            os.posix_fadvise(self._file.fileno(), self._size_sent_bytes, length, os.POSIX_FADV_DONTNEED)
            self._size_sent_bytes = self._size_bytes

    def tell(self) -> int:
        return self._size_bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        # Whoever asks for the descriptor is about to fsync: Python's own buffer must be empty before that.
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def record(self, name: str) -> FileRecord:
        return FileRecord(name, self._size_bytes, self._hash.hexdigest())


class HashingFileSystem(FileSystem):
    """DCP's local file system, keeping a record of each file written through it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as raw:
            stream = _HashingFile(raw)  # type: ignore[arg-type]
            try:
                yield stream
            except RuntimeError:
                # torch.save turns "No space left on device" into "unexpected pos 704 vs 598".
                if stream.error is not None:
                    raise stream.error from None
                raise
        name = Path(path).name
        self.records[name] = stream.record(name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        record = self.records.pop(Path(path).name)
        name = Path(new_path).name
        self.records[name] = FileRecord(name, record.size_bytes, record.xxh3_128)


class VerifiedWriter(FileSystemWriter):
    """Writes one checkpoint as ``folder`` (``.../step-N``), which appears complete or not at all.

    Every rank makes one and passes it to ``torch.distributed.checkpoint.save``; the first rank of the process group
    commits in ``finish``, after all ranks have written. ``config_toml`` is kept beside the tensors. ``commit`` runs on
    the committing rank between the last byte and the rename: it makes room for the name. Two incarnations of a run,
    of different ``generation``, never write into the same temporary folder.
    """

    def __init__(
        self, folder: Path, config_toml: str, commit: Callable[[], None] | None = None, generation: int = 0
    ) -> None:
        # Tensors arrive staged on the CPU, or are copied one at a time: nothing to copy ahead.
        super().__init__(folder.with_name(f"{folder.name}.{generation}{PARTIAL_SUFFIX}"), per_thread_copy_ahead=0)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.partial = Path(self.path)
        self.folder = folder
        self.config_toml = config_toml
        self.commit = commit

    def storage_meta(self) -> StorageMeta:
        # DCP would put the temporary path here.
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # This runs on one rank while the others wait for their plans: the moment to clear what a failed save left.
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            self.partial.mkdir(exist_ok=True)
            for result in super().write_data(plan, planner).wait():
                record = self.fs.records[result.storage_data.relative_path]
                results.append(HashedWriteResult(result.index, result.size_in_bytes, result.storage_data, file=record))
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.sync_files = False  # tensors are flushed; the rest is, all at once, below
        super().finish(metadata, results)
        with self.fs.create_stream(self.partial / CONFIG, "wb") as config_file:
            config_file.write(self.config_toml.encode())
        records = {record.name: record for record in self.fs.records.values()}
        for rank_results in results:
            for result in rank_results:
                assert isinstance(result, HashedWriteResult)
                records[result.file.name] = result.file
        for record in records.values():
            file = self.partial / record.name
            if not file.exists():
                raise CheckpointError(
                    f"{file} was written by another rank but is not seen by this one: the dump folder must lie on a "
                    "file system that all nodes share"
                )
        write_manifest(self.partial, records.values())
        fsync_folder(self.partial, METADATA, CONFIG, MANIFEST)
        if self.commit is not None:
            self.commit()
        self.partial.rename(self.folder)
        fsync_folder(self.folder.parent)


def write_manifest(folder: Path, records: Iterable[FileRecord]) -> None:
    """Write the manifest of ``folder``, with a hash of its own text."""
    text = _manifest_text([asdict(record) for record in sorted(records, key=lambda record: record.name)])
    (folder / MANIFEST).write_text(text)


def _manifest_text(files: list[dict[str, Any]]) -> str:
    body = json.dumps(files, sort_keys=True).encode()
    return json.dumps({"files": files, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> list[FileRecord]:
    """The records in the manifest of ``folder``; ``CheckpointError`` if it is missing or not as it was written."""
    try:
        text = (folder / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error})") from error
    try:
        files = json.loads(text)["files"]
        if _manifest_text(files) != text:
            raise ValueError("its text does not have the hash it names")
        return [FileRecord(**file) for file in files]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})") from error


def verify_file(folder: Path, record: FileRecord) -> str | None:
    """What is wrong with a file of a checkpoint, or None: reads the whole file."""
    path = folder / record.name
    try:
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            return f"{path} has {size_bytes} bytes; its manifest says {record.size_bytes}"
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        return f"{path} cannot be read ({error})"
    if digest.hexdigest() != record.xxh3_128:
        return f"{path} does not have the hash that its manifest names: it was damaged after it was written"
    return None


def fsync_folder(folder: Path, *files: str) -> None:
    """Flush ``files`` in a folder, and its entries, to disk: names of new files and renames are not safe before."""
    with ThreadPoolExecutor(len(files) + 1) as pool:
        # One commit of the file system's journal serves all that ask for it at the same time.
        list(pool.map(_fsync, [folder, *(folder / file for file in files)]))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_DCP = "torch.distributed.checkpoint"
_METADATA_TYPES = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    # Makes a torch.layout from its name, by looking it up in a table.
    "torch.serialization": {"_get_layout"},
}


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's ``.metadata``: an unpickler that can make DCP's metadata types and nothing else, so runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's {METADATA} asks for {module}.{name}, which no checkpoint needs: not loaded, because "
            "reading it could run code"
        )


class VerifiedReader(FileSystemReader):
    """Reads a checkpoint that ``VerifiedWriter`` wrote, without trusting it: no code in it is run."""

    _metadata: Metadata | None = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._read_metadata(Path(self.path))
        return self._metadata

    def _read_metadata(self, folder: Path) -> Metadata:
        known = {record.name for record in read_manifest(folder)}
        try:
            with (folder / METADATA).open("rb") as file:
                metadata = MetadataUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{folder / METADATA} cannot be read ({error})") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{folder / METADATA} holds a {type(metadata).__name__}, not DCP's metadata")
        for info in (metadata.storage_data or {}).values():
            if info.relative_path not in known:
                raise CheckpointError(f"{folder / METADATA} names {info.relative_path!r}, which the manifest does not")
        return metadata
