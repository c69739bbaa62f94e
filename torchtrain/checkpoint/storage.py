"""Verified storage for distributed checkpoints (DCP): a ``step-N`` folder that exists is complete, and can prove it.

A checkpoint is written into ``step-N.ID.partial``. Every file is hashed while it is written; the manifest, with size
and hash of each file, comes last; when all of them are flushed to disk, the folder is renamed. The data is in DCP's own
format, so that PyTorch's tools read it too, but nothing here ever unpickles more than the few types of DCP's metadata.
"""

import io
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtrain.checkpoint.manifest import MANIFEST, FileRecord, Manifest, read_manifest, verify_sizes, write_manifest
from torchtrain.errors import CheckpointError
from torchtrain.outputs import PARTIAL_SUFFIX, fsync_folder
from torchtrain.reading import BLOCK_BYTES, MISSING, read_file

METADATA = ".metadata"
CONFIG = "config.toml"


class _HashingFile(io.BufferedWriter):
    """A new file that hashes what is written to it; writes only go forward."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "x"))  # which follows no link
        self.hash = xxhash.xxh3_128()
        self.size_bytes = 0
        self._size_sent_bytes = 0

    def write(self, data: Any) -> int:
        data = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            self.hash.update(block)
            self.size_bytes += super().write(block)
            if self.size_bytes - self._size_sent_bytes >= BLOCK_BYTES:
                self._send()
        return len(data)

    def _send(self) -> None:
        """Let the disk begin with what was written since the last call, so that it does not idle until the fsync."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            length = self.size_bytes - self._size_sent_bytes
            # To drop pages, Linux first starts writing them, and does not wait for that.
            os.posix_fadvise(super().fileno(), self._size_sent_bytes, length, os.POSIX_FADV_DONTNEED)
            self._size_sent_bytes = self.size_bytes

    def fileno(self) -> int:
        # Whoever asks for the descriptor is about to fsync: Python's own buffer must be empty before that.
        self.flush()
        return super().fileno()


class HashingFileSystem(FileSystem):
    """DCP's local file system, keeping a record of each file written through it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with _HashingFile(path) as stream:
            try:
                yield stream
            except RuntimeError as error:
                # Of "No space left on device" torch.save makes "unexpected pos 704 vs 598".
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        name = Path(path).name
        self.records[name] = FileRecord(name, stream.size_bytes, stream.hash.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.records[name] = replace(self.records.pop(Path(path).name), name=name)


class VerifiedWriter(FileSystemWriter):
    """Writes one checkpoint as ``folder`` (``.../step-N``), which appears complete or not at all.

    Every rank makes one and passes it to ``torch.distributed.checkpoint.save``; the first rank of the process group
    commits in ``finish``, after all ranks have written.

    Args:
        config_toml: kept beside the tensors.
        partial: the temporary folder, the same on all ranks. Two starts of a run never write into the same one.
        manifest: lacks the files.
        commit: is given the function that renames the folder; runs on the first rank after the last byte.
    """

    def __init__(
        self,
        folder: Path,
        config_toml: str,
        *,
        partial: Path | None = None,
        manifest: Manifest | None = None,
        commit: Callable[[Callable[[], None]], None] = lambda rename: rename(),
    ) -> None:
        self.partial = partial or folder.with_name(f"{folder.name}.0{PARTIAL_SUFFIX}")
        # Tensors arrive staged on the CPU, or are copied one at a time: nothing to copy ahead.
        super().__init__(self.partial, per_thread_copy_ahead=0)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.folder = folder
        self.config_toml = config_toml
        self.manifest = manifest or Manifest()
        self.commit = commit
        self._now("prepares to write")

    def _now(self, doing: str) -> None:
        """Note what this rank is doing, for a report on a save that takes too long."""
        self.doing, self.since = doing, time.time()

    def storage_meta(self) -> StorageMeta:
        # DCP would put the temporary path here.
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # This runs on one rank while the others wait for their plans: the moment to clear what a failed save left.
        self.remove()
        self.partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._now("writes its part")
        results: list[Any] = []
        if plan.items:
            self.partial.mkdir(exist_ok=True)
            # DCP takes what each rank returns to the first one: the records of its files, too.
            results = [*super().write_data(plan, planner).wait(), *self.fs.records.values()]
        self._now("has written its part, and waits for the others")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        self._now("writes the manifest")
        self.sync_files = False  # tensors are flushed; the rest is, all at once, below
        super().finish(metadata, [[r for r in of_rank if isinstance(r, WriteResult)] for of_rank in results])
        with self.fs.create_stream(self.partial / CONFIG, "wb") as config_file:
            config_file.write(self.config_toml.encode())
        records = self.fs.records | {r.name: r for r in chain(*results) if isinstance(r, FileRecord)}
        for name in records:
            file = self.partial / name
            if not file.exists():
                raise CheckpointError(
                    f"{file} was written by another rank but is not seen by this one: the dump folder must lie on a "
                    "file system that all nodes share"
                )
        write_manifest(self.partial, replace(self.manifest, files=list(records.values())))
        fsync_folder(self.partial, METADATA, CONFIG, MANIFEST)
        self.commit(self._rename)
        fsync_folder(self.folder.parent)

    def _rename(self) -> None:
        verify_sizes(
            self.partial, read_manifest(self.partial).files
        )  # who takes this run for dead may have removed some
        self.partial.rename(self.folder)

    def remove(self) -> None:
        """Remove what was written, if it did not become a checkpoint. When no rank is writing."""
        shutil.rmtree(self.partial, ignore_errors=True)


_DCP = "torch.distributed.checkpoint"
_METADATA_TYPES = {
    f"{_DCP}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
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


class _ReadingFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb"
        with open(path, "rb") as stream:
            # So DCP reads all bytes of a tensor before torch.load, which would hide an OSError in its own.
            stream.seekable = lambda: False  # type: ignore[method-assign]
            yield stream


class VerifiedReader(FileSystemReader):
    """Reads a checkpoint that ``VerifiedWriter`` wrote, without trusting it: no code in it is run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _ReadingFileSystem()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        folder = Path(self.path)
        known = {record.name for record in read_manifest(folder).files}
        try:
            metadata: Metadata = MetadataUnpickler(io.BytesIO(read_file(folder / METADATA))).load()
            named = [info.relative_path for info in metadata.storage_data.values()]
        except (*MISSING, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{folder / METADATA} cannot be read ({error})") from error
        for name in named:
            if name not in known:
                raise CheckpointError(f"{folder / METADATA} names {name!r}, which the manifest does not")
        return metadata
