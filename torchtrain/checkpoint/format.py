"""Verified format for distributed checkpoints (DCP): hashes of all files in a manifest, verified while loading.

Every file is hashed while it is written; the manifest, with size and hash of each file, comes last and makes the
checkpoint complete (``storage.NewCheckpoint.commit``). The data is in DCP's own format, so that PyTorch's tools read
it too. But DCP's index, ``.metadata``, and the header of each tensor are pickles, which can run code: nothing here ever
reads them. ``index.json`` says where the numbers of each tensor are, with their dtype and shape.
"""

import io
import json
import math
import os
import struct
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtrain.checkpoint.storage import MANIFEST, NewCheckpoint, StoredCheckpoint
from torchtrain.errors import DamagedError, SupersededError, TorchtrainError
from torchtrain.files import BLOCK_BYTES, MISSING, parse_json, printable, require_size, with_retries
from torchtrain.logging import BestEffort

T = TypeVar("T")
INDEX = "index.json"
CONFIG = "config.toml"
DATA_FILES = "data_files.json"
FILE_BYTES = 64 * 2**20  # of the files that a rank writes in parallel
BATCH_BYTES = 32 * 2**20  # of pieces that one thread reads
MAX_DIMENSIONS = 64  # as many as a torch.Tensor can have
MAX_CUT_DIMENSIONS = 4  # along which a tensor is divided into chunks; checking n chunks takes 2^4 n operations
MAX_ARCHIVE_BYTES = 2**17  # of the archive in which torch.save puts a tensor, besides its numbers; it takes about 1 KiB
MAX_LAYOUT = 2**31  # of a number in a LoaderLayout
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


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
    """Size in bytes and hash of each piece of a file with tensors."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.isprintable()):
            raise ValueError(f"{self.name!r} is not the name of a file")
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
    """The identity of its data and tokenizer by option (``DataLoader.identity``)."""
    loader: Mapping[str, Any] | None = None
    """The ``LoaderLayout`` of the position in the data."""
    files: Sequence[FileRecord] = ()

    def __post_init__(self) -> None:
        if not (self.step is None or type(self.step) is int) or not (self.run is None or isinstance(self.run, str)):
            raise ValueError(f"step = {self.step!r}, run = {self.run!r}")
        if not all(isinstance(word, str) for pair in dict(self.data).items() for word in pair):
            raise ValueError(f"data = {self.data!r}")
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("it names a file twice")
        if self.loader is not None:
            sizes = [self.loader["global_batch_size"], self.loader["seq_len"], *self.loader["state_sizes"]]
            if not all(type(size) is int and 0 <= size < MAX_LAYOUT for size in sizes) or 0 in sizes[:2]:
                raise ValueError(f"loader = {self.loader!s:.200}")


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``, with a hash of its own text."""
    files = sorted(manifest.files, key=lambda record: record.name)
    return _manifest_text(asdict(replace(manifest, files=files))).encode()


def _manifest_text(content: Mapping[str, Any]) -> str:
    body = json.dumps(content, sort_keys=True).encode()
    return json.dumps({**content, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}, indent=1) + "\n"


def read_manifest(checkpoint: StoredCheckpoint) -> Manifest:
    """The manifest of ``checkpoint``.

    Raises:
        DamagedError: the manifest is missing or not as it was written.
        StorageError: it cannot be read.
    """
    path = checkpoint.path_of(MANIFEST)
    read = partial(from_storage, path, partial(checkpoint.read, MANIFEST))
    try:
        return _parsed_manifest(path, read())
    except DamagedError:
        return _parsed_manifest(path, read())  # what has changed on the way is no damage


