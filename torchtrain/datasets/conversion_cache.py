"""Cache of converted copies of text files. A record beside each copy has the identity of its source and its hash."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torchtrain.files import MISSING, atomic_write, hash_of, json_object, read_file, with_retries


@dataclass(frozen=True)
class Record:
    """Metadata of a converted copy, written after the copy."""

    source: str
    """The identity of the files that were converted."""
    bytes: int
    hash: str
    """XXH3-128 of the copy; "" if it was too large to be hashed."""
    text_bytes: int = 0
    """Total size of its documents in UTF-8."""
    malformed: int = 0
    """Number of malformed lines of the source that were skipped."""
    first_malformed: str = ""
    """File and location of the first malformed line."""
    not_utf8: tuple[str, ...] = ()
    """Files of the source that were skipped because they are not UTF-8."""

    @staticmethod
    def read(copy: Path) -> "Record | None":
        """The record beside ``copy``; None if it is missing or damaged."""
        try:
            content = json_object(read_file(_beside(copy))) or {}
            return Record(**{**content, "not_utf8": tuple(content["not_utf8"])})
        except (*MISSING, ValueError, TypeError, KeyError):
            return None

    def write(self, copy: Path) -> None:
        with atomic_write(_beside(copy), flush=True) as file:
            file.write((json.dumps(asdict(self), indent=1) + "\n").encode())

    def fits(self, copy: Path, verify_bytes: float) -> bool:
        """Whether ``copy`` is intact: compares its size, and up to ``verify_bytes`` its hash."""
        try:
            if with_retries(copy.stat, copy).st_size != self.bytes:
                return False
            hashed = self.hash and self.bytes <= verify_bytes
            return not hashed or with_retries(partial(hash_of, copy), copy) == self.hash
        except MISSING:
            return False


def copies_folder() -> Path:
    """The folder of the cache."""
    import datasets  # takes a second

    return Path(datasets.config.HF_DATASETS_CACHE) / "torchtrain"


def _beside(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.json")
