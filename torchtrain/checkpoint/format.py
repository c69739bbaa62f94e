"""Verified storage for distributed checkpoints (DCP): a ``step-N`` folder that exists is complete, and can prove it.

A checkpoint is written into ``step-N.ID.partial``. Every file is hashed while it is written; the manifest, with size
and hash of each file, comes last; when all of them are flushed to disk, the folder is renamed. The data is in DCP's own
format, so that PyTorch's tools read it too, but nothing here ever unpickles more than the few types of DCP's metadata.
"""

import io
import json
import os
import pickle
import pickletools
import shutil
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import skip_data

from torchtrain.errors import CheckpointError, DamagedError
from torchtrain.files import (
    BLOCK_BYTES,
    MISSING,
    PARTIAL_SUFFIX,
    fsync_folder,
    hash_of,
    is_own_file,
    printable,
    read_file,
    with_retries,
)

T = TypeVar("T")
MANIFEST = "manifest.json"
METADATA = ".metadata"
CONFIG = "config.toml"
MAX_DIMENSIONS = 64  # as many as a torch.Tensor can have
_DCP = "torch.distributed.checkpoint"
_METADATA_TYPES = {
    f"{_DCP}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    # Makes a torch.layout from its name, by looking it up in a table.
    "torch.serialization": {"_get_layout"},
}


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest. It has a hash of the whole file, or one of each of its pieces.

    A piece is what is read at once: one tensor, or the part of it that one rank saved. Pieces follow one another from
    the beginning of the file to its end.
    """

    name: str
    size_bytes: int
    xxh3_128: str = ""
    """Of the whole file; empty where there are pieces."""
    pieces: Sequence[tuple[int, str]] = ()
    """Size in bytes and hash of each piece. Older checkpoints have none."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isprintable()):
            raise ValueError(f"{self.name!r} is no name of a file")
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(f"{self.name!r} is not in its folder")
        if type(self.size_bytes) is not int or self.size_bytes < 0:
            raise ValueError(f"{self.name} has the size {self.size_bytes!r}")
        pieces = list(self.pieces)
        if not isinstance(self.xxh3_128, str) or not all(type(n) is int and n > 0 for n, _ in pieces):
            raise ValueError(f"{self.name} has no hash, or a piece without a size")
        if pieces and sum(n for n, _ in pieces) != self.size_bytes:
            raise ValueError(f"the pieces of {self.name} are not the file")


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``. Without step, run and data where ``convert`` made the checkpoint."""

    step: int | None = None
    run: str | None = None
    """Id of the run, the same through all its starts."""
    data: Mapping[str, str] = field(default_factory=dict)
    """The identity of its data and tokenizer by option (``Loader.identity``)."""
    files: Sequence[FileRecord] = ()

    def __post_init__(self) -> None:
        if not (self.step is None or type(self.step) is int) or not (self.run is None or isinstance(self.run, str)):
            raise ValueError(f"step = {self.step!r}, run = {self.run!r}")
        if not all(isinstance(word, str) for pair in dict(self.data).items() for word in pair):
            raise ValueError(f"data = {self.data!r}")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("it names a file twice")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``, with a hash of its own text."""
    files = sorted(manifest.files, key=lambda record: record.name)
    with open(folder / MANIFEST, "w", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666)) as file:
        file.write(_manifest_text(asdict(replace(manifest, files=files))))