def _parsed_manifest(path: str, text: bytes) -> Manifest:
    try:
        content = parse_json(text, path, DamagedError)
        del content["xxh3_128"]
        if _manifest_text(content) != text.decode():
            raise ValueError("its text does not have the hash it names")
        content["files"] = [FileRecord(**file) for file in content["files"]]
        return Manifest(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged ({printable(str(error))})") from error


def from_storage(path: str, read: Callable[[], T]) -> T:
    """``read()`` of the file ``path``, which is part of a checkpoint, with retries.

    Raises:
        DamagedError: there is no such file.
        StorageError: it cannot be read.
    """
    try:
        return with_retries(read, path)
    except MISSING as error:
        reason = f" ({error.strerror})" if error.strerror else ""  # object stores give none
        raise DamagedError(f"{path} is missing{reason}") from error


def verify_sizes(checkpoint: StoredCheckpoint, records: Iterable[FileRecord]) -> None:
    """Check, without opening them, that these files of ``checkpoint`` are there with their sizes.

    Raises:
        DamagedError: one is missing, has another size, or is no file of this folder.
        StorageError: the storage fails.
    """
    for record in records:
        path = checkpoint.path_of(record.name)
        size_bytes = from_storage(path, partial(checkpoint.size_bytes, record.name))
        if size_bytes != record.size_bytes:
            raise DamagedError(f"{path} has {size_bytes} bytes; its manifest says {record.size_bytes}")


def verify(checkpoint: StoredCheckpoint, records: Iterable[FileRecord]) -> None:
    """Read these files of ``checkpoint`` in full.

    Raises:
        DamagedError: one is missing or damaged.
        StorageError: one cannot be read; that is no damage.
    """
    for record in records:
        verify_sizes(checkpoint, [record])
        path, start = checkpoint.path_of(record.name), 0
        for size_bytes, expected in record.pieces or [(record.size_bytes, record.xxh3_128)]:
            digest = from_storage(path, partial(_hash_of_range, checkpoint, record.name, start, size_bytes))
            if digest != expected:
                raise changed(path)
            start += size_bytes


def _hash_of_range(checkpoint: StoredCheckpoint, name: str, start: int, size_bytes: int) -> str:
    digest = xxhash.xxh3_128()
    with checkpoint.open(name) as file:
        file.seek(start)
        left = size_bytes
        while block := file.read(min(left, BLOCK_BYTES)):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def read_verified(checkpoint: StoredCheckpoint, name: str) -> bytes:
    """The content of a small file of ``checkpoint``.

    Raises:
        DamagedError: it is missing or damaged, or the manifest does not name it.
        StorageError: it cannot be read.
    """
    path = checkpoint.path_of(name)
    records = [record for record in read_manifest(checkpoint).files if record.name == name]
    if not records:
        raise DamagedError(f"{path} cannot be read: the manifest does not name it")
    require_size(path, records[0].size_bytes, DamagedError)
    verify_sizes(checkpoint, records)
    for _ in range(2):  # what has changed on the way is no damage
        content = from_storage(path, partial(checkpoint.read, name))
        if xxhash.xxh3_128_hexdigest(content) == records[0].xxh3_128:
            return content
    raise changed(path)


def changed(path: str) -> DamagedError:
    return DamagedError(f"{path} does not have the hash that its manifest names: it was damaged after it was written")


class _HashingWriter(io.RawIOBase):
    """Hashes what is written to a new ``file``, piece by piece; writes only go forward."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = xxhash.xxh3_128()  # of the piece
        self.size_bytes = 0
        self._piece_start = 0
        self._pieces: list[tuple[int, str]] | None = None

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

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any) -> int:
        data = memoryview(data)
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            self.hash.update(block)
            self.file.write(block)
            self.size_bytes += len(block)
        return len(data)

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()


class _NewFiles(FileSystemBase):
    """A new checkpoint as a file system of DCP's, which keeps a record of each file written through it."""

    def __init__(self, new: NewCheckpoint) -> None:
        self.new = new
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb"
        # DCP writes its metadata under another name, and renames the file. Nothing here is visible before the commit.
        name = Path(path).name.removesuffix(".tmp")
        with self.new.create(name) as file:
            stream = _HashingWriter(file)
            try:
                yield stream
            except RuntimeError as error:
                # Of "No space left on device" torch.save makes "unexpected pos 704 vs 598".
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
        self.records[name] = stream.record(name)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> Path:
        return Path(path) / suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert Path(path).name == f"{Path(new_path).name}.tmp"

    def init_path(self, path: str | os.PathLike[str]) -> Path:
        return Path(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass

    def exists(self, path: str | os.PathLike[str]) -> bool:  # noqa: ARG002
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return True


class _PieceMarker:
    """Tells a file where each tensor begins; else as DCP's own ``transforms``."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> Any:
        raw_stream.begin_piece()
        return self.transforms.transform_save_stream(write_item, raw_stream)


class VerifiedWriter(FileSystemWriter):
    """Writes one checkpoint, which appears complete or not at all.

    Every rank makes one and passes it to ``torch.distributed.checkpoint.save``; the first rank of the process group
    commits in ``finish``, after all ranks have written.

    Args:
        new: where the checkpoint is written; that of the same checkpoint on all ranks.
        config_toml: kept beside the tensors.
        small_files: contents of more files beside the tensors, by name, or functions that return them, which are called
            on the first rank when all tensors are written.
        manifest: lacks the files.
        add_files: see ``OutputCopies.add_to_checkpoint``; called on the first rank.
        before_commit, require_lease: see ``NewCheckpoint.commit``.
    """

    def __init__(
        self,
        new: NewCheckpoint,
        config_toml: str,
        *,
        small_files: Mapping[str, bytes | Callable[[], bytes]] = MappingProxyType({}),
        manifest: Manifest | None = None,
        add_files: Callable[[Callable[[str], AbstractContextManager[Any]]], None] = lambda _: None,
        before_commit: Callable[[], bool] = lambda: False,
        require_lease: Callable[[], None] = lambda: None,
    ) -> None:
        # Tensors arrive staged on the CPU, or are copied one at a time: nothing to copy ahead.
        super().__init__(new.location, sync_files=new.fsync, per_thread_copy_ahead=0)
        self.fs: Any = _NewFiles(new)
        self.transforms: Any = _PieceMarker(self.transforms)
        self.new = new
        self.small_files: dict[str, bytes | Callable[[], bytes]] = {CONFIG: config_toml.encode(), **small_files}
        self.manifest = manifest or Manifest()
        self.add_files = add_files
        self.before_commit, self.require_lease = before_commit, require_lease
        self.superseded_name = ""
        """The new name of the checkpoint that this one has superseded, after a save."""
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
        self.new.prepare()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._now("writes its part")
        results: list[Any] = []
        if plan.items:
            if self.new.parallel_files == 1:
                results = super().write_data(plan, planner).wait()
            else:
                results = self._write_in_parallel(plan, planner)
            # DCP takes what each rank returns to the first one: the records of its files, too.
            results += self.fs.records.values()
        self._now("has written its part, and waits for the others")
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_in_parallel(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write several files at once, each of about ``FILE_BYTES`` or one large tensor."""
        groups: list[list[WriteItem]] = [[]]
        group_bytes = 0
        for item in plan.items:
            assert item.tensor_data is not None
            item_bytes = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            if groups[-1] and group_bytes + item_bytes > FILE_BYTES:
                groups.append([])
                group_bytes = 0
            groups[-1].append(item)
            group_bytes += item_bytes
        storage_data: Any = plan.storage_data
        plans = [
            replace(plan, items=group, storage_data=replace(storage_data, prefix=f"{storage_data.prefix}{number}_"))
            for number, group in enumerate(groups)
        ]
        write = super().write_data
        with ThreadPoolExecutor(min(self.new.parallel_files, len(plans))) as pool:
            written = [pool.submit(lambda part: write(part, planner).wait(), part) for part in plans]
            try:
                return [result for future in written for result in future.result()]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        self._now("writes the manifest")
        self.sync_files = False  # tensors are flushed; the commit flushes the rest, all at once
        written = [[r for r in of_rank if isinstance(r, WriteResult)] for of_rank in results]
        super().finish(metadata, written)
        stored = {result.index: result.storage_data for of_rank in written for result in of_rank}
        for name, content in {INDEX: index_bytes(metadata, stored), **self.small_files}.items():
            with self.fs.create_stream(name, "wb") as small_file:
                small_file.write(content() if callable(content) else content)
        own_records = dict(self.fs.records)
        with BestEffort(f"metrics in {self.new.location}"):
            self.add_files(partial(self.fs.create_stream, mode="wb"))
            own_records = self.fs.records  # with all files that are added, or none
        records = own_records | {r.name: r for r in chain(*results) if isinstance(r, FileRecord)}
        manifest = manifest_bytes(replace(self.manifest, files=list(records.values())))
        sizes = {name: record.size_bytes for name, record in records.items()}
        self.superseded_name = self.new.commit(manifest, sizes, self.before_commit, self.require_lease)

    def superseded_error(self) -> SupersededError | None:
        """The error if a newer start of the run has acquired the lease; None also if the lease cannot be read."""
        try:
            self.require_lease()
        except SupersededError as error:
            return error
        except (OSError, TorchtrainError):
            pass
        return None

    def remove(self) -> None:
        """Remove what was written, if it did not become a checkpoint. When no rank is writing."""
        with suppress(Exception):  # what is left is removed by the next start
            self.new.discard()


def index_bytes(metadata: Metadata, stored: Mapping[MetadataIndex, Any]) -> bytes:
    """The index of a checkpoint as JSON; ``stored`` has the ``_StorageInfo`` of each chunk of ``metadata``.

    By the name of each tensor its dtype, shape and chunks; of a chunk its offsets in the tensor, its shape, its file,
    and the place in it: offset and length in bytes.
    """
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            info = stored[MetadataIndex(name, chunk.offsets)]
            chunks.append([[*chunk.offsets], [*chunk.sizes], info.relative_path, info.offset, info.length])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": [*entry.size], "chunks": chunks}
    return json.dumps({"tensors": tensors}).encode()


def parse_index(content: Any, files: Mapping[str, FileRecord]) -> Metadata:
    """DCP's metadata from the JSON value of an index of a checkpoint with ``files``, which hold its tensors in full.

    Raises:
        Exception: of any kind, where it is not an index, or not of these files.
    """
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    unused = {(name, start, length) for name, record in files.items() for start, length in places_of(record)}
    for name, entry in content["tensors"].items():
        if not name.isprintable():
            raise ValueError(f"{name!r} is not the name of a tensor")
        dtype = DTYPES[entry["dtype"]]
        chunks = []
        for offsets, sizes, file, start, length in entry["chunks"]:
            chunk = ChunkStorageMetadata(_shape(offsets), _shape(sizes))
            if file not in files:
                raise ValueError(f"names {file!r}, which the manifest does not")
            place = (file, *_shape([start, length]))
            if place not in unused:
                raise ValueError(f"{name!r} is not a piece of {file!r} of its own")
            unused.remove(place)
            size_bytes = math.prod(sizes) * dtype.itemsize
            if not size_bytes <= length <= size_bytes + MAX_ARCHIVE_BYTES:
                raise ValueError(f"{name!r} has {length} bytes for {size_bytes} bytes of numbers")
            chunks.append(chunk)
            stored[MetadataIndex(name, chunk.offsets)] = _StorageInfo(file, start, length)
        size = _shape(entry["shape"])
        if any(not len(chunk.offsets) == len(chunk.sizes) == len(size) for chunk in chunks):
            raise ValueError(f"{name!r} has parts of other dimensions")
        if not _tile([chunk for chunk in chunks if chunk.sizes.numel()], size):
            raise ValueError(f"it does not hold all of these tensors: {printable(name)}")
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return Metadata(entries, storage_data=stored)


def places_of(record: FileRecord) -> Iterator[tuple[int, int]]:
    """Offset and length of each piece of a file."""
    start = 0
    for length, _ in record.pieces:
        yield start, length
        start += length


def _shape(sizes: Any) -> torch.Size:
    """A shape, or offsets in one, of numbers in JSON."""
    if type(sizes) is not list or len(sizes) > MAX_DIMENSIONS:
        raise ValueError("a shape that no tensor has")
    if any(type(size) is not int or not 0 <= size < 2**63 for size in sizes):
        raise ValueError("a size that is no number from 0 on")
    return torch.Size(sizes)


def _tile(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Whether each element of a tensor of ``size`` is in exactly one of ``chunks``, none of which is empty.

    The corners of a box have signs, + or - by the number of upper bounds among their coordinates. Boxes cover another
    box once if and only if, at each point, the signs of their corners add up to those of the corners of that box: the
    signs are the mixed difference of the number of boxes that cover an element. So n chunks take O(n), not O(n^2).
    """
    if not math.prod(size):
        return not chunks
    spans = [[(o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    if any(end > most for box in spans for (_, end), most in zip(box, size, strict=True)):
        return False
    whole = [(0, most) for most in size]
    cut = [d for d in range(len(size)) if any(box[d] != whole[d] for box in spans)]
    if len(cut) > MAX_CUT_DIMENSIONS:
        raise ValueError(f"a tensor is divided along {len(cut)} dimensions, more than {MAX_CUT_DIMENSIONS}")
    signs: Counter[tuple[int, ...]] = Counter()  # by corner; 0 where they add up to those of the tensor
    for box, sign in (*((box, 1) for box in spans), (whole, -1)):
        for corner in product(*(((box[d][0], 1), (box[d][1], -1)) for d in cut)):
            signs[tuple(place for place, _ in corner)] += sign * math.prod(upper for _, upper in corner)
    return not any(signs.values())


class VerifiedReader(FileSystemReader):
    """Reads a checkpoint that ``VerifiedWriter`` wrote, without trusting it.

    The bytes of each tensor are compared with their hash in the manifest before they are used, and no code in the
    checkpoint is run. A tensor's bytes are read once, and one piece is in memory at a time.
    """

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        super().__init__(checkpoint.location)
        self.checkpoint = checkpoint

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.checkpoint)

    @cached_property
    def _files(self) -> dict[str, FileRecord]:
        return {record.name: record for record in self.manifest.files}

    @cached_property
    def _hashes(self) -> dict[str, dict[tuple[int, int], str]]:
        """By file, the hash of each piece by its place, offset and length."""
        hashes: dict[str, dict[tuple[int, int], str]] = {}
        for name, record in self._files.items():
            expected = (digest for _, digest in record.pieces)
            hashes[name] = dict(zip(places_of(record), expected, strict=True))
        return hashes

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        path = self.checkpoint.path_of(INDEX)
        content = parse_json(read_verified(self.checkpoint, INDEX), path, DamagedError)
        try:
            return parse_index(content, self._files)
        except Exception as error:  # whatever is in it
            raise DamagedError(f"{path} cannot be read ({printable(str(error))})") from error

    @cached_property
    def _kinds(self) -> dict[tuple[str, int], tuple[torch.dtype, torch.Size]]:
        """dtype and shape of each piece by its file and offset."""
        stored: Mapping[MetadataIndex, Any] = self._metadata.storage_data
        kinds = {}
        for name, entry in self._metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks:
                info = stored[MetadataIndex(name, chunk.offsets)]
                kinds[info.relative_path, info.offset] = entry.properties.dtype, chunk.sizes
        return kinds

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        pieces: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            pieces.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), []).append(item)
        for name in sorted(pieces):
            verify_sizes(self.checkpoint, [self._files[name]])
        if self.checkpoint.parallel_reads == 1:
            for name, items in sorted(pieces.items()):
                self._read_with_retries(name, items, planner)
        else:
            self._read_in_parallel(pieces, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_in_parallel(
        self, pieces: Mapping[str, Mapping[tuple[int, int], list[ReadItem]]], planner: LoadPlanner
    ) -> None:
        """Read ``pieces`` of several files at once, but those above ``BATCH_BYTES``, which take memory, one by one."""
        batches: list[tuple[str, dict[tuple[int, int], list[ReadItem]]]] = []
        large: list[tuple[str, dict[tuple[int, int], list[ReadItem]]]] = []
        for name, items in sorted(pieces.items()):
            batch: dict[tuple[int, int], list[ReadItem]] = {}
            for place in sorted(items):
                if place[1] > BATCH_BYTES:
                    large.append((name, {place: items[place]}))
                    continue
                if not batch or sum(length for _, length in batch) + place[1] > BATCH_BYTES:
                    batch = {}
                    batches.append((name, batch))
                batch[place] = items[place]
        with ThreadPoolExecutor(self.checkpoint.parallel_reads) as pool:
            reading = [pool.submit(self._read_with_retries, name, batch, planner) for name, batch in batches]
            try:
                for future in reading:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for name, batch in large:
            self._read_with_retries(name, batch, planner)

    def _read_with_retries(
        self, name: str, pieces: dict[tuple[int, int], list[ReadItem]], planner: LoadPlanner
    ) -> None:
        # A storage that fails is asked again for what is still missing.
        from_storage(self.checkpoint.path_of(name), partial(self._read, name, pieces, planner))

    def _read(self, name: str, pieces: dict[tuple[int, int], list[ReadItem]], planner: LoadPlanner) -> None:
        """Read ``pieces`` of the file, by offset and length, and take from ``pieces`` what is done."""
        path = self.checkpoint.path_of(name)
        memory = torch.empty(max(length for _, length in pieces), dtype=torch.uint8)  # for one after the other
        with self.checkpoint.open(name) as file:
            for place in sorted(pieces):
                tensor = _load_tensor(path, self._content(name, file, place, memory), *self._kinds[name, place[0]])
                for item in pieces[place]:
                    spans = zip(item.storage_offsets, item.lengths, strict=True)
                    part = tensor[tuple(slice(start, start + length) for start, length in spans)]
                    target = planner.resolve_tensor(item).detach()
                    if part.shape != target.shape:
                        raise DamagedError(f"{path}: {item.storage_index.fqn!r} has shape {tuple(tensor.shape)}")
                    target.copy_(part)
                    planner.commit_tensor(item, target)
                del pieces[place]

    def _content(self, name: str, file: BinaryIO, place: tuple[int, int], memory: Tensor) -> Tensor:
        """The bytes at a place of the file, offset and length, with the hash that the manifest names, in ``memory``."""
        offset, length = place
        content = memory[:length]
        _read_into(content, file, offset)
        hashes = self._hashes[name]
        if xxhash.xxh3_128_hexdigest(_bytes_of(content)) != hashes.get(place):
            # What has changed on the way from the disk, or in memory, is no damage: read what the disk has.
            with self.checkpoint.reopen(name, offset, length) as again:
                _read_into(content, again, offset)
            if xxhash.xxh3_128_hexdigest(_bytes_of(content)) != hashes.get(place):
                raise changed(self.checkpoint.path_of(name))
        return content


def _bytes_of(content: Tensor) -> memoryview:
    array: Any = content.numpy()
    return memoryview(array)


def _read_into(content: Tensor, file: BinaryIO, offset: int) -> None:
    file.seek(offset)
    count = cast(io.BufferedReader, file).readinto(_bytes_of(content))
    content[count:] = 0  # of a file that has become shorter


class _MemoryFile(io.RawIOBase):
    """Bytes in memory as a file, of which the table of an archive is read: not more than ``MAX_ARCHIVE_BYTES``."""

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

    def read(self, size: int | None = -1) -> bytes:
        left = len(self.content) - self.position
        count = left if size is None or size < 0 else min(size, left)
        if count > MAX_ARCHIVE_BYTES:
            raise ValueError("its table is larger than that of a tensor")
        found = bytes(self.content[self.position : self.position + count])
        self.position += len(found)
        return found


def _load_tensor(path: str, content: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The tensor that ``torch.save`` has written as ``content``, in the same memory. DamagedError if it is none.

    The file is an archive, of which only the table of entries and the numbers of a contiguous tensor are read. It takes
    no more memory than ``content`` has, whatever that holds.
    """
    view = _bytes_of(content)
    try:
        with zipfile.ZipFile(cast(Any, _MemoryFile(view))) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if any(entries[name].compress_type != zipfile.ZIP_STORED for name in ("byteorder", "data/0")):
                raise ValueError("compressed")
            if archive.read(entries["byteorder"]).decode() != sys.byteorder:
                raise ValueError("of another byte order")
            numbers = entries["data/0"]
        # Before the numbers: 30 bytes, a name and a field for alignment.
        start = numbers.header_offset + 30 + sum(struct.unpack_from("<HH", view, numbers.header_offset + 26))
        if start + numbers.file_size > len(content) or numbers.file_size != shape.numel() * dtype.itemsize:
            raise ValueError("of another size")
        return content[start : start + numbers.file_size].view(dtype).view(shape)
    except Exception as error:
        raise DamagedError(f"{path} holds something else than a tensor ({printable(str(error))})") from error
