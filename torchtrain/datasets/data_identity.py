"""Identity of a source: a text that checkpoints compare, and a table of its files, to name those that have changed."""

import json
import os.path
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torchtrain.files import printable

MAX_FILES = 10_000  # in the table of a source: the first ones in its order
MAX_NAMES = 5  # files of a kind of change that a message names
HASH_DIGITS = 12  # of the hash of a file


@dataclass(frozen=True)
class DataFile:
    """An entry of the table."""

    name: str
    """Path or URL, as the config gives it."""
    size: int
    hash: str = ""
    """Hash of its format, size and content (of a large file only parts of it), or of its ETag; "" if unknown."""
    content: str = ""
    """Hash of all content of a large file, if it was computed."""

    def has_content_of(self, other: "DataFile") -> bool:
        """Whether both files are equal in what is known of both."""
        pairs = (self.hash, other.hash), (self.content, other.content)
        return self.size == other.size and all(a == b for a, b in pairs if a and b)


@dataclass(frozen=True)
class FileTable:
    """The files of a source in their order."""

    files: Sequence[DataFile] = ()
    """The first ``MAX_FILES`` of them."""
    count: int = 0
    """Number of all files."""

    @staticmethod
    def of(files: Iterable[DataFile], count: int) -> "FileTable":
        return FileTable(tuple(islice(files, MAX_FILES)), count)

    @property
    def folder(self) -> str:
        """The start of all names, which is a folder with a slash at its end, or empty."""
        # Not commonpath, which would make s3:/ of s3://. The last slash is within the characters that all names share.
        prefix = os.path.commonprefix([file.name for file in self.files])  # noqa: RUF071
        return prefix[: prefix.rfind("/") + 1]

    def by_name(self, folder: str = "") -> dict[str, DataFile]:
        """The files by their names without ``folder``, with which all of them begin."""
        return {file.name[len(folder) :]: file for file in self.files}


@dataclass(frozen=True)
class Identity:
    """The identity of a source."""

    text: str
    """As ``DataSource.identity`` returns it."""
    files: FileTable = FileTable()


def as_json(tables: Sequence[FileTable]) -> bytes:
    """The tables of several sources; ``from_json`` reads them."""
    content = [
        {
            "folder": table.folder,
            "count": table.count,
            "files": [[name, file.size, file.hash, file.content] for name, file in table.by_name(table.folder).items()],
        }
        for table in tables
    ]
    return json.dumps(content, separators=(",", ":")).encode()


def from_json(content: Any) -> list[FileTable]:
    """The tables in the parsed JSON that ``as_json`` has written.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: ``content`` is something else.
    """
    tables = []
    for table in content:
        if len(table["files"]) > MAX_FILES:
            raise ValueError(f"a table of more than {MAX_FILES:,} files")
        files = [DataFile(str(table["folder"]) + name, size, *hashes) for name, size, *hashes in table["files"]]
        if not all(type(file.size) is int and isinstance(file.hash + file.content, str) for file in files):
            raise ValueError("a file without a size or a hash")
        tables.append(FileTable(files, int(table["count"])))
    return tables


def describe_changes(before: FileTable, now: FileTable) -> str:
    """The files that were added, removed, changed, renamed or reordered; "" if both tables state the same.

    Files in another folder have the same names from that folder on.
    """
    if not before.files or not now.files:
        return ""
    old, new = before.by_name(), now.by_name()
    if not old.keys() & new.keys():
        old, new = before.by_name(before.folder), now.by_name(now.folder)
    is_complete = all(len(table.files) == table.count for table in (before, now))
    if not is_complete:  # a file that is missing at the end of one table may be one of those that it does not name
        old, new = _up_to_last_common(old, new), _up_to_last_common(new, old)
    renamed = _renamed(old, new)
    changed = [name for name in new if name in old and not new[name].has_content_of(old[name])]
    kinds = {
        "added": [name for name in new if name not in old and name not in renamed.values()],
        "removed": [name for name in old if name not in new and name not in renamed],
        "changed": changed,
        "renamed": [f"{name} to {renamed[name]}" for name in old if name in renamed],
    }
    found = [f"{kind}: {shortened(names)}" for kind, names in kinds.items() if names]
    order_before = [renamed.get(name, name) for name in old if name in new or name in renamed]
    kept = set(order_before)
    order_now = [name for name in new if name in kept]
    moved = [pair for pair in zip(order_now, order_before, strict=True) if pair[0] != pair[1]]
    if moved:
        found.append("in another order from {} on (in the checkpoint {})".format(*map(printable, moved[0])))
    return "; ".join(found)


def shortened(names: Sequence[str]) -> str:
    """The first ``MAX_NAMES`` of ``names``, and the number of the others."""
    first = ", ".join(map(printable, names[:MAX_NAMES]))
    others = len(names) - MAX_NAMES
    return f"{first} and {others:,} other{'s' if others > 1 else ''}" if others > 0 else first


def _up_to_last_common(files: dict[str, DataFile], others: dict[str, DataFile]) -> dict[str, DataFile]:
    last = max((number for number, name in enumerate(files) if name in others), default=-1)
    return dict(islice(files.items(), last + 1))


def _renamed(old: dict[str, DataFile], new: dict[str, DataFile]) -> dict[str, str]:
    """New names by old ones, of files whose content is known to be the same."""
    found: dict[str, str] = {}
    by_hash: dict[str, list[str]] = {}
    for name, file in old.items():
        if file.hash and name not in new:
            by_hash.setdefault(file.hash, []).append(name)
    for name, file in new.items():
        candidates = by_hash.get(file.hash, [])
        if name not in old and candidates and file.has_content_of(old[candidates[0]]):
            found[candidates.pop(0)] = name
    return found
