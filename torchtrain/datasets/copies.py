"""Converted copies of text, in a cache, each with a record beside it: what it was made from, and its hash."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import datasets

from torchtrain.files import MISSING, atomic_write, hash_of, read_file, with_retries


@dataclass(frozen=True)
class Record:
    """What is known of a copy since it was written."""

    source: str
    """The identity of what it was made from."""
    bytes: int
    hash: str
    """Of the copy; "" where it was too large to be hashed."""
    text_bytes: int = 0
    """Size of its documents, in UTF-8."""
    malformed: int = 0
    """Malformed lines of the source, which were skipped."""
    first_malformed: str = ""
    """File and place of the first of them."""
    not_utf8: tuple[str, ...] = ()
    """Files of the source that were skipped because they are not UTF-8."""

    @staticmethod
    def read(copy: Path) -> "Record | None":
        """The record beside ``copy``; None where there is none, or a damaged one."""
        try:
            content = json.loads(read_file(_beside(copy)))
            return Record(**{**content, "not_utf8": tuple(content["not_utf8"])})
        except (*MISSING, ValueError, TypeError, KeyError):
            return None

    def write(self, copy: Path) -> None:
        with atomic_write(_beside(copy), flush=True) as file:
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())

    def fits(self, copy: Path, verify_bytes: float) -> bool:
        """Whether ``copy`` is as it was written: by its size, and up to ``verify_bytes`` by its hash."""
        try:
            if with_retries(copy.stat, copy).st_size != self.bytes:
                return False
            hashed = self.hash and self.bytes <= verify_bytes
            return not hashed or with_retries(partial(hash_of, copy), copy) == self.hash
        except MISSING:
            return False


def copies_folder() -> Path:
    """Where torchtrain keeps its copies."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "torchtrain"


def _beside(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.json")
