"""Text files as training data: file names, folders, formats, encodings, and errors that name the file and position."""

import csv
import errno
import glob
import gzip
import io
import json
import logging
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_samples import DOCUMENTS, TOKENIZER, make_loader, opened_text, take, write_jsonl, write_prepared
from disk_faults import DiskFaults
from forked_run import ForkedRun

from torchtrain.config.parse import parse
from torchtrain.config.schema import DataConfig, SourceConfig
from torchtrain.datasets import file_formats, local_files, mixed_folder
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.file_formats import NotUTF8Error, ignore, require_utf8_file
from torchtrain.datasets.local_files import open_files
from torchtrain.errors import DataError, StorageError
from torchtrain.plugins.prepared_data.source import PreparedFolder
from torchtrain.plugins.prepared_data.tokenize_dataset import prepare
from torchtrain.plugins.remote_data.remote_files import find_remote_files, streamed_file

ROOT = Path(__file__).parent.parent
LINES = "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(DOCUMENTS))
LONG = "".join(f"line {n * n % 9973}\n" for n in range(150_000))  # long enough to be split into pieces


def texts(*paths: Path | str, column: str = "text") -> list[str | None]:
    """Return the documents that have text."""
    source = open_files([str(path) for path in paths], column, "data.path")
    return [text for text in source.read_all(range(source.parts)) if text]


def test_existing_file_names_are_not_glob_patterns(tmp_path: Path) -> None:
    for name in ("data[1].jsonl", "data1.jsonl", "a*.jsonl", "ab.jsonl", "what?.jsonl", "{x}.jsonl", "a b#%20.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
        assert texts(tmp_path / name) == [name]
    assert texts(tmp_path / "data*.jsonl") == ["data1.jsonl", "data[1].jsonl"]
    assert sorted(texts(tmp_path)) == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(("suffix", "content"), [(b".txt", b"coffee"), (b".jsonl", b'{"text": "coffee"}\n')])
def test_file_names_that_are_not_utf8(tmp_path: Path, suffix: bytes, content: bytes) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + suffix)).write_bytes(content)
    source = open_files([str(tmp_path)], "text", "data.path")
    assert list(source.read(0, 0)) == [(0, "coffee")]
    assert source.identity().startswith(f"1 file(s) of {len(content)} bytes")


