"""The documents that training leaves out: ``data.exclude``."""

import re
from pathlib import Path
from typing import Any

import xxhash

from torchtrain.datasets.data_source import Exclusions, Place, utf8
from torchtrain.errors import DataError
from torchtrain.files import MISSING, parse_json, read_file

MAX_LIST_BYTES = 2**34  # of the list; a line has about 100 bytes
KEYS = ("text_hash", "file", "position")
TEXT_HASH = re.compile("[0-9a-f]{32}")


def text_hash(text: str) -> str:
    """XXH3 of 128 bits of ``text`` in UTF-8, by which a document is named wherever it is stored."""
    return xxhash.xxh3_128_hexdigest(utf8(text))


def read_exclusions(path: str) -> Exclusions:
    """Read a list of documents, each an object of JSON on a line of its own, as ``torchtrain.explain`` writes them.

    A document is named by ``text_hash`` or, in prepared data, by ``file`` and ``position``; other keys are ignored.

    Raises:
        DataError: the file is missing, or a line is not such an object.
    """
    name = f"data.exclude = {path!r}"
    try:
        lines = read_file(Path(path), DataError, MAX_LIST_BYTES).decode(errors="replace").splitlines()
    except MISSING as error:
        raise DataError(f"{name} is not a file: give a list of documents, or leave it out") from error
    texts, places = set(), set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        document = parse_json(line, f"{name}, line {number}", DataError)
        hashed, file, position = _values(document)
        if TEXT_HASH.fullmatch(hashed):
            texts.add(hashed)
        elif file and position and not hashed:
            places.add(Place(file, position))
        else:
            raise DataError(
                f"{name}, line {number}: {line[:80]!r} is no document, an object with a text_hash of 32 digits or, "
                "for prepared data, a file and a position: torchtrain.explain writes such lines with --exclude-to"
            )
    # Not the folder of prepared data, which may move.
    content = repr((sorted(texts), sorted((Path(place.file).name, place.position) for place in places)))
    identity = f"{len(texts) + len(places):,} documents, hash {xxhash.xxh3_64_hexdigest(content.encode())}"
    return Exclusions(frozenset(texts), frozenset(places), identity)


def _values(document: Any) -> tuple[str, ...]:
    """The value of each of ``KEYS``; "" if it is missing or no text."""
    values = [document.get(key) if isinstance(document, dict) else None for key in KEYS]
    return tuple(value if isinstance(value, str) else "" for value in values)
