"""Text as people have it: odd names, folders, formats and encodings; and what is wrong is named with its place."""

import csv
import errno
import gzip
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_prepared
from disk_faults import DiskFaults

from torchtrain.config.parse import parse
from torchtrain.config.schema import Data, Source
from torchtrain.datasets import files, formats
from torchtrain.datasets.files import open_files
from torchtrain.datasets.preparing import prepare
from torchtrain.datasets.sources import open_prepared, open_text
from torchtrain.errors import DataError, StorageError

ROOT = Path(__file__).parent.parent
LINES = "".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(DOCUMENTS))
LONG = "".join(f"line {n * n % 9973}\n" for n in range(150_000))  # is cut into pieces


def texts(*paths: Path | str, column: str = "text") -> list[str | None]:
    """The documents with text."""
    source = open_files([str(path) for path in paths], column, "data.path")
    return [text for text in source.read_all(range(source.units)) if text]


def test_names_are_literal(tmp_path: Path) -> None:
    for name in ("data[1].jsonl", "data1.jsonl", "a*.jsonl", "ab.jsonl", "what?.jsonl", "{x}.jsonl", "a b#%20.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
        assert texts(tmp_path / name) == [name]
    assert texts(tmp_path / "data*.jsonl") == ["data1.jsonl", "data[1].jsonl"]
    assert sorted(texts(tmp_path)) == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(("suffix", "content"), [(b".txt", b"coffee"), (b".jsonl", b'{"text": "coffee"}\n')])
def test_a_name_need_not_be_utf8(tmp_path: Path, suffix: bytes, content: bytes) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + suffix)).write_bytes(content)
    source = open_files([str(tmp_path)], "text", "data.path")
    assert list(source.read(0, 0)) == [(0, "coffee")]
    assert source.identity().startswith(f"1 file(s) of {len(content)} bytes")