def test_truncated_compressed_file_raises_a_data_error(tmp_path: Path) -> None:
    compressed = {"gz": gzip.compress(LINES.encode()), "zst": zstandard.compress(LINES.encode())}
    for compression, content in compressed.items():
        file = tmp_path / f"complete.jsonl.{compression}"
        file.write_bytes(content + content)  # two frames
        assert texts(file) == DOCUMENTS * 2
        file = tmp_path / f"truncated.jsonl.{compression}"
        for kept in (content[: len(content) // 2], content[:-3], content + content[:20]):
            file.write_bytes(kept)
            with pytest.raises(DataError, match=rf"{file.name} cannot be read after document \d+, it seems"):
                texts(file)


def test_folders_are_read_with_links_and_without_hidden_files(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for path in (folder / "a", folder / ".cache", folder / "a/.ipynb_checkpoints", elsewhere):
        path.mkdir(parents=True)
        (path / "0.jsonl").write_text(json.dumps({"text": path.name}) + "\n")
    (folder / "a/._a.jsonl").write_text("created by macOS")
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(folder)  # a cycle
    (folder / "loop").symlink_to("loop")
    assert sorted(texts(folder)) == ["a", "elsewhere"]
    assert sorted(texts(folder / "**/*.jsonl")) == ["a", "elsewhere"]
    assert sorted(texts(folder / "*/*.jsonl")) == ["a", "elsewhere"]
    assert texts(folder / ".cache") == [".cache"]  # a hidden folder is read if it is given by name


@pytest.mark.parametrize("create", [lambda path: path.symlink_to("gone"), os.mkfifo])
def test_broken_link_or_pipe_in_a_folder_raises_a_data_error(tmp_path: Path, create: Callable[[Path], None]) -> None:
    (tmp_path / "a.txt").write_text("coffee")
    create(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b.txt is not a file, or a broken link; restore what it names, or remove it"):
        texts(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("torchtrain").addHandler(caplog.handler)
    logging.getLogger("torchtrain").setLevel(logging.INFO)
    return caplog


def truncate(copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size // 2)


def flip_a_bit(copy: Path) -> None:
    content = bytearray(copy.read_bytes())
    content[content.index(b"document 40 ") + 9] ^= 1
    copy.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: os.truncate(copy, 0),
        truncate,
        flip_a_bit,
        lambda copy: copy.with_name(f"{copy.name}.json").unlink(),
        lambda copy: copy.with_name(f"{copy.name}.json").write_text('{"truncated'),
    ],
)
def test_damaged_converted_copy_is_converted_again(
    tmp_path: Path, cache: Path, log: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    texts(file)
    (copy,) = cache.rglob("*.arrow")
    content = copy.read_bytes()
    damage(copy)
    assert texts(file) == DOCUMENTS
    assert f"{copy}, the converted copy of data.path, is damaged and is converted again" in log.text
    log.clear()
    assert texts(file) == DOCUMENTS
    assert copy.read_bytes() == content
    assert not log.text


def test_converted_copy_above_verify_gib_is_checked_by_size_only(tmp_path: Path, cache: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)

    def read_documents() -> list[str | None]:
        source = open_files([file], "text", "data.path", verify_bytes=1000)
        return list(source.read_all(range(source.parts)))

    read_documents()
    (copy,) = cache.rglob("*.arrow")
    flip_a_bit(copy)
    assert read_documents() != DOCUMENTS  # above data.verify_gib, content is not verified
    os.truncate(copy, copy.stat().st_size - 8)
    assert read_documents() == DOCUMENTS  # but the size is
    copy.write_bytes(copy.read_bytes()[:2000])
    record = copy.with_name(f"{copy.name}.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "bytes": 2000}))
    with pytest.raises(DataError, match=rf"{copy}, into which .* was converted, is damaged .*: remove it, and start"):
        read_documents()


def write_as(path: Path, documents: list[str]) -> None:
    """Write a file whose size depends only on the size of the documents."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    table = pyarrow.table({"text": documents})
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    elif path.name.endswith(".arrow"):
        with pyarrow.ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    elif path.name.endswith(".csv"):
        with path.open("w", newline="") as csv_file:
            csv.writer(csv_file).writerows([["text"], *([text] for text in documents)])
    else:
        path.write_bytes(gzip.compress(lines, 0, mtime=0) if path.name.endswith(".gz") else lines)


@pytest.mark.parametrize("verify_bytes", [math.inf, 1000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.arrow"])
def test_file_rewritten_with_the_same_size_and_time_is_read_again(
    tmp_path: Path, name: str, verify_bytes: float
) -> None:
    file = tmp_path / name
    documents = [text * 400 for text in DOCUMENTS]
    write_as(file, documents)
    before = file.stat()

    def read_documents() -> tuple[list[str | None], str]:
        source = open_files([str(file)], "text", "data.path", verify_bytes)
        return list(source.read_all(range(source.parts))), source.identity()

    old, identity = read_documents()
    assert old == documents
    documents[20] = documents[20].replace("document 20 ", "document 02 ")
    write_as(file, documents)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size > 1 << 20
    new, changed = read_documents()
    assert new == documents
    if not name.endswith(".gz"):  # gzip ends with a checksum
        assert (changed == identity) == (verify_bytes == 1000)  # above verify_bytes, three blocks are hashed


def test_file_that_changes_during_conversion_raises_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(LINES)
    before = file.stat()

    def rewrite(*arguments: Any, **options: Any) -> Any:
        yield from file_formats.documents(*arguments, **options)
        file.write_text(LINES.replace("document 20 ", "document 02 "))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(local_files, "documents", rewrite)
    with pytest.raises(DataError, match=r"data.path changed while it was converted; start again"):
        texts(file)
    monkeypatch.undo()
    assert texts(file)[20].startswith("document 02 ")  # type: ignore[union-attr]


def test_identity_depends_on_all_bytes_up_to_verify_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(LONG)

    def identity(verify_bytes: float) -> str:
        return open_files([str(file)], "text", "data.path", verify_bytes).identity()

    size = file.stat().st_size
    before = identity(size), identity(size - 1)
    position = LONG.index("\n", size // 3)
    file.write_text(LONG[:position] + " " + LONG[position + 1 :])
    after = identity(size), identity(size - 1)
    assert after[0] != before[0]
    assert after[1] == before[1]  # above data.verify_gib
    assert before[0].startswith(before[1])  # the identity in checkpoints of earlier versions


@pytest.mark.parametrize("options", [{}, {"options": pyarrow.ipc.IpcWriteOptions(use_legacy_format=True)}])
def test_truncated_arrow_stream_raises_an_error(options: dict[str, Any]) -> None:
    table, out = pyarrow.table({"text": DOCUMENTS[:10]}), io.BytesIO()
    with pyarrow.ipc.new_stream(out, table.schema, **options) as stream:
        stream.write_table(table, max_chunksize=2)
    whole = out.getvalue()

    def read(content: bytes) -> list[str | None]:
        return list(file_formats.documents(io.BytesIO(content), "a.arrow", "text"))

    assert read(whole) == DOCUMENTS[:10]
    for size in range(1, len(whole)):
        with pytest.raises((EOFError, OSError, ValueError)):
            read(whole[:size])
    with pytest.raises(EOFError, match="more after the end of the Arrow stream"):
        read(whole + whole)


@pytest.mark.parametrize("listed", [1, 2])
def test_folder_of_save_to_disk_is_read_without_cache_files(tmp_path: Path, listed: int) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": DOCUMENTS[:6], "n": range(6)}).save_to_disk(folder, num_shards=listed)
    datasets.load_from_disk(folder).map(lambda row: {"text": row["text"] + "mapped"})
    assert len(list(folder.glob("*.arrow"))) > listed
    for path in (folder, f"{folder}/*.arrow", f"{tmp_path}/**/*.arrow", tmp_path):
        assert texts(path) == DOCUMENTS[:6]
    next(folder.glob("data-*.arrow")).unlink()
    with pytest.raises(DataError, match=r"'data-00000-of-0000\d.arrow' is missing, which its state.json lists"):
        texts(folder)


def test_saved_dataset_dict_is_read_by_split(tmp_path: Path) -> None:
    parts = {"train": DOCUMENTS[:6], "test": DOCUMENTS[6:8], "dev": DOCUMENTS[8:9]}
    whole = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()})
    whole.save_to_disk(tmp_path / "saved")
    datasets.load_from_disk(tmp_path / "saved").map(lambda row: {"text": row["text"] + "mapped"})

    def read_split(split: str) -> list[str | None]:
        opened = opened_text(SourceConfig(path=str(tmp_path / "saved"), split=split))
        return [text for unit in range(opened.parts) for _, text in opened.read(unit, 0)]

    assert texts(tmp_path / "saved") == read_split("train") == DOCUMENTS[:6]
    assert read_split("test") == texts(tmp_path / "saved/test") == DOCUMENTS[6:8]
    assert read_split("dev+train") == DOCUMENTS[8:9] + DOCUMENTS[:6]
    with pytest.raises(DataError, match=r"DatasetDict without a split 'valid' .*; its splits are train, test, dev"):
        read_split("valid")


@pytest.mark.parametrize("pattern", ["", "/**/*.jsonl", "/*/*.jsonl"])
def test_unreadable_folder_raises_a_storage_error(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(LINES)
    listdir, scandir = os.listdir, os.scandir

    def deny_access(list_folder: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def list_or_raise(path: Any = ".") -> Any:
            if str(path).endswith("closed"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return list_folder(path)

        return list_or_raise

    monkeypatch.setattr(os, "listdir", deny_access(listdir))
    monkeypatch.setattr(os, "scandir", deny_access(scandir))
    monkeypatch.setattr("torchtrain.files.time.sleep", lambda _: None)
    with pytest.raises(StorageError, match="closed cannot be read: Permission denied"):
        texts(f"{tmp_path}{pattern}")


def delimited(delimiter: str) -> str:
    content = io.StringIO()
    writer = csv.writer(content, delimiter=delimiter)
    writer.writerows([["n", "text"], *([n, text] for n, text in enumerate(DOCUMENTS))])
    return content.getvalue()


FILES: dict[str, str] = {
    "a.JSONL": LINES,
    "a.jsonl": LINES.replace("\n", "\r\n"),
    "a.json": json.dumps([json.loads(line) for line in LINES.splitlines()]),
    "b.json": "\n\n" + LINES,
    "a.csv": delimited(","),
    "a.tsv": delimited("\t"),
    "a.Csv": "\ufeff" + delimited(","),
}


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_every_format_has_the_same_documents(tmp_path: Path, compression: str) -> None:
    compress: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    for name, content in FILES.items():
        (tmp_path / (name + compression)).write_bytes(compress[compression](content.encode()))
        assert texts(tmp_path / (name + compression)) == DOCUMENTS, name
    for name, content in (("a.txt", LONG), ("b.txt", "\ufeffshort"), ("c.MD", "# head\n")):
        (tmp_path / name).write_text(content)
        plain = texts(tmp_path / name)
        assert "".join(filter(None, plain)) == content.removeprefix("\ufeff")
        (tmp_path / (name + compression)).write_bytes(compress[compression](content.encode()))
        compressed = texts(tmp_path / (name + compression))
        assert "".join(filter(None, compressed)) == content.removeprefix("\ufeff")
        assert (len(compressed) > 10) == (len(plain) > 10) == (content == LONG)


@pytest.mark.parametrize(
    "dtype",
    [
        *(pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()),
        *(pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()),
        *(pyarrow.dictionary(pyarrow.int32(), "string"), pyarrow.dictionary(pyarrow.int32(), "binary")),
    ],
)
def test_column_types_of_text_in_tables(tmp_path: Path, dtype: pyarrow.DataType) -> None:
    values = pyarrow.array(DOCUMENTS, pyarrow.string())
    if pyarrow.types.is_dictionary(dtype):
        values = values.cast(dtype.value_type).dictionary_encode()
    else:
        values = values.cast(pyarrow.binary()).cast(dtype) if "binary" in str(dtype) else values.cast(dtype)
    table = pyarrow.table({"text": values, "n": range(len(DOCUMENTS))})
    pyarrow.parquet.write_table(
        table, tmp_path / "a.parquet", row_group_size=7, store_schema="binary" not in str(dtype)
    )
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert texts(tmp_path / name) == DOCUMENTS
        with pytest.raises(DataError, match=rf"{name}: the column 'n' .text_column. holds int64, not text"):
            texts(tmp_path / name, column="n")


@pytest.mark.parametrize("row", [0, 2, 300])
def test_table_value_that_is_not_utf8_is_an_error_with_its_row(tmp_path: Path, row: int) -> None:
    values = [b"caf\xc3\xa9"] * row + [b"caf\xe9"]
    binary = pyarrow.array(values, pyarrow.binary())
    # Some writers leave invalid UTF-8 in columns of strings.
    text = pyarrow.StringArray.from_buffers(len(values), *binary.buffers()[1:])
    for number, column in enumerate((binary, text)):
        with pyarrow.ipc.new_file(tmp_path / f"{number}.arrow", pyarrow.schema({"text": column.type})) as file:
            file.write_table(pyarrow.table({"text": column}), max_chunksize=100)
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{number}.parquet", row_group_size=150)
        for path in (tmp_path / f"{number}.arrow", tmp_path / f"{number}.parquet"):
            with pytest.raises(DataError, match=rf"{path}: row {row} is not UTF-8 at byte 3 of its text"):
                texts(path)


def test_duplicate_text_column_raises_a_data_error(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"], [1]], names=["text", "text", "n"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(
            DataError, match=rf"{name}: it has 2 columns of the name 'text' .*are text, text, n: rename"
        ):
            texts(tmp_path / name)
    table = pyarrow.table([[1], [2], ["a"]], names=["n", "n", "text"])  # columns that are not read may share a name
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a"]


def test_malformed_lines_are_skipped_and_counted(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    null = '{"text": null}\n'
    (tmp_path / "a.jsonl").write_text(LINES[:-1] + "\n\n" + null)
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": "cut\n\n[1]\n' + null + '{"text": "a\0b"}\n')
    (tmp_path / "c.json").write_text('[{"text": "c"}, "no object", {"text": null}]')
    first = f"the first of them {tmp_path}/b.jsonl: line 2"
    for _ in range(2):  # once when converted, once when the converted copy is read
        source = open_files([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.json")], "text", "data.path")
        assert f"data.path: skipped 4 malformed line(s), {first}" in log.text
        log.clear()
    assert [text for text in source.read_all(range(source.parts)) if text] == [*DOCUMENTS, "b", "c"]
    assert sum(text is None for text in source.read_all(range(source.parts))) == 3
    (tmp_path / "a.csv").write_text('n,text\n1,"a\nb"\n\n2\n3,c\n')
    assert texts(tmp_path / "a.csv") == ["a\nb", "c"]
    assert f"skipped 1 malformed line(s), the first of them {tmp_path}/a.csv: line 5" in log.text


@pytest.mark.parametrize("streams", [1, 4])
def test_malformed_lines_of_streamed_files_are_skipped_and_counted(
    tmp_path: Path, log: pytest.LogCaptureFixture, streams: int
) -> None:
    size = (tmp_path / "train.jsonl").write_text(LINES + "broken\n" + LINES + "broken\n") // 2 - 7
    source = opened_text(SourceConfig(name=str(tmp_path)), streams)
    found = [text for unit in range(source.parts) for _, text in source.read(unit, 0) if text]
    assert sorted(found) == sorted(DOCUMENTS * 2)
    places = ("line 61", "line 122") if streams == 1 else (f"the line at byte {n}" for n in (size, 2 * size + 7))
    for number, place in enumerate(places, 1):
        assert f"skipped {number} malformed line(s) so far: train.jsonl: {place}" in log.text
    assert (source.malformed, source.skipped) == (2, 0)


@pytest.mark.parametrize(("suffix", "shares"), [("jsonl", 1), ("jsonl", 3), ("csv", 1), ("json", 1)])
def test_malformed_lines_before_the_place_of_a_resume_are_not_counted_again(suffix: str, shares: int) -> None:
    """Nor are they parsed, where a line is a document."""
    if suffix == "jsonl":
        raw = "".join(f'{{"text": "{n}"}}\n' if n % 3 else "broken\n" for n in range(60)).encode()
    elif suffix == "csv":
        raw = ("n,text\n" + "".join(f"{n},{n}\n" if n % 3 else f"{n}\n" for n in range(60))).encode()
    else:
        raw = json.dumps([{"text": str(n)} if n % 3 else "broken" for n in range(60)]).encode()
    for share in range(shares):
        arguments = (io.BytesIO(raw), f"a.{suffix}", len(raw), "text", share, shares, 10)
        malformed: list[str] = []
        with patch.object(file_formats, "_row", side_effect=file_formats._row) as parse_row:
            texts = list(file_formats.documents_of_share(*arguments, on_malformed=malformed.append))
        assert sum(not text for text in texts) == len(malformed) > 0
        assert parse_row.call_count in (0, len(texts))


def test_whole_file_is_searched_for_the_column_once(tmp_path: Path) -> None:
    """Most parts of a file lack the column, among them the first ones."""
    lines = [f'{{"{"text" if 600 <= n < 650 else "other"}": "{n}"}}' for n in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (file,) = find_remote_files([f"file://{tmp_path}/a.jsonl"], "data.path", "data.path")
    streamed = streamed_file(file, "text", None)
    with patch.object(file_formats, "_row", side_effect=file_formats._row) as parse_row:
        texts = [text for _ in range(2) for share in range(20) for text in streamed.read(share, 20, 0, ignore)]
    assert len([text for text in texts if text]) == 2 * 50
    assert parse_row.call_count == 2 * 1000 + 601, "once each epoch, and once up to the first row with text"


def test_skip_not_utf8_skips_and_counts_files(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    valid_files = {"a.jsonl": LINES.encode(), "b.csv": b"text\nb\n", "c.txt": b"c", "d.txt.gz": gzip.compress(b"d")}
    for kind, content in valid_files.items():
        for number in range(3):
            (tmp_path / f"{number}{kind}").write_bytes(content)
        late = LINES.encode() + b'{"text": "caf\xe9"}\n' if kind == "a.jsonl" else content[:-1] + b"\xe9"
        (tmp_path / f"3{kind}").write_bytes(gzip.compress(b"\xe9") if kind == "d.txt.gz" else late)
        invalid, path = tmp_path / f"3{kind}", str(tmp_path / f"?{kind}")
        with pytest.raises(
            DataError, match=rf"{invalid}: .*not UTF-8.* skip and count such files by skip_not_utf8 = true"
        ):
            texts(path)
        (tmp_path / "run.toml").write_text(f"[data]\npath = {json.dumps(path)}\nskip_not_utf8 = true\n")
        for _ in range(2):
            source = opened_text(parse(["--job.config_file", str(tmp_path / "run.toml")]).data)
            assert f"skipped 1 of 4 file(s) that are not UTF-8: {invalid}" in log.text
            log.clear()
        documents = {"a.jsonl": DOCUMENTS, "b.csv": ["b"], "c.txt": ["c"], "d.txt.gz": ["d"]}[kind]
        assert [text for unit in range(source.parts) for _, text in source.read(unit, 0)] == documents * 3
    with pytest.raises(DataError, match=r"data.path has no documents"):
        open_files([str(tmp_path / "3c.txt")], "text", "data.path", skip_not_utf8=True)


@pytest.mark.parametrize("pattern", ["", "/", "/*", "/sub*/[ab].*"])
def test_folder_with_several_formats_raises_an_error_with_a_valid_config(tmp_path: Path, pattern: str) -> None:
    """The tables in the error message are a config that reads all files of the folder."""
    folder = tmp_path / "texts [1]"
    (folder / "sub").mkdir(parents=True)
    for parent in (folder, folder / "sub"):
        (parent / "a.jsonl").write_text('{"content": "jsonl"}\n' * 40)
        (parent / "b.jsonl.gz").write_bytes(gzip.compress(b'{"content": "gz"}\n'))
        (parent / "a.TXT").write_text("txt")
        pyarrow.parquet.write_table(pyarrow.table({"content": ["parquet"]}), parent / "b.parquet")
    path = f"{folder if pattern in ('', '/') else glob.escape(str(folder))}{pattern}"
    with pytest.raises(
        DataError, match=r"mixes files of several kinds \(.jsonl, .parquet, .txt\).*'\*.jsonl'"
    ) as error:
        opened_text(SourceConfig(path=path, text_column="content"), section="validation")
    (tmp_path / "run.toml").write_text("[validation]\nenable = true\n" + str(error.value).partition("\n\n")[2])
    sources = parse(["--job.config_file", str(tmp_path / "run.toml")]).validation.sources
    found = [opened_text(source, section="validation") for source in sources]
    each = 2 if pattern in ("", "/") else 1
    documents = [[text for unit in range(one.parts) for _, text in one.read(unit, 0)] for one in found]
    assert [len(one) for one in documents] == [41 * each, each, each]
    assert {text for one in documents for text in one} == {"jsonl", "gz", "parquet", "txt"}
    assert sum(source.weight for source in sources) == pytest.approx(1, abs=0.02)


def test_tables_for_a_mixed_folder_have_shares_of_text_and_name_what_is_left_out(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [" ".join(rng.choice(("alpha", "beta", "gamma")) for _ in range(200)) for _ in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row, "id": row[:300]}) + "\n" for row in rows[:1200]))
    pyarrow.parquet.write_table(pyarrow.table({"text": rows[1200:]}), tmp_path / "b.parquet", compression="zstd")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for number in range(7):
        (tmp_path / f"{number}.md").write_text(rows[number])
    with pytest.raises(DataError, match=r"each weight is the estimated share of the text") as error:
        open_files([str(tmp_path)], "text", "data.path")
    pasted = str(error.value).partition("\n\n")[2]
    assert "# 7 .md file(s) are left out, since such files often describe the data. To read them, remove" in pasted
    tables = [line.removeprefix("# ") for line in pasted.splitlines() if not line.startswith("# 7")]
    (tmp_path / "run.toml").write_text("\n".join(tables))
    sources = parse(["--job.config_file", str(tmp_path / "run.toml")]).data.sources
    sizes = [sum(map(len, part)) for part in (rows[:1200] * 2, rows[1200:], rows[:7])]
    assert [source.paths[0].rpartition(".")[2] for source in sources] == ["jsonl", "parquet", "md"]
    for source, size in zip(sources, sizes, strict=True):
        assert source.weight == pytest.approx(size / sum(sizes[:2]), rel=0.1)


def test_text_of_many_files_is_estimated_from_some_of_them(tmp_path: Path) -> None:
    rows = [f"row {number:05} " * (10 + number % 7) for number in range(60)]
    for number, row in enumerate(rows):
        (tmp_path / f"{number:02}.jsonl").write_text(json.dumps({"text": row, "other": row}) + "\n")
    files = sorted(tmp_path.iterdir())
    assert mixed_folder.estimate_text_bytes(files, "text") == pytest.approx(sum(map(len, rows)), rel=0.05)


def test_share_of_text_in_a_large_file_is_estimated_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_folder, "SAMPLED_BYTES", 1 << 20)
    monkeypatch.setattr(mixed_folder, "SAMPLED_ROWS", 100)
    rows = [f"row {number:05} " * 100 for number in range(6000)]
    content = "".join(json.dumps({"text": row, "other": row}) + "\n" for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    (tmp_path / "a.txt").write_bytes("".join(rows).encode())
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"caf\xe9"]}), tmp_path / "damaged.parquet")
    for file in tmp_path.glob("a.*"):
        assert mixed_folder.estimate_text_bytes([file], "text") == pytest.approx(sum(map(len, rows)), rel=0.1), file
    damaged = tmp_path / "damaged.parquet"
    assert mixed_folder.estimate_text_bytes([damaged], "text") == damaged.stat().st_size


def test_readme_and_metadata_files_are_not_data_if_there_are_other_files(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "README.md").write_text("# about")
    assert texts(tmp_path) == ["# about"]
    (tmp_path / "metadata.csv").write_text("text\nabout\n")
    assert texts(tmp_path) == ["about"]
    (tmp_path / "a.jsonl").write_text(LINES)
    log.clear()
    assert texts(tmp_path) == DOCUMENTS
    names = f"{tmp_path / 'README.md'}, {tmp_path / 'metadata.csv'}"
    assert f"left out 2 .csv and .md file(s), since such files often describe the data: {names}; to read" in log.text


def test_all_files_that_are_not_utf8_are_named(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    bad = [f"{number}.{kind}" for kind in ("jsonl", "txt") for number in range(8)]
    for name in bad:
        (tmp_path / name).write_bytes(b'{"text": "caf\xe9"}\n')
    for kind in ("jsonl", "txt"):
        (tmp_path / f"good.{kind}").write_text('{"text": "a"}\n')
        names = [str(tmp_path / f"{number}.{kind}") for number in range(8)]
        others = f"7 other file(s) are not UTF-8 either: {', '.join(names[1:6])} and 2 others"
        for verify_bytes in (0, math.inf):
            with pytest.raises(DataError, match=rf"^{names[0]}: .*is not UTF-8 at byte 13.*{re.escape(others)}$"):
                open_files([f"{tmp_path}/*.{kind}"], "text", "data.path", verify_bytes)
        log.clear()
        open_files([f"{tmp_path}/*.{kind}"], "text", "data.path", skip_not_utf8=True)
        skipped = f"skipped 8 of 9 file(s) that are not UTF-8: {', '.join(names[:5])} and 3 others"
        assert skipped in log.text


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 20])
def test_check_of_the_encoding_finds_the_place_of_an_error_in_any_block(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "_BLOCK_BYTES", block)
    valid = '{"text": "é€𝄞"}\n'.encode()
    for content, place in (
        (valid + b'{"text": "\xe9"}', len(valid) + 10),
        (valid + '{"text": "€'.encode()[:-1], len(valid) + 10),
    ):
        with pytest.raises(NotUTF8Error, match=rf"line 2 is not UTF-8 at byte {place} of the text"):
            require_utf8_file(io.BytesIO(content), "a.jsonl", whole=True)
    require_utf8_file(io.BytesIO(valid * 3), "a.jsonl", whole=True)
    require_utf8_file(io.BytesIO("é€𝄞".encode()), "a.jsonl", whole=False)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "binary.parquet"])
def test_empty_documents_are_counted_as_rows_without_text(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any]] = [{"text": text} for text in ("a", "", "b", "")]
    contents = {
        "a.jsonl": "\n".join(map(json.dumps, rows)) + "\n\nmalformed\n",
        "a.json": json.dumps(rows),
        "a.csv": 'text,n\na,1\n"",2\nb,3\n,4\n\n',
    }
    if name.endswith(".parquet"):
        values = [row["text"].encode() if name == "binary.parquet" else row["text"] for row in rows]
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / name)
    else:
        (tmp_path / name).write_text(contents[name])
    source = open_files([str(tmp_path / name)], "text", "data.path")
    assert [text for text in source.read_all(range(source.parts)) if text != ""] == ["a", None, "b", None]
    manifest = prepare(SourceConfig(path=str(tmp_path / name)), "data", "", tmp_path / "prepared", processes=1)
    assert manifest is not None
    assert sum(shard.skipped for shard in manifest.shards) == 2


@pytest.mark.parametrize("first", ["", "\n", "\ufeff", "\ufeff\n", '{"n": 1}\n', "not json\n", "[1]\n", '"\u2028"\n'])
def test_first_line_may_be_empty_or_malformed(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.jsonl").write_text(first + LINES, encoding="utf-8")
    assert texts(tmp_path / "a.jsonl") == DOCUMENTS


def test_too_deeply_nested_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES + '{"text": "deep", "n": ' + "[" * 99999 + "]" * 99999 + "}\n")
    assert texts(tmp_path / "a.jsonl") == DOCUMENTS


def test_column_name_with_a_dot(tmp_path: Path) -> None:
    table = pyarrow.table({"raw": [{"text": "nested"}], "raw.text": ["flat"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", column="raw.text") == ["flat"]


def test_lone_surrogate_is_replaced_in_documents_and_by_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "broken \\ud83d emoji"}\n')
    assert texts(tmp_path / "a.jsonl") == ["broken ? emoji"]
    assert TOKENIZER.encode("broken \ud83d emoji", bos=True, eos=True) == TOKENIZER.encode(
        "broken ? emoji", bos=True, eos=True
    )


def test_list_of_paths(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("z.jsonl", "a.jsonl", "more/b.jsonl", "c1.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    paths = [str(tmp_path / name) for name in ("z.jsonl", "more", "c*.jsonl", "z.jsonl")]
    assert texts(*paths) == ["z.jsonl", "more/b.jsonl", "c1.jsonl"]
    (tmp_path / "run.toml").write_text(f"[data]\npath = {json.dumps(paths)}\n")
    config = parse(["--job.config_file", str(tmp_path / "run.toml")])
    assert config.data.paths == tuple(paths)
    assert parse(["--data.path", *paths]).data == config.data
    assert take(make_loader(config.data, range(1), batch=1, seq_len=16), 1).shape == (1, 1, 16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", LINES.encode() + b'{"text": "caf\xe9"}\n', f"line 61 is not UTF-8 at byte {len(LINES) + 13}"),
        ("a.jsonl", LINES.encode("utf-16"), "line 1 is not UTF-8 at byte 0"),
        ("a.csv", b"text\ncaf\xe9\n", "line 2 is not UTF-8 at byte 8"),
        ("a.txt", b"Il \xe9tait une fois", "is not UTF-8 at byte 3"),
        ("a.txt", "Il etait".encode("utf-16-le"), "is not UTF-8 at byte 1"),
        ("a.txt.gz", gzip.compress(b"Il \xe9tait", mtime=0), "is not UTF-8 at byte 3"),
        ("a.json", b'[{"text": "a"},\n{"text" "b"}]', "line 2 is not valid JSON"),
        ("a.csv", b"body\nx\n", "has no column 'text' (text_column); its columns are body"),
        ("a.csv", b'text\n"a" b"\n"c\n', "the row that begins at line 2 is malformed at line 2: ',' expected"),
        ("a.csv", b'text\r\na\r\n"b\r\nc\r\nd', "begins at line 3 is malformed at line 5: unexpected end of data"),
        ("a.tsv", b'n\ttext\n1\t"b\tc\n2\td\n', "begins at line 2 is malformed at line 3: unexpected end of data"),
        ("a.csv.gz", gzip.compress(b'text\n"a\nb"\n"c\n', mtime=0), "begins at line 4 is malformed at line 4"),
        ("a.csv", b"n,text\n1,a\n2,b, and more\n", "line 3 has 3 fields, but there are 2 columns: quote a field"),
        ("a.csv", b"text,text\na,b\n", "has 2 columns of the name 'text' (text_column); its columns are text, text"),
        ("a.txt", b"caf\xe9", "is not UTF-8 at byte 3"),
        ("a.txt.gz", gzip.compress("Il etait".encode("utf-16-le"), mtime=0), "is not UTF-8 at byte 1"),
        ("a.csv", b"n,text\n", "has no documents"),
        ("b.jsonl", b'{"body": "x"}\n\n', "has no column 'text' (text_column); its columns are body"),
        ("b.jsonl", b'{"text": 1}\n', "the column 'text' (text_column) holds int, not text"),
        ("b.jsonl.gz", b"not packed", "cannot be read after document 0, it seems damaged: Not a gzipped file"),
        ("b.parquet", b"PAR1", "cannot be read after document 0, it seems damaged"),
    ],
)
def test_error_names_the_file_and_position(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        texts(tmp_path / name)
    assert str(error.value).startswith("data.path" if message == "has no documents" else f"{tmp_path / name}")
    assert message in str(error.value)


def test_invalid_file_of_a_folder_is_named(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text(LINES if number != 2 else '{"body": 1}\n')
    with pytest.raises(DataError, match=r"2.jsonl: it has no column 'text'"):
        texts(tmp_path)


def test_piece_that_is_not_utf8_is_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.txt"
    content = bytearray(LONG.encode())
    content[100_000] = 0xE9
    file.write_bytes(content)
    logging.getLogger("torchtrain").addHandler(caplog.handler)
    source = open_files([str(file)], "text", "data.path")
    assert [text is None for text in source.read_all(range(3))] == [False, True, False]
    assert f"{file}: it is not UTF-8 at byte 100000" in caplog.text


def test_prepare_accepts_a_copied_file_and_rejects_a_changed_one(tmp_path: Path) -> None:
    lines = LINES * 400  # above the size up to which all bytes of a file are hashed
    file = tmp_path / "a.jsonl"
    file.write_text(lines)
    output = tmp_path / "prepared"
    manifest = prepare(SourceConfig(path=str(file)), "data", "", output, processes=1)
    os.utime(file, (1, 1))
    assert prepare(SourceConfig(path=str(file)), "data", "", output, processes=1) == manifest
    (tmp_path / "other").mkdir()
    shutil.copy(file, tmp_path / "other/a.jsonl")
    assert prepare(SourceConfig(path=str(tmp_path / "other/a.jsonl")), "data", "", output, processes=1) == manifest
    position = len(lines) // 3
    file.write_text(lines[:position] + lines[position:].replace("document 1 ", "document 2 ", 1))
    with pytest.raises(DataError, match="the content of its files has changed since"):
        prepare(SourceConfig(path=str(file)), "data", "", output, processes=1)


@pytest.mark.parametrize("function", ["documents", "atomic_write"])
def test_conversion_retries_transient_storage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    original, failures = getattr(local_files, function), [errno.EIO, errno.ESTALE]

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "does not answer")
        return original(*arguments, **options)

    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    monkeypatch.setattr(local_files, function, fail)
    monkeypatch.setattr("torchtrain.files.time.sleep", lambda _: None)
    opened = opened_text(source)
    assert [text for unit in range(opened.parts) for _, text in opened.read(unit, 0)] == DOCUMENTS
    failures[:] = [errno.EIO] * 99
    os.utime(source.paths[0], (1, 1))  # otherwise the converted copy is read
    with pytest.raises(StorageError, match=r"a.jsonl cannot be read: does not answer, in 4 attempts"):
        opened_text(source)


def test_conversion_on_a_full_disk_names_the_option_for_another_cache(disk: DiskFaults, tmp_path: Path) -> None:
    file, cache = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), os.environ["HF_DATASETS_CACHE"]
    disk.fail("write", f"{cache}/*", errno.ENOSPC)
    run = ForkedRun(tmp_path / "run", "--data.path", file, ranks=1)
    assert run.wait() == [2]
    assert f"data.path = '{file}' cannot be converted into {cache}: No space left on device. Make room" in run.output()


def test_prepare_resumes_after_a_full_disk(disk: DiskFaults, tmp_path: Path) -> None:
    output = tmp_path / "prepared"
    file = write_jsonl(tmp_path / "a.jsonl", [text * 300 for text in DOCUMENTS])  # 1.2 MB, in four shards
    command = [sys.executable, "-m", "torchtrain.prepare", "--data.path", file, "--prepare.output", str(output)]

    def run(code: int) -> str:
        environment = {**os.environ, **disk.environment}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result.stderr

    disk.fail("write", f"{output}/shard-00003*", errno.ENOSPC)
    assert f"{output} cannot be written: No space left on device. Make room" in run(2)
    assert "the same command continues from there" in run(2)
    disk.heal()
    run(0)
    write_prepared(tmp_path / "uninterrupted", file)
    for path in (tmp_path / "uninterrupted").glob("shard-*"):
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_parent_of_prepared_folders_raises_a_data_error(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    for number in range(2):
        write_prepared(tmp_path / f"prepared/{number}", file)
    both = (str(tmp_path / "prepared/0"), str(tmp_path / "prepared/1"))
    for path in (str(tmp_path / "prepared"), both):
        with pytest.raises(DataError, match=r"several folders \(.*prepared/0.*\); name each in a table"):
            make_loader(DataConfig(path=path))
    make_loader(DataConfig(path=both[0] + "/"))
    (tmp_path / "prepared/0/manifest.json").rename(tmp_path / "prepared/0/unfinished.json")
    with pytest.raises(DataError, match=r"prepared/0 is only partly prepared; run torchtrain.prepare again"):
        make_loader(DataConfig(path=both[0]))
    assert not PreparedFolder.recognizes(SourceConfig(path=file), SourceContext("data", TOKENIZER))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "csv", "txt"])
def test_reading_starts_at_any_document(kind: str) -> None:
    lines = [f"document {n}" for n in range(600)]
    table, out = pyarrow.table({"text": lines}), io.BytesIO()
    if kind == "parquet":
        pyarrow.parquet.write_table(table, out, row_group_size=500)  # in more than one batch of rows
    elif kind == "arrow":
        with pyarrow.ipc.new_file(out, table.schema) as file:
            file.write_table(table)
    elif kind == "json":
        out.write(json.dumps([{"text": line} for line in lines]).encode())
    else:
        out.write("\n".join([*(["text"] if kind == "csv" else []), *lines]).encode())
    for start in (0, 255, 256, 300, 500, 599):
        raw = io.BytesIO(out.getvalue())
        assert list(file_formats.documents(raw, f"a.{kind}", "text", start, text_by_line=True)) == lines[start:]


@pytest.mark.parametrize("shares", [1, 2, 3, 50])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt by line", "txt"])
def test_shares_of_a_file_contain_each_document_once(kind: str, shares: int) -> None:
    """From any document on, also where a border is in the middle of a line, of a character or of a row group."""
    documents = [f"{n} zwölf 字" * (n % 5) for n in range(200)]
    if kind == "parquet":
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), content, row_group_size=70)
        raw = content.getvalue()
    elif kind == "jsonl":
        raw = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in documents).encode()
    else:
        documents = documents if kind == "txt by line" else [f"{text} words" * 600 for text in documents]
        raw = "\n".join([*documents, ""]).encode()
    name = f"corpus.{kind.split()[0]}"
    assert file_formats.has_shares(name, len(raw), text_by_line="line" in kind)

    def read(share: int, start: int = 0) -> list[str | None]:
        texts = file_formats.documents_of_share(
            io.BytesIO(raw), name, len(raw), "text", share, shares, start, text_by_line="line" in kind
        )
        return list(texts)

    parts = [read(share) for share in range(shares)]
    joined = [text or "" for part in parts for text in part]
    assert "".join(joined) == raw.decode() if kind == "txt" else joined == documents
    for share, part in enumerate(parts):
        for start in (1, len(part) // 2, len(part), len(part) + 3):
            assert read(share, start) == part[start:]


@pytest.mark.parametrize("share", range(4))
def test_no_share_of_a_text_in_utf_16_is_read(share: int) -> None:
    raw = ("a line of words\n" * 100_000).encode("utf-16-le")
    with pytest.raises(NotUTF8Error):
        list(file_formats.documents_of_share(io.BytesIO(raw), "corpus.txt", len(raw), "text", share, 4))


def test_files_that_are_read_as_a_whole_have_no_shares() -> None:
    for name in ("a.jsonl.gz", "a.json", "a.csv", "a.txt.zst", "a.arrow", "a.txt"):
        assert not file_formats.has_shares(name, 1000)
