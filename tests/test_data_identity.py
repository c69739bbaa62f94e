"""The table of data files in checkpoints, and what a message says of two tables."""

import json
from pathlib import Path

import pytest

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.datasets import data_identity, local_files
from torchtrain.datasets.builtin_sources import Files
from torchtrain.datasets.data_identity import DataFile, FileTable, as_json, describe_changes, from_json
from torchtrain.datasets.local_files import identify
from torchtrain.datasets.options import SourceConfig


def table(*files: str) -> FileTable:
    """The table of files given as "name=hash"."""
    pairs = [file.split("=") for file in files]
    entries = [DataFile(name, size=1, hash=digest) for name, digest in pairs]
    return FileTable.of(entries, len(entries))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (("/d/a=1", "/d/b=2"), ("/d/a=1", "/d/b=2"), ""),
        (("/d/a=1",), ("/d/a=1", "/d/b=2"), "added: /d/b"),
        (("/d/a=1", "/d/b=2"), ("/d/b=2",), "removed: /d/a"),
        (("/d/a=1", "/d/b=2"), ("/d/a=1", "/d/b=3"), "changed: /d/b"),
        (("/d/a=1", "/d/b=2"), ("/d/b=2", "/d/a=1"), "in another order from /d/b on (in the checkpoint /d/a)"),
        (
            ("/d/a=1", "/d/b=2"),
            ("/d/b=2", "/d/c=1"),
            "renamed: /d/a to /d/c; in another order from /d/b on (in the checkpoint /d/c)",
        ),
        (("/d/a=1", "/d/b=2"), ("s3://e/f/a=1", "s3://e/f/b=3"), "changed: b"),
        (("/d/a=", "/d/b="), ("/d/a=", "/d/c="), "added: /d/c; removed: /d/b"),
        (("a=1", "b=2"), ("a=1", "b\n=2", "c=3"), r"added: c; renamed: 'b to b\n'"),
        ((), ("/d/a=1",), ""),
        (
            ("/d/x=",),
            ("/d/x=", *(f"/d/{number}={number}" for number in range(1000, 2007))),
            "added: /d/1000, /d/1001, /d/1002, /d/1003, /d/1004 and 1,002 others",
        ),
    ],
)
def test_differences_of_two_tables(before: tuple[str, ...], now: tuple[str, ...], expected: str) -> None:
    assert (
        describe_changes(*(from_json(json.loads(as_json([table(*files)])))[0] for files in (before, now))) == expected
    )


@pytest.mark.parametrize(
    "content",
    [
        5,
        [None],
        [{}],
        [{"folder": "a/", "count": None, "files": []}],
        [{"folder": "a/", "count": 1, "files": [["b", "1", "h", ""]]}],
        [{"folder": "a/", "count": 1, "files": [["b", 1, 7, ""]]}],
        [{"folder": "a/", "count": 1, "files": [["b"]]}],
        [{"folder": "a/", "count": 1, "files": [["b", 1, "h", "", "more"]]}],
    ],
)
def test_json_that_is_no_table_is_rejected(content: object) -> None:
    """With the errors that a resume reports as damage."""
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        from_json(content)


def test_table_of_many_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_identity, "MAX_FILES", 3)
    before, now = table("b=1", "c=2", "d=3", "e=4"), table("a=0", "b=1", "c=5", "d=3", "e=4")
    assert [len(files.files) for files in (before, now)] == [3, 3]
    # Nothing is known of files after c, which is the last one in both tables.
    assert describe_changes(before, now) == "added: a; changed: c"


def test_hash_of_a_large_file_depends_on_its_beginning_middle_and_end(tmp_path: Path) -> None:
    """At each border of the three parts, and on its size; of a small file on each byte."""
    whole, part = local_files._WHOLE_BYTES, local_files._BLOCK_BYTES
    size = whole + 4 * part + 1
    middle = (size - part) // 2
    file = tmp_path / "large.txt"

    def hash_with(place: int | None, size: int = size) -> str:
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        identity = identify([file], verify_bytes=0)
        return f"{identity.text} {identity.files.files[0].hash}"

    read = [0, part - 1, middle, middle + part - 1, size - part, size - 1]
    hashes = [hash_with(place) for place in (None, *read)]
    assert len(set(hashes)) == 1 + len(read)
    for place in (part, middle - 1, middle + part, size - part - 1):
        assert hash_with(place) == hashes[0]
    assert hash_with(None, size + 1) != hashes[0]
    places = (None, 0, whole // 3, whole // 2, whole - 1)
    assert len({hash_with(place, whole) for place in places}) == len(places)


def test_table_has_the_content_of_large_files_where_all_of_it_was_read(tmp_path: Path) -> None:
    small, large = tmp_path / "a.txt", tmp_path / "b.txt"
    small.write_bytes(b"x" * 1000)
    large.write_bytes(b"y" * 3_000_000)
    whole, sampled = identify([small, large]).files, identify([small, large], verify_bytes=0).files
    content = bytearray(large.read_bytes())
    content[1_000_000] = ord("z")  # between the parts that are read of a large file
    large.write_bytes(content)
    assert describe_changes(whole, identify([small, large]).files) == f"changed: {large}"
    assert describe_changes(whole, identify([small, large], verify_bytes=0).files) == ""
    assert describe_changes(sampled, identify([small, large]).files) == ""
    assert [file.content != "" for file in whole.files] == [False, True]


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ({"path": "a.txt"}, "path"),
        ({}, "path"),
        ({"type": "standard_library_docs"}, "type"),
        ({"type": "files_of_mine"}, "type"),
    ],
)
def test_option_by_which_a_checkpoint_names_the_data(
    source: dict[str, str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored, so it must not change."""
    monkeypatch.setitem(DATA_SOURCES._entries, "files_of_mine", Files)
    config = SourceConfig(**source)  # type: ignore[arg-type]
    assert DATA_SOURCES[config.source_type].data_option(config) == option
