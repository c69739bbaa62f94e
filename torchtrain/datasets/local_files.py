"""Local text files with random access to documents: plain text in place, other formats by a converted copy."""

import ast
import bisect
import fcntl
import io
import itertools
import math
import os
import re
import sysconfig
import warnings
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import xxhash

from torchtrain.datasets.conversion_cache import Record, copies_folder
from torchtrain.datasets.data_identity import HASH_DIGITS, MAX_FILES, DataFile, FileTable, Identity, shortened
from torchtrain.datasets.data_source import Place, utf8
from torchtrain.datasets.file_formats import (
    HEAD_BYTES,
    LARGEST_TEXT_FILE_BYTES,
    PIECE_BYTES,
    NotUTF8Error,
    OnMalformed,
    Reader,
    decode_piece,
    documents,
    ignore,
    kind_of,
    position_of,
    require_utf8,
    require_utf8_file,
    start_of_piece,
)
from torchtrain.datasets.find_files import find_files
from torchtrain.datasets.text_sources import DatasetText, LocalText, read_with_retries
from torchtrain.errors import DataError
from torchtrain.files import (
    BLOCK_BYTES,
    TRANSIENT_ERRNOS,
    atomic_write,
    hash_of,
    open_lock_file,
    unreadable,
    with_retries,
)
from torchtrain.logging import logger
from torchtrain.progress import ProgressBar, progress

_CONVERSION = 3  # version of the conversion: increase it if the same files are converted to other documents
_ROWS = 1000  # number of rows in a batch of a converted copy
_WHOLE_BYTES = 1 << 20  # files up to this size are hashed in full for their identity
_BLOCK_BYTES = 1 << 16  # of larger files, three blocks of this size are hashed
_PLAIN = {("txt", ""), ("md", "")}  # kinds of files that are read in place
_SKIP_HINT = ", or skip and count such files by skip_not_utf8 = true beside the path"


def open_files(
    paths: Sequence[str],
    column: str,
    label: str,
    verify_bytes: float = math.inf,
    *,
    split: str = "train",
    skip_not_utf8: bool = False,
) -> LocalText:
    """The documents of files, of all data files in folders, and of all files that match patterns.

    Args:
        verify_bytes: files up to this total size, and a converted copy up to this size, are hashed in full.
        split: the split of a folder that ``DatasetDict.save_to_disk`` wrote.
        skip_not_utf8: skip files that are not UTF-8, and count them.

    Raises:
        DataError: there are no such files, they are damaged, or they have no text column ``column``.
    """
    files = find_text_files(paths, column, label, split=split, skip_not_utf8=skip_not_utf8)
    if are_plain_text(files):
        return open_plain_text(files, label, verify_bytes)
    return _converted(files, column, label, verify_bytes, skip_not_utf8)


def find_text_files(paths: Sequence[str], column: str, label: str, *, split: str, skip_not_utf8: bool) -> list[Path]:
    """The files that ``open_files`` opens, without plain text files that are not UTF-8; raises its errors."""
    found = list(dict.fromkeys(file for path in paths for file in find_files(path, label, column, split)))
    errors = {file: error for file, error in zip(found, _errors_of_heads(found, label), strict=True) if error}
    if errors and not skip_not_utf8:
        raise _not_utf8(errors)
    log_not_utf8(label, list(errors), len(found))
    return [file for file in found if file not in errors]


def require_utf8_files(files: Sequence[Path], label: str, verify_bytes: float = math.inf) -> None:
    """Check ``files`` before work begins that an error would stop: all of their content, if their size is at most
    ``verify_bytes``, else the beginning of each. Columns of Parquet and Arrow are not read.

    Raises:
        NotUTF8Error: it names the files that are not UTF-8.
    """
    sizes = [file.stat().st_size for file in files]
    whole = sum(sizes) <= verify_bytes
    errors = {}
    for file in progress(zip(files, sizes, strict=True), f"checking the encoding of {label}", sum(sizes)):
        try:
            with file.open("rb") as raw:
                require_utf8_file(raw, file.name, whole=whole)
        except NotUTF8Error as error:
            errors[file] = error
        except Exception:  # Each format's reader has its own errors. Reading the documents raises this one, too.
            continue
    if errors:
        raise _not_utf8(errors)