def _manifest_text(content: Mapping[str, Any]) -> str:
    # Older manifests have only "files", and a hash of that list.
    hashed = content["files"] if content.keys() == {"files"} else content
    body = json.dumps(hashed, sort_keys=True).encode()
    return json.dumps({**content, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        DamagedError: the manifest is missing or not as it was written.
        StorageError: it cannot be read.
    """
    text = found(folder / MANIFEST, lambda: read_file(folder / MANIFEST))
    try:
        content = json.loads(text.decode())
        del content["xxh3_128"]
        if _manifest_text(content) != text.decode():
            raise ValueError("its text does not have the hash it names")
        content["files"] = [FileRecord(**file) for file in content["files"]]
        return Manifest(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{folder / MANIFEST} is damaged ({printable(str(error))})") from error


def found(path: Path, read: Callable[[], T]) -> T:
    """``read()`` of ``path``, which is part of a checkpoint. DamagedError where there is no such file."""
    try:
        return read()
    except MISSING as error:
        raise DamagedError(f"{path} is missing ({error.strerror})") from error


def verify_sizes(folder: Path, records: Iterable[FileRecord]) -> None:
    """Look, without opening them, whether these files of the checkpoint in ``folder`` are there in full.

    Raises:
        DamagedError: one is missing, has another size, or is no file of this folder.
        StorageError: the file system fails.
    """
    for record in records:
        path = folder / record.name
        if not found(path, lambda: with_retries(lambda: is_own_file(path), path)):  # noqa: B023
            raise DamagedError(f"{path} is no file of its own folder")
        size_bytes = found(path, lambda: with_retries(lambda: path.stat().st_size, path))  # noqa: B023
        if size_bytes != record.size_bytes:
            raise DamagedError(f"{path} has {size_bytes} bytes; its manifest says {record.size_bytes}")


def verify(folder: Path, records: Iterable[FileRecord]) -> None:
    """Read these files of the checkpoint in ``folder`` in full.

    Raises:
        DamagedError: one is missing or damaged.
        StorageError: one cannot be read; that is no damage.
    """
    for record in records:
        verify_sizes(folder, [record])
        path, start = folder / record.name, 0
        for size_bytes, expected in record.pieces or [(record.size_bytes, record.xxh3_128)]:
            digest = found(path, lambda: with_retries(partial(hash_of, path, start, size_bytes), path))  # noqa: B023
            if digest != expected:
                raise changed(path)
            start += size_bytes


def read_verified(folder: Path, name: str) -> bytes:
    """The content of a small file of the checkpoint in ``folder``.

    Raises:
        DamagedError: it is missing or damaged, or the manifest does not name it.
        StorageError: it cannot be read.
    """
    path = folder / name
    records = [record for record in read_manifest(folder).files if record.name == name]
    if not records:
        raise DamagedError(f"{path} cannot be read: the manifest does not name it")
    verify_sizes(folder, records)
    content = found(path, lambda: read_file(path))
    if xxhash.xxh3_128_hexdigest(content) != records[0].xxh3_128:
        raise changed(path)
    return content


def changed(path: Path) -> DamagedError:
    return DamagedError(f"{path} does not have the hash that its manifest names: it was damaged after it was written")


class _HashingFile(io.BufferedWriter):
    """A new file that hashes what is written to it, piece by piece; writes only go forward."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "x"))  # which follows no link
        self.hash = xxhash.xxh3_128()  # of the piece
        self.size_bytes = 0
        self._piece_start = 0
        self._pieces: list[tuple[int, str]] | None = None
        self._size_sent_bytes = 0

    def begin_piece(self) -> None:
        """What is written from here on, up to the next call, is read at once."""
        if self._pieces is None:
            self._pieces = []
        else:
            self._end_piece(self._pieces)

    def _end_piece(self, pieces: list[tuple[int, str]]) -> None:
        pieces.append((self.size_bytes - self._piece_start, self.hash.hexdigest()))
        self._piece_start = self.size_bytes
        self.hash.reset()

    def record(self, name: str) -> FileRecord:
        """The file's entry in the manifest, when all is written."""
        if self._pieces is None:
            return FileRecord(name, self.size_bytes, self.hash.hexdigest())
        self._end_piece(self._pieces)
        return FileRecord(name, self.size_bytes, pieces=self._pieces)

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
        self.records[name] = stream.record(name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.records[name] = replace(self.records.pop(Path(path).name), name=name)


class _PieceMarker:
    """Tells a file where each tensor begins; else as DCP's own ``transforms``."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> Any:
        raw_stream.begin_piece()
        return self.transforms.transform_save_stream(write_item, raw_stream)


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
        self.transforms: Any = _PieceMarker(self.transforms)
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
        # Who takes this run for dead may have removed some.
        verify_sizes(self.partial, read_manifest(self.partial).files)
        self.partial.rename(self.folder)

    def remove(self) -> None:
        """Remove what was written, if it did not become a checkpoint. When no rank is writing."""
        shutil.rmtree(self.partial, ignore_errors=True)


def _shape(sizes: tuple[int, ...]) -> torch.Size:
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(sizes)} dimensions")
    return torch.Size(sizes)


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's ``.metadata``: an unpickler that can make DCP's metadata types and nothing else, so runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _shape
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise DamagedError(
            f"the checkpoint's {METADATA} asks for {printable(f'{module}.{name}')}, which no checkpoint needs: not "
            "loaded, because reading it could run code"
        )


def parse_metadata(content: bytes, files: Mapping[str, FileRecord]) -> Metadata:
    """DCP's metadata in ``content``, of a checkpoint with ``files``, whose tensors lie in them in full.

    Raises:
        DamagedError: ``content`` asks for more than metadata need.
        Exception: of any kind, where it is not metadata, or not of these files.
    """
    # A few bytes can ask Python's unpickler for any amount of memory: a bytearray, or a place far away in its memo.
    # pickletools compares the former with what there is.
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise ValueError("it takes more memory than it has bytes")
    metadata: Metadata = MetadataUnpickler(io.BytesIO(content)).load()
    stored: Mapping[MetadataIndex, Any] = metadata.storage_data
    for index, info in stored.items():
        record = files.get(info.relative_path)
        if record is None:
            raise ValueError(f"names {info.relative_path!r}, which the manifest does not")
        integers = type(info.offset) is int and type(info.length) is int
        if not (integers and 0 <= info.offset < info.offset + info.length <= record.size_bytes):
            raise ValueError(f"{index.fqn!r} does not lie in {info.relative_path!r}")
        if not index.fqn.isprintable() or index.fqn not in metadata.state_dict_metadata:
            raise ValueError(f"{index.fqn!r} is no tensor of it")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
        if not _tile(chunks, entry.size):
            raise ValueError(f"it does not hold all of these tensors: {printable(name)}")
        for chunk in chunks:
            if (
                chunk.sizes.numel() * entry.properties.dtype.itemsize
                > stored[MetadataIndex(name, chunk.offsets)].length
            ):
                raise ValueError(f"{name!r} has fewer bytes than it should")
    return metadata


def _tile(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether ``chunks`` are all of a tensor of ``size``, and none overlaps another."""
    spans = [[(o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    for box in spans:
        if not all(0 <= start < end <= most for (start, end), most in zip(box, size, strict=True)):
            return False
    if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
        return False
    if len(chunks) < 2:
        return True
    # Along the dimension with the most cuts few of them are beside each other.
    along = max(range(len(size)), key=lambda d: len({box[d] for box in spans}))
    beside: list[list[tuple[int, int]]] = []
    for box in sorted(spans, key=lambda box: box[along]):
        beside = [other for other in beside if other[along][1] > box[along][0]]
        if any(all(a[0] < b[1] and b[0] < a[1] for a, b in zip(box, other, strict=True)) for other in beside):
            return False
        beside.append(box)
    return True


class VerifiedReader(FileSystemReader):
    """Reads a checkpoint that ``VerifiedWriter`` wrote, without trusting it.

    The bytes of each tensor are compared with their hash in the manifest before they are used, and no code in the
    checkpoint is run. A tensor's bytes are read once, and one piece is in memory at a time.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self._verified: set[str] = set()

    @cached_property
    def _files(self) -> dict[str, FileRecord]:
        return {record.name: record for record in read_manifest(self.folder).files}

    @cached_property
    def _hashes(self) -> dict[str, dict[tuple[int, int], str]]:
        """By file, the hash of each piece by its place, offset and length. Nothing for files of older checkpoints."""
        hashes: dict[str, dict[tuple[int, int], str]] = {}
        for name, record in self._files.items():
            start, hashes[name] = 0, {}
            for length, expected in record.pieces:
                hashes[name][start, length] = expected
                start += length
        return hashes

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        content = read_verified(self.folder, METADATA)
        try:
            return parse_metadata(content, self._files)
        except DamagedError:
            raise
        except Exception as error:  # whatever is in it
            raise DamagedError(f"{self.folder / METADATA} cannot be read ({printable(str(error))})") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        pieces: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            pieces.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), []).append(item)
        for name, items in sorted(pieces.items()):
            path = self.folder / name
            verify_sizes(self.folder, [self._files[name]])
            if not self._hashes[name] and name not in self._verified:
                verify(self.folder, [self._files[name]])
                self._verified.add(name)
            # A file system that fails is asked again for what is still missing.
            found(path, lambda: with_retries(partial(self._read, path, items, planner), path))  # noqa: B023
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, path: Path, pieces: dict[tuple[int, int], list[ReadItem]], planner: LoadPlanner) -> None:
        """Read ``pieces`` of the file, by offset and length, and take from ``pieces`` what is done."""
        memory = torch.empty(max(length for _, length in pieces), dtype=torch.uint8)  # for one after the other
        with path.open("rb") as file:
            for place in sorted(pieces):
                tensor = _load_tensor(path, self._content(path, file, place, memory))
                for item in pieces[place]:
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    part = tensor[tuple(slice(start, start + length) for start, length in spans)]
                    target = planner.resolve_tensor(item).detach()
                    if part.shape != target.shape:
                        raise DamagedError(f"{path}: {item.storage_index.fqn!r} has shape {tuple(tensor.shape)}")
                    target.copy_(part)
                    planner.commit_tensor(item, target)
                del pieces[place]

    def _content(self, path: Path, file: io.BufferedReader, place: tuple[int, int], memory: Tensor) -> Tensor:
        """The bytes at a place of the file, offset and length, with the hash that the manifest names, in ``memory``."""
        offset, length = place
        content = memory[:length]
        _read_into(content, file, offset)
        hashes = self._hashes[path.name]
        if hashes and xxhash.xxh3_128_hexdigest(_bytes_of(content)) != hashes.get(place):
            # What has changed on the way from the disk, or in memory, is no damage: read what the disk has.
            with path.open("rb") as again:
                if hasattr(os, "posix_fadvise"):  # not on macOS
                    os.posix_fadvise(again.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
                _read_into(content, again, offset)
            if xxhash.xxh3_128_hexdigest(_bytes_of(content)) != hashes.get(place):
                raise changed(path)
        return content


def _bytes_of(content: Tensor) -> memoryview:
    array: Any = content.numpy()
    return memoryview(array)


def _read_into(content: Tensor, file: io.BufferedReader, offset: int) -> None:
    file.seek(offset)
    count = file.readinto(_bytes_of(content))
    content[count:] = 0  # of a file that has become shorter


class _MemoryFile(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: len(self.content)}[whence]
        return self.position

    def readinto(self, target: Any) -> int:
        found = self.content[self.position : self.position + len(target)]
        target[: len(found)] = found
        self.position += len(found)
        return len(found)


def _load_tensor(path: Path, content: Tensor) -> Tensor:
    """The tensor that ``torch.save`` has written as ``content``, in the same memory. DamagedError if it is none.

    ``torch.load`` makes its shape and strides, without its numbers.
    """
    view = _bytes_of(content)
    try:
        with skip_data():
            tensor = torch.load(cast(Any, _MemoryFile(view)), map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise TypeError(f"a {type(tensor).__name__}")
        if not tensor.numel():
            return tensor
        with zipfile.ZipFile(cast(Any, _MemoryFile(view))) as archive:
            (byte_order,) = (
                archive.read(entry) for entry in archive.infolist() if entry.filename.endswith("/byteorder")
            )
            (numbers,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
        if byte_order.decode() != sys.byteorder or numbers.compress_type != zipfile.ZIP_STORED:
            raise ValueError("compressed, or of another byte order")
        # Before the numbers: 30 bytes, a name and a field for alignment.
        start = numbers.header_offset + 30 + sum(struct.unpack_from("<HH", view, numbers.header_offset + 26))
        if start + numbers.file_size > len(content) or numbers.file_size != tensor.untyped_storage().nbytes():
            raise ValueError("of another size")
        storage = content[start : start + numbers.file_size].view(tensor.dtype)
        return storage.as_strided(tensor.shape, tensor.stride(), storage.storage_offset() + tensor.storage_offset())
    except Exception as error:
        raise DamagedError(f"{path} holds something else than a tensor ({printable(str(error))})") from error
