"""The documents that training leaves out: ``data.exclude``."""

import re
from pathlib import Path

import xxhash

from torchtrain.datasets.data_source import Exclusions
from torchtrain.errors import DataError
from torchtrain.files import MISSING, parse_json, read_file

MAX_LIST_BYTES = 2**34  # of the list; a line has about 100 bytes
TEXT_HASH = re.compile("[0-9a-f]{32}")


def read_exclusions(path: str) -> Exclusions:
    """Read a list of documents, each an object of JSON on a line of its own, as ``torchtrain.explain`` writes them.

    A document is named by its ``text_hash``; other keys are ignored.

    Raises:
        DataError: the file is missing, or a line is not such an object.
    """
    name = f"data.exclude = {path!r}"
    try:
        lines = read_file(Path(path), DataError, MAX_LIST_BYTES).decode(errors="replace").split("\n")
    except MISSING as error:
        raise DataError(f"{name} is not a file: give a list of documents, or leave it out") from error
    texts = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        document = parse_json(line, f"{name}, line {number}", DataError)
        hashed = document.get("text_hash") if isinstance(document, dict) else None
        if not isinstance(hashed, str) or not TEXT_HASH.fullmatch(hashed):
            raise DataError(
                f"{name}, line {number}: {line[:80]!r} is no document, an object with a text_hash of 32 digits: "
                "torchtrain.explain writes such lines with --exclude_to"
            )
        texts.add(hashed)
    identity = f"{len(texts):,} documents, hash {xxhash.xxh3_64_hexdigest(repr(sorted(texts)).encode())}"
    return Exclusions(frozenset(texts), identity)