def _not_utf8(errors: Mapping[Path, NotUTF8Error]) -> NotUTF8Error:
    """The error of the first file, with the names of the others."""
    file, *others = errors
    names = shortened([str(other) for other in others])
    also = f". {len(others)} other file(s) are not UTF-8 either: {names}" if others else ""
    return NotUTF8Error(f"{file}: {errors[file]}{_SKIP_HINT}{also}")


def are_plain_text(files: Sequence[Path]) -> bool:
    """Whether documents of ``files`` are read in place, without a converted copy."""
    return {kind_of(file.name) for file in files} <= _PLAIN


def open_standard_library() -> LocalText:
    """The source code of the Python standard library."""
    return open_plain_text(standard_library_files(), "the Python standard library", math.inf)


def open_standard_library_docs() -> LocalText:
    """The docstrings of the Python standard library: English text, one document per module."""
    return _text_in_memory(_standard_library_docstrings(), "the docstrings of the Python standard library")


def open_standard_library_prose() -> LocalText:
    """The sentences in the docstrings of the Python standard library and in pydoc's pages about the language."""
    texts = list(_standard_library_docstrings())
    with suppress(ImportError):  # some systems do not install it
        from pydoc_data.topics import topics

        texts += topics.values()
    prose = [text for text in map(_prose, texts) if text]
    return _text_in_memory(prose, "the prose of the Python standard library")


def _prose(text: str) -> str:
    """The different paragraphs of ``text`` that are sentences of words, without markup, each as one line."""
    paragraphs = [" ".join(re.sub(r"[*`]", "", part).split()) for part in re.split(r"\n\s*\n", text)]
    sentences = [
        part
        for part in paragraphs
        if re.fullmatch(r"[A-Z].*\.", part)
        and part.count(" ") >= 5
        and len(re.sub(r"[^A-Za-z ,.']", "", part)) > 0.96 * len(part)
    ]
    return "\n\n".join(dict.fromkeys(sentences))


def _text_in_memory(texts: Sequence[str], label: str) -> LocalText:
    digest = xxhash.xxh3_128_hexdigest("\0".join(texts).encode())[:16]
    return LocalText(
        texts,
        label,
        lambda whole=False: Identity(f"{len(texts)} documents, hash {digest}"),  # noqa: ARG005
        sum(len(text.encode()) for text in texts),
    )


@cache  # parsing the library takes seconds, and each stage opens its sources
def _standard_library_docstrings() -> list[str]:
    return list(filter(None, map(_docstrings, standard_library_files())))


