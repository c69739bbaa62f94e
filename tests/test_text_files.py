"""Text files as training data: file names, folders, formats, encodings, and errors that name the file and position."""

import csv
import errno
import gzip
import io
import itertools
import json
import lzma
import math
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from captured_log import captured_log
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take

from torchtrain.config.parse import parse
from torchtrain.datasets import builtin_formats, file_formats, text_input
from torchtrain.datasets.builtin_sources import Files
from torchtrain.datasets.data_source import SkippedText, SourceContext, TextInput
from torchtrain.datasets.file_formats import NotUTF8Error, require_utf8_file
from torchtrain.datasets.local_files import open_text_files
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.text_input import TextFiles
from torchtrain.errors import DataError, StorageError

LINES = "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(DOCUMENTS))
LONG = "".join(f"line {n * n % 9973}\n" for n in range(150_000))  # long enough to be split into pieces


def open_files(*paths: Path | str, column: str = "text", **options: Any) -> TextFiles:
    return open_text_files([str(path) for path in paths], column, "data.path", **options)


def texts(*paths: Path | str, column: str = "text") -> list[str | None]:
    """Return the documents that have text."""
    return list(open_files(*paths, column=column).texts())


def opened_text(source: SourceConfig) -> TextInput:
    """The text of a source of a config."""
    return Files.open_text(source, SourceContext("data", TOKENIZER))


def rows(source: TextInput) -> tuple[list[str | None], SkippedText]:
    """The rows of all shards, and what was skipped."""
    skipped = SkippedText()
    return [text for shard in range(len(source.shard_sizes)) for *_, text in source.read(shard, skipped)], skipped


def test_existing_file_names_are_not_glob_patterns(tmp_path: Path) -> None:
    for name in ("data[1].jsonl", "data1.jsonl", "a*.jsonl", "ab.jsonl", "what?.jsonl", "{x}.jsonl", "a b#%20.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
        assert texts(tmp_path / name) == [name]
    assert texts(tmp_path / "data*.jsonl") == ["data1.jsonl", "data[1].jsonl"]
    assert sorted(texts(tmp_path)) == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(("suffix", "content"), [(b".txt", b"coffee"), (b".jsonl", b'{"text": "coffee"}\n')])
def test_file_names_that_are_not_utf8(tmp_path: Path, suffix: bytes, content: bytes) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + suffix)).write_bytes(content)
    source = open_files(tmp_path)
    assert list(source.read(0, SkippedText())) == [(0, 0, "coffee")]
    assert source.identify().text.startswith(f"1 file(s) of {len(content)} bytes")
    make_loader(DataConfig(path=str(tmp_path)), range(1), batch=1, seq_len=2)


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


def test_compressed_file_may_begin_with_a_frame_that_is_skipped(tmp_path: Path) -> None:
    """As pzstd writes them; an array of JSON is known by its first character."""
    skipped = struct.pack("<II4s", 0x184D2A50, 4, b"size")
    array = json.dumps([{"text": "one"}, {"text": "two"}], indent=0)
    (tmp_path / "a.json.zst").write_bytes(skipped + zstandard.compress(array.encode()))
    assert texts(tmp_path / "a.json.zst") == ["one", "two"]
    (tmp_path / "a.txt.zst").write_bytes(skipped + zstandard.compress(b"\xff" * 100))
    with pytest.raises(DataError, match="UTF-8"):
        texts(tmp_path / "a.txt.zst")


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


def test_identity_depends_on_all_bytes_up_to_verify_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(LONG)

    def identity(verify_bytes: float) -> str:
        return open_files(file, verify_bytes=verify_bytes).identify().text

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
        return list(opened_text(SourceConfig(path=str(tmp_path / "saved"), split=split)).texts())

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


@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".xz"])
def test_every_format_has_the_same_documents(tmp_path: Path, compression: str) -> None:
    compress: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.compress,
        ".xz": lzma.compress,
    }
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