def test_a_compressed_file_that_ends_too_early(tmp_path: Path) -> None:
    packed = {"gz": gzip.compress(LINES.encode()), "zst": zstandard.compress(LINES.encode())}
    for packing, content in packed.items():
        file = tmp_path / f"whole.jsonl.{packing}"
        file.write_bytes(content + content)  # in two frames
        assert texts(file) == DOCUMENTS * 2
        file = tmp_path / f"cut.jsonl.{packing}"
        for kept in (content[: len(content) // 2], content[:-3], content + content[:20]):
            file.write_bytes(kept)
            with pytest.raises(DataError, match=rf"cut.jsonl.{packing} cannot be read after document \d+, it seems"):
                texts(file)


def test_folders(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for path in (folder / "a", folder / ".cache", folder / "a/.ipynb_checkpoints", elsewhere):
        path.mkdir(parents=True)
        (path / "0.jsonl").write_text(json.dumps({"text": path.name}) + "\n")
    (folder / "a/._a.jsonl").write_text("of another system")
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(folder)  # a circle
    (folder / "loop").symlink_to("loop")
    assert sorted(texts(folder)) == ["a", "elsewhere"]
    assert sorted(texts(folder / "**/*.jsonl")) == ["a", "elsewhere"]
    assert sorted(texts(folder / "*/*.jsonl")) == ["a", "elsewhere"]
    assert texts(folder / ".cache") == [".cache"]  # asked for by name


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("gone"), os.mkfifo])
def test_what_is_no_file_in_a_folder_of_texts(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "a.txt").write_text("coffee")
    make(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b.txt is not a file, or a broken link; restore what it names, or remove it"):
        texts(tmp_path)


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_converted_copy_that_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    texts(file)
    (copy,) = (tmp_path / "cache").rglob("*.arrow")
    os.truncate(copy, int(left * copy.stat().st_size))  # as after a loss of power
    with pytest.raises(DataError, match=rf"{copy}, into which .* was converted, is damaged .*: remove it, and start"):
        texts(file)
    copy.unlink()
    assert texts(file) == DOCUMENTS


@pytest.mark.parametrize("pattern", ["", "/**/*.jsonl", "/*/*.jsonl"])
def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(LINES)
    listdir, scandir = os.listdir, os.scandir

    def refuse(list_folder: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def asked(path: Any = ".") -> Any:
            if str(path).endswith("closed"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return list_folder(path)

        return asked

    monkeypatch.setattr(os, "listdir", refuse(listdir))
    monkeypatch.setattr(os, "scandir", refuse(scandir))
    monkeypatch.setattr("torchtrain.reading.time.sleep", lambda _: None)
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


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_formats(tmp_path: Path, packing: str) -> None:
    pack: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    for name, content in FILES.items():
        (tmp_path / (name + packing)).write_bytes(pack[packing](content.encode()))
        assert texts(tmp_path / (name + packing)) == DOCUMENTS, name
    for name, content in (("a.txt", LONG), ("b.txt", "\ufeffshort"), ("c.MD", "# head\n")):
        (tmp_path / name).write_text(content)
        plain = texts(tmp_path / name)
        assert "".join(filter(None, plain)) == content.removeprefix("\ufeff")
        (tmp_path / (name + packing)).write_bytes(pack[packing](content.encode()))
        packed = texts(tmp_path / (name + packing))
        assert "".join(filter(None, packed)) == content.removeprefix("\ufeff")
        assert (len(packed) > 10) == (len(plain) > 10) == (content == LONG)


@pytest.mark.parametrize(
    "dtype",
    [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), "string")],
)
def test_types_of_text_in_tables(tmp_path: Path, dtype: pyarrow.DataType) -> None:
    table = pyarrow.table({"text": pyarrow.array(DOCUMENTS, pyarrow.string()).cast(dtype), "n": range(len(DOCUMENTS))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as file:
        file.write_table(table)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert texts(tmp_path / name) == DOCUMENTS
        with pytest.raises(DataError, match=rf"{name}: the column 'n' .text_column. holds int64, not text"):
            texts(tmp_path / name, column="n")


def test_a_readme_beside_data_is_none(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# about")
    assert texts(tmp_path) == ["# about"]
    (tmp_path / "metadata.csv").write_text("text\nabout\n")
    assert texts(tmp_path) == ["about"]
    (tmp_path / "a.jsonl").write_text(LINES)
    assert texts(tmp_path) == DOCUMENTS


@pytest.mark.parametrize("first", ["", "\n", "\ufeff", "\ufeff\n", '{"n": 1}\n', "not json\n", "[1]\n", '"\u2028"\n'])
def test_a_first_line_is_as_any_other(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.jsonl").write_text(first + LINES, encoding="utf-8")
    assert texts(tmp_path / "a.jsonl") == DOCUMENTS


def test_a_line_that_nests_too_deeply_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES + '{"text": "deep", "n": ' + "[" * 99999 + "]" * 99999 + "}\n")
    assert texts(tmp_path / "a.jsonl") == DOCUMENTS


def test_a_column_with_a_dot_in_its_name(tmp_path: Path) -> None:
    table = pyarrow.table({"raw": [{"text": "nested"}], "raw.text": ["flat"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", column="raw.text") == ["flat"]


def test_a_lone_surrogate_is_replaced_as_tokenizers_do(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "broken \\ud83d emoji"}\n')
    assert texts(tmp_path / "a.jsonl") == ["broken ? emoji"]
    assert TOKENIZER.encode("broken \ud83d emoji", bos=True, eos=True) == TOKENIZER.encode(
        "broken ? emoji", bos=True, eos=True
    )


def test_a_list_of_paths(tmp_path: Path) -> None:
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
    ("name", "content", "told"),
    [
        ("a.jsonl", LINES.encode() + b'{"text": "caf\xe9"}\n', f"line 61 is not UTF-8 at byte {len(LINES) + 13}"),
        ("a.jsonl", LINES.encode("utf-16"), "line 1 is not UTF-8 at byte 0"),
        ("a.csv", b"text\ncaf\xe9\n", "line 2 is not UTF-8 at byte 8"),
        ("a.txt", b"Il \xe9tait une fois", "is not UTF-8 at byte 3"),
        ("a.txt", "Il etait".encode("utf-16-le"), "is not UTF-8 at byte 1"),
        ("a.txt.gz", gzip.compress(b"Il \xe9tait", mtime=0), "is not UTF-8 at byte 3"),
        ("a.json", b'[{"text": "a"},\n{"text" "b"}]', "line 2 is not valid JSON"),
        ("a.csv", b"body\nx\n", "has no column 'text' (text_column); its columns are body"),
        ("a.csv", b'text\n"a" b"\n"c\n', ""),  # as tolerant as the module csv
        ("b.jsonl", b'{"body": "x"}\n\n', "has no column 'text' (text_column); its columns are body"),
        ("b.jsonl", b'{"text": 1}\n', "the column 'text' (text_column) holds int, not text"),
        ("b.jsonl.gz", b"not packed", "cannot be read after document 0, it seems damaged: Not a gzipped file"),
        ("b.parquet", b"PAR1", "cannot be read after document 0, it seems damaged"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    if not told:
        assert texts(tmp_path / name)
        return
    with pytest.raises(DataError) as error:
        texts(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path / name}")
    assert told in str(error.value)


def test_one_bad_file_of_many_is_named(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text(LINES if number != 2 else '{"body": 1}\n')
    with pytest.raises(DataError, match=r"2.jsonl: it has no column 'text'"):
        texts(tmp_path)


def test_a_piece_in_another_encoding_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.txt"
    content = bytearray(LONG.encode())
    content[100_000] = 0xE9
    file.write_bytes(content)
    logging.getLogger("torchtrain").addHandler(caplog.handler)
    source = open_files([str(file)], "text", "data.path")
    assert [text is None for text in source.read_all(range(3))] == [False, True, False]
    assert f"{file}: it is not UTF-8 at byte 100000" in caplog.text


def test_a_copy_is_the_same_and_a_change_is_not(tmp_path: Path) -> None:
    lines = LINES * 400  # above the size up to which a run compares all of a file
    file = tmp_path / "a.jsonl"
    file.write_text(lines)
    output = tmp_path / "prepared"
    manifest = prepare(Source(path=str(file)), "data", "", output, processes=1)
    os.utime(file, (1, 1))
    assert prepare(Source(path=str(file)), "data", "", output, processes=1) == manifest
    (tmp_path / "other").mkdir()
    shutil.copy(file, tmp_path / "other/a.jsonl")
    assert prepare(Source(path=str(tmp_path / "other/a.jsonl")), "data", "", output, processes=1) == manifest
    place = len(lines) // 3
    file.write_text(lines[:place] + lines[place:].replace("document 1 ", "document 2 ", 1))
    with pytest.raises(DataError, match="its files hold something else since"):
        prepare(Source(path=str(file)), "data", "", output, processes=1)


@pytest.mark.parametrize("where", ["documents", "written_whole"])
def test_a_disk_that_fails_for_a_moment_while_files_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    works, failures = getattr(files, where), [errno.EIO, errno.ESTALE]

    def fail(*arguments: Any, **options: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "does not answer")
        return works(*arguments, **options)

    source = Source(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    monkeypatch.setattr(files, where, fail)
    monkeypatch.setattr("torchtrain.reading.time.sleep", lambda _: None)
    opened = open_text(source, "data", 1)
    assert [text for unit in range(opened.units) for _, text in opened.read(unit, 0)] == DOCUMENTS
    failures[:] = [errno.EIO] * 99
    os.utime(source.paths[0], (1, 1))  # else it is in the cache
    with pytest.raises(StorageError, match=r"a.jsonl cannot be read: does not answer, in 4 attempts"):
        open_text(source, "data", 1)


def test_prepare_on_a_full_disk_goes_on_afterwards(disk: DiskFaults, tmp_path: Path) -> None:
    output = tmp_path / "prepared"
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    command = [sys.executable, "-m", "torchtrain.prepare", "--data.path", file, "--prepare.output", str(output)]

    def run(code: int) -> str:
        environment = {**os.environ, **disk.environment}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result.stderr

    cache = os.environ["HF_DATASETS_CACHE"]
    disk.fail("write", f"{cache}/*", errno.ENOSPC)
    assert f"data.path = '{file}' cannot be converted into {cache}: No space left on device. Make room" in run(2)
    disk.heal()
    disk.fail("write", f"{output}/shard-0003*", errno.ENOSPC)
    assert f"{output} cannot be written: No space left on device. Make room" in run(2)
    assert "the same command goes on from there" in run(2)
    disk.heal()
    run(0)
    write_prepared(tmp_path / "undisturbed", file)
    for path in (tmp_path / "undisturbed").glob("shard-*"):
        assert (output / path.name).read_bytes() == path.read_bytes()


def test_the_folder_above_prepared_folders(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    for number in range(2):
        write_prepared(tmp_path / f"prepared/{number}", file)
    both = (str(tmp_path / "prepared/0"), str(tmp_path / "prepared/1"))
    for path in (str(tmp_path / "prepared"), both):
        with pytest.raises(DataError, match=r"several folders \(.*prepared/0.*\); name each in a table"):
            make_loader(Data(path=path))
    make_loader(Data(path=both[0] + "/"))
    (tmp_path / "prepared/0/manifest.json").rename(tmp_path / "prepared/0/unfinished.json")
    with pytest.raises(DataError, match=r"prepared/0 is only partly prepared; run torchtrain.prepare again"):
        make_loader(Data(path=both[0]))
    assert open_prepared(Source(path=file), "data", "", 0) is None


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json", "csv", "txt"])
def test_a_file_is_read_from_any_document_on(kind: str) -> None:
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
        assert list(formats.documents(raw, f"a.{kind}", "text", start, text_by_line=True)) == lines[start:]