def _docstrings(module: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences in the source code
            tree = ast.parse(module.read_bytes())
    except SyntaxError:  # some modules are examples of errors
        return ""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def standard_library_files() -> list[Path]:
    """The modules of the standard library without their tests, which some systems do not install."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        files += [path for path in paths if path.is_file() and not path.is_symlink()]
    return files


def _converted(files: Sequence[Path], column: str, label: str, verify_bytes: float, skip_not_utf8: bool) -> LocalText:
    """The documents of ``files``, converted by the first process that needs them into the cache of ``datasets``."""
    import datasets  # here and below: takes a second, and plain text does not need it
    import pyarrow

    stats = _stats(files)
    source, key = identity_and_key(files, verify_bytes, _CONVERSION, column, skip_not_utf8)
    path = copies_folder() / f"{key}.arrow"
    try:
        record = _intact_record(path, verify_bytes)
        if record is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_lock_file(path.with_suffix(".lock")), "r+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX)
                record = _intact_record(path, verify_bytes)  # another process may have written it
                if record is None:
                    if path.exists():
                        logger.warning("%s, the converted copy of %s, is damaged and is converted again", path, label)
                    if not skip_not_utf8:
                        require_utf8_files(files, label, verify_bytes)
                    counts = _convert(files, column, label, path, stats, skip_not_utf8)
                    record = Record(source.text, path.stat().st_size, hash_of(path), **counts)
                    record.write(path)
        dataset = datasets.Dataset.from_file(str(path))
    except (pyarrow.ArrowInvalid, OSError) as error:
        number = getattr(error, "errno", None)
        if number in TRANSIENT_ERRNOS:
            raise  # the caller retries
        if number:
            raise DataError(
                f"{label} cannot be converted into {path.parent.parent}: {os.strerror(number)}. Make room, or name "
                "another folder by HF_DATASETS_CACHE, and start again"
            ) from error
        raise DataError(
            f"{path}, into which {label} was converted, is damaged ({error}): remove it, and start again"
        ) from error
    log_not_utf8(label, record.not_utf8, len(files))
    log_malformed(label, record.malformed, record.first_malformed)
    if len(dataset) == 0:
        raise DataError(f"{label} has no documents")

    def identify_source(whole: bool = False) -> Identity:
        return identify(files, whole=True) if whole else source  # of the files at the time of their conversion

    utf8 = [file for file in files if str(file) not in record.not_utf8]
    return DatasetText(dataset, label, identify_source, record.text_bytes, _PlacesInFiles(utf8, column))


class _PlacesInFiles:
    """Finds where a document of ``files``, which are read one after the other, is stored. It counts the documents of
    the files before, which takes as long as reading them."""

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self._files = files
        self._column = column
        self._firsts = [0]  # of the files whose number of documents before them is known: their first document

    def __call__(self, number: int) -> Place:
        while self._firsts[-1] <= number and len(self._firsts) < len(self._files):
            count = sum(1 for _ in documents_of(self._files[len(self._firsts) - 1], self._column))
            self._firsts.append(self._firsts[-1] + count)
        index = bisect.bisect_right(self._firsts, number) - 1
        file = self._files[index]
        return Place(str(file), position_of(file.name, number - self._firsts[index]))


def _intact_record(copy: Path, verify_bytes: float) -> Record | None:
    """The record of ``copy``; None if the copy is missing or damaged."""
    record = Record.read(copy)
    return record if record is not None and record.fits(copy, verify_bytes) else None


def _convert(
    files: Sequence[Path], column: str, label: str, path: Path, stats: Sequence[Any], skip_not_utf8: bool
) -> dict[str, Any]:
    """Write the documents of ``files`` to ``path``.

    Returns:
        The counts of its record.

    Raises:
        DataError: ``stats`` of the files have changed.
    """
    import pyarrow

    schema = pyarrow.schema({"text": pyarrow.large_string()})
    first_malformed = ""
    not_utf8: list[str] = []
    lines, text_bytes = 0, 0

    def count(location: str) -> None:
        nonlocal lines, first_malformed
        lines += 1
        first_malformed = first_malformed or location

    def texts() -> Iterator[str | None]:
        for file in files:
            if skip_not_utf8 and not _is_utf8(file, column):
                not_utf8.append(str(file))
            else:
                yield from documents_of(file, column, lambda location, file=file: count(f"{file}: {location}"))  # type: ignore[misc]

    with atomic_write(path, flush=True) as output:
        with pyarrow.ipc.new_stream(output, schema) as writer, ProgressBar(f"converting {label}", None) as bar:
            source = texts()
            while rows := list(itertools.islice(source, _ROWS)):
                encoded = [row if row is None else utf8(row) for row in rows]
                size = sum(len(row) for row in encoded if row is not None)
                text_bytes += size
                bar.update(size)
                writer.write_batch(pyarrow.record_batch([pyarrow.array(encoded, schema.types[0])], schema))
        if _stats(files) != stats:
            raise DataError(f"{label} changed while it was converted; start again when nothing writes to it")
    return {
        "text_bytes": text_bytes,
        "malformed": lines,
        "first_malformed": first_malformed,
        "not_utf8": tuple(not_utf8),
    }


def _is_utf8(file: Path, column: str) -> bool:
    try:
        deque(documents_of(file, column), maxlen=0)
    except NotUTF8Error:
        return False
    return True


def documents_of(
    file: Path,
    column: str,
    on_malformed: OnMalformed = ignore,
    read: Reader | None = None,
) -> Iterator[str | None]:
    """The documents of a file, or those that ``read`` returns. Errors name the file and the location in it."""
    count = 0
    try:
        with file.open("rb") as raw:
            if read is None:
                texts = documents(raw, file.name, column, on_malformed=on_malformed)
            else:
                texts = read(raw, on_malformed)
            for text in texts:
                yield text
                count += 1
    except NotUTF8Error as error:
        raise NotUTF8Error(f"{file}: {error}{_SKIP_HINT}") from None
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    except Exception as error:  # Each format's reader has its own errors for a damaged file.
        if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS:
            raise OSError(error.errno, error.strerror, str(file)) from error
        if isinstance(error, OSError) and error.errno:
            raise unreadable(file, error, attempts=1) from error
        raise DataError(f"{file} cannot be read after document {count}, it seems damaged: {error}") from error


def identify(files: Sequence[Path], verify_bytes: float = math.inf, *, whole: bool = False) -> Identity:
    """Number, total size and hash of ``files``, independent of their folder and names; and their table.

    The hash is of formats, sizes and content, in the order of the files; of a file above 1 MiB, of three blocks only,
    unless ``whole``. If some content is not hashed, and the total size is at most ``verify_bytes``, a second hash of
    all content is added.
    """
    sizes, digest, table = _digest_of(files, whole)
    text = f"{len(files)} file(s) of {sum(sizes):,} bytes, hash {digest}"
    if whole or sum(sizes) > verify_bytes or max(sizes, default=0) <= _WHOLE_BYTES:
        return Identity(text, table)
    _, content, table_of_content = _digest_of(files, whole=True)
    pairs = zip(table.files, table_of_content.files, strict=True)
    entries = [a if a.hash == b.hash else replace(a, content=b.hash) for a, b in pairs]
    return Identity(f"{text}, content {content}", replace(table, files=entries))


def identity_and_key(files: Sequence[Path], verify_bytes: float, *options: object) -> tuple[Identity, str]:
    """The identity of ``files``, and a name for their copy that is converted with ``options``.

    The name depends on the content. Since content above ``verify_bytes`` is not hashed in full, it also depends on the
    times of the files, among them the change time of the inode, which users cannot set.
    """
    identity = identify(files, verify_bytes)
    return identity, xxhash.xxh3_128_hexdigest(repr((options, identity.text, _stats(files))).encode())


def _stats(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    """Of each file: path, size, modification time and inode change time, both in nanoseconds."""
    stats = [(str(file.absolute()), file.stat()) for file in files]
    return [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]


def _digest_of(files: Sequence[Path], whole: bool) -> tuple[list[int], str, FileTable]:
    """Size of each of ``files``, the hash of all as in ``identify``, and a table with the hash of each."""
    digest, sizes = xxhash.xxh3_128(), []
    entries: list[DataFile] = []
    on_disk = [with_retries(path.stat, path).st_size for path in files]
    to_read = [size if whole or size <= _WHOLE_BYTES else 3 * _BLOCK_BYTES for size in on_disk]
    for path in progress(zip(files, to_read, strict=True), "hashing the data", sum(to_read)):
        size, digest, own = with_retries(partial(_with_file, digest, path, whole), path)
        sizes.append(size)
        if len(entries) < MAX_FILES:
            entries.append(DataFile(str(path), size, own.hexdigest()[:HASH_DIGITS]))
    return sizes, digest.hexdigest()[:16], FileTable(entries, len(files))


def _with_file(before: xxhash.xxh3_128, path: Path, whole: bool) -> tuple[int, xxhash.xxh3_128, xxhash.xxh3_128]:
    """Size of a file, a copy of the digest ``before`` that is updated with the file as in ``identify``, and a digest of
    the file alone."""
    digests = before.copy(), xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        for part in _hashed_parts(file, kind_of(path.name), size, whole):
            for digest in digests:
                digest.update(part)
    return size, *digests


def _hashed_parts(file: io.FileIO, kind: tuple[str, str], size: int, whole: bool) -> Iterator[bytes]:
    """What the hash of a file is computed from."""
    yield f"{kind}\0{size}\0".encode()
    file.seek(0)
    if whole or size <= _WHOLE_BYTES:
        yield from iter(lambda: file.read(BLOCK_BYTES), b"")
        return
    for start in (0, (size - _BLOCK_BYTES) // 2, size - _BLOCK_BYTES):
        file.seek(start)
        yield file.read(_BLOCK_BYTES)


def _errors_of_heads(files: Sequence[Path], label: str) -> Iterator[NotUTF8Error | None]:
    """For each file the error if it is a plain text file that does not begin with UTF-8.

    Raises:
        DataError: a file cannot be opened.
    """
    for file in files:
        try:
            with file.open("rb") as content:
                head = content.read(HEAD_BYTES)
            if kind_of(file.name) in _PLAIN:
                require_utf8(head)
            yield None
        except PermissionError as error:
            raise DataError(f"{label}: {file} cannot be opened: {error.strerror}; let this user read it") from error
        except NotUTF8Error as error:
            yield error


def log_malformed(label: str, count: int, first: str) -> None:
    """Warn of malformed lines that were skipped, and of the location of the first."""
    if count:
        logger.warning("%s: skipped %d malformed line(s), the first of them %s", label, count, first)


def log_not_utf8(label: str, skipped: Sequence[Path | str], count: int) -> None:
    """Warn of files that were skipped; ``count``: the number of all files."""
    if skipped:
        logger.warning(
            "%s: skipped %d of %d file(s) that are not UTF-8: %s",
            *(label, len(skipped), count, shortened([str(file) for file in skipped])),
        )


def open_plain_text(files: Sequence[Path], label: str, verify_bytes: float) -> LocalText:
    """The documents of plain text ``files``, which are read on demand."""
    pieces = _Pieces(files)
    if not pieces:
        raise DataError(f"{label} has no documents")
    return LocalText(pieces, label, partial(identify, files, verify_bytes), pieces.total_bytes, pieces.place_of)


class _Pieces:
    """Documents of plain text files: a file, or a piece of a large one, each read when it is asked for."""

    def __init__(self, files: Sequence[Path]):
        self._paths = [os.fsencode(file) for file in files]
        numbers, starts, stops = array("q"), array("q"), array("q")
        for number, file in enumerate(files):
            size = file.stat().st_size
            step = size if size <= LARGEST_TEXT_FILE_BYTES else PIECE_BYTES
            for start in range(0, size, max(step, 1)):
                numbers.append(number)
                starts.append(start)
                stops.append(min(start + step, size))
        self._files, self._starts, self._stops = numbers, starts, stops
        self.total_bytes = sum(stops) - sum(starts)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int, /) -> str | None:
        path = Path(os.fsdecode(self._paths[self._files[number]]))
        return _read_piece(path, self._starts[number], self._stops[number])

    def place_of(self, number: int) -> Place:
        path = Path(os.fsdecode(self._paths[self._files[number]]))
        start, stop = self._starts[number], self._stops[number]
        with path.open("rb") as file:
            begin, is_whole = start_of_piece(file, start), (start, stop) == (0, file.seek(0, 2))
        return Place(str(path), "" if is_whole else f"from byte {begin}")


def _read_piece(path: Path, start: int, stop: int) -> str | None:
    def read() -> tuple[bytes, int]:
        with path.open("rb") as file:
            begin, end = start_of_piece(file, start), start_of_piece(file, stop)
            file.seek(begin)
            return file.read(end - begin), begin

    piece, begin = read_with_retries(read, path)
    try:
        return decode_piece(piece, begin)
    except DataError as error:  # it is not UTF-8
        logger.warning("%s: %s; the document is skipped", path, error)
        return None