def test_malformed_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    null = '{"text": null}\n'
    (tmp_path / "a.jsonl").write_text(LINES[:-1] + "\n\n" + null)
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": "cut\n\n[1]\n' + null + '{"text": "a\0b"}\n')
    (tmp_path / "c.json").write_text('[{"text": "c"}, "no object", {"text": null}]')
    found, skipped = rows(open_files(*(tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.json"))))
    assert (skipped.malformed, skipped.first_malformed) == (4, f"{tmp_path}/b.jsonl: line 2")
    assert list(filter(None, found)) == [*DOCUMENTS, "b", "c"]
    assert found.count(None) == 3
    (tmp_path / "a.csv").write_text('n,text\n1,"a\nb"\n\n2\n3,c\n')
    found, skipped = rows(open_files(tmp_path / "a.csv"))
    assert found == ["a\nb", "", "", "c"]
    assert (skipped.malformed, skipped.first_malformed) == (1, f"{tmp_path}/a.csv: line 5")


def test_malformed_line_of_a_part_of_a_file_is_named_by_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text(LINES + "broken\n" + LINES)
    found, skipped = rows(open_files(tmp_path / "a.jsonl"))
    assert found == [*DOCUMENTS, "", *DOCUMENTS]
    assert (skipped.malformed, skipped.first_malformed) == (1, f"{tmp_path}/a.jsonl: the line at byte {len(LINES)}")


def test_skip_not_utf8_skips_and_counts_files(tmp_path: Path) -> None:
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
        with captured_log() as log:
            found, skipped = rows(opened_text(parse(["--job.config_file", str(tmp_path / "run.toml")]).data))
        if kind == "c.txt":  # as its beginning shows
            assert log == [f"data.path = {path!r}: skipped 1 of 4 file(s) that are not UTF-8: {invalid}"]
        else:
            assert skipped.not_utf8 == [str(invalid)]
        documents = {"a.jsonl": DOCUMENTS, "b.csv": ["b"], "c.txt": ["c"], "d.txt.gz": ["d"]}[kind]
        assert found == documents * 3
    with pytest.raises(DataError, match=r"data.path has no documents"):
        open_files(tmp_path / "3c.txt", skip_not_utf8=True)


@pytest.mark.parametrize("pattern", ["", "/", "/sub"])
def test_folder_with_several_formats_is_an_error_with_patterns_to_read_it(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for parent in (folder, folder / "sub"):
        (parent / "a.jsonl").write_text('{"content": "jsonl"}\n' * 2)
        (parent / "b.jsonl.gz").write_bytes(gzip.compress(b'{"content": "gz"}\n'))
        (parent / "a.txt").write_text("txt")
        pyarrow.parquet.write_table(pyarrow.table({"content": ["parquet"]}), parent / "b.parquet")
    with pytest.raises(DataError, match=r"mixes files of several formats \(.jsonl, .parquet, .txt\)") as error:
        texts(f"{folder}{pattern}", column="content")
    options = str(error.value).partition("or several in a list: ")[2]
    (tmp_path / "run.toml").write_text(f"[data]\ntext_column = 'content'\n{options}\n")
    source = parse(["--job.config_file", str(tmp_path / "run.toml")]).data
    each = 1 if pattern == "/sub" else 2
    found = list(opened_text(source).texts())
    assert sorted(found) == sorted(["jsonl", "jsonl", "gz", "parquet", "txt"] * each)
    assert texts(f"{folder}{pattern}/**/*.jsonl", f"{folder}{pattern}/**/*.txt", column="content").count("txt") == each


def test_md_files_are_not_data_if_there_are_other_files(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# about")
    assert texts(tmp_path) == ["# about"]
    (tmp_path / "a.jsonl").write_text(LINES)
    with captured_log() as log:
        assert texts(tmp_path) == DOCUMENTS
    assert f"data.path: left out 1 .md file(s): {tmp_path / 'README.md'}" in log
    assert texts(tmp_path / "*") == texts(tmp_path / "*.md", tmp_path / "a.jsonl") == ["# about", *DOCUMENTS]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_all_files_that_are_not_utf8_are_named(tmp_path: Path, kind: str) -> None:
    names = [str(tmp_path / f"{number}.{kind}") for number in range(8)]
    for name in names:
        Path(name).write_bytes(b'{"text": "caf\xe9"}\n')
    (tmp_path / f"good.{kind}").write_text('{"text": "a"}\n')
    others = f"7 other file(s) are not UTF-8 either: {', '.join(names[1:6])} and 2 others"
    for verify_bytes in (0, math.inf):
        with pytest.raises(DataError, match=rf"^{names[0]}: .*is not UTF-8 at byte 13.*{re.escape(others)}$"):
            list(open_files(tmp_path, verify_bytes=verify_bytes).texts())
    with captured_log() as log:
        make_loader(DataConfig(path=str(tmp_path), skip_not_utf8=True), range(1), batch=1, seq_len=2)
    skipped = f"that are not UTF-8: {', '.join(names[:5])} and 3 others"
    assert [line for line in log if line.endswith(skipped)] == [log[0]]


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
    entries: list[dict[str, Any]] = [{"text": text} for text in ("a", "", "b", "")]
    contents = {
        "a.jsonl": "\n".join(map(json.dumps, entries)) + "\n\nmalformed\n",
        "a.json": json.dumps(entries),
        "a.csv": 'text,n\na,1\n"",2\nb,3\n,4\n\n',
    }
    if name.endswith(".parquet"):
        values = [row["text"].encode() if name == "binary.parquet" else row["text"] for row in entries]
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / name)
    else:
        (tmp_path / name).write_text(contents[name])
    found, skipped = rows(open_files(tmp_path / name))
    assert [text for text in found if text != ""] == ["a", None, "b", None]
    assert skipped.malformed == (name == "a.jsonl")


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


def test_lone_surrogate_is_replaced_by_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "broken \\ud83d emoji"}\n' * 2)
    assert texts(tmp_path / "a.jsonl") == ["broken \ud83d emoji"] * 2
    make_loader(DataConfig(path=str(tmp_path)), range(1), batch=1, seq_len=8)
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
    assert str(error.value).startswith(f"{tmp_path / name}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"n,text\n", "data.path = '{0}' has no text in its 0 documents"),
        (b'n,text\n1,\n2,""\n', "data.path = '{0}' has no text in its 2 documents"),
        (b"", "data.path = '{0}' has no documents"),
        (None, "data.path = '{0}' does not exist (looked for {0})"),
    ],
)
def test_file_without_text_is_an_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "a.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(message.format(file))}$"):
        make_loader(DataConfig(path=str(file)))
    with pytest.raises(DataError, match=r"no-such-\*\.csv' does not exist"):
        make_loader(DataConfig(path=f"{tmp_path}/no-such-*.csv"))


def test_invalid_file_of_a_folder_is_named(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text(LINES if number != 2 else '{"body": 1}\n')
    with pytest.raises(DataError, match=r"2.jsonl: it has no column 'text'"):
        texts(tmp_path)


def test_piece_that_is_not_utf8_is_named_by_its_byte(tmp_path: Path) -> None:
    file, content = tmp_path / "a.txt", bytearray(LONG.encode())
    content[1_000_000] = 0xE9
    file.write_bytes(content)
    for verify_bytes in (0, math.inf):
        with pytest.raises(NotUTF8Error, match=rf"^{file}: .*not UTF-8 at byte 1000000"):
            list(open_files(file, verify_bytes=verify_bytes).texts())


@pytest.mark.parametrize("ranges", [1, 2, 3, 50])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_ranges_of_a_file_contain_each_document_once(kind: str, ranges: int) -> None:
    """Also where a border is in the middle of a line, of a character or of a row group."""
    documents = [f"{n} zwölf 字" * (n % 5) for n in range(200)]
    if kind == "parquet":
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), content, row_group_size=70)
        raw = content.getvalue()
    elif kind == "jsonl":
        lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in documents)
        raw = f"\ufeff{lines}".encode()
    else:
        raw = "\n".join([*(f"{text} words" * 600 for text in documents), ""]).encode()
    name = f"corpus.{kind}"
    assert file_formats.is_splittable(name, len(raw))
    borders = [len(raw) * number // ranges for number in range(ranges + 1)]
    found = [
        text or ""
        for start, stop in itertools.pairwise(borders)
        for text in file_formats.documents_in_range(io.BytesIO(raw), name, "text", start, stop)
    ]
    assert "".join(found) == raw.decode() if kind == "txt" else found == documents


def test_each_line_is_in_exactly_one_range() -> None:
    content = b'{"text": "one"}\n\n{"text": "two"}\n{"text": "three"}'
    lines = [(0, '{"text": "one"}'), (16, ""), (17, '{"text": "two"}'), (33, '{"text": "three"}')]
    for cut in range(1, len(content)):
        ranges = ((0, cut), (cut, len(content)))
        found = [list(builtin_formats._lines_in_range(io.BytesIO(content), *one)) for one in ranges]
        assert found[0] + found[1] == lines
        assert [offset for offset, _ in found[0] if not (offset < cut)] == []


@pytest.mark.parametrize("part", range(4))
def test_no_range_of_a_text_in_utf_16_is_read(part: int) -> None:
    raw = ("a line of words\n" * 100_000).encode("utf-16-le")
    start, stop = (len(raw) * border // 4 for border in (part, part + 1))
    with pytest.raises(NotUTF8Error):
        list(file_formats.documents_in_range(io.BytesIO(raw), "corpus.txt", "text", start, stop))


def test_files_that_are_read_as_a_whole_are_not_splittable() -> None:
    for name in ("a.jsonl.gz", "a.json", "a.csv", "a.txt.zst", "a.arrow", "a.txt"):
        assert not file_formats.is_splittable(name, 1000)
    assert file_formats.is_splittable("a.txt", 2 << 20)
