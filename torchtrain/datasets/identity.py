"""A text that identifies data by their content, so that a run that resumes notices other data.

Neither the folder nor the time of writing counts.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import xxhash

from torchtrain.reading import patiently

WHOLE_BYTES = 1 << 20  # up to this size a file is read whole
BLOCK_BYTES = 1 << 16  # else three blocks of it


def identity_of_files(files: Sequence[Path], whole: bool = False) -> str:
    """Number and size of ``files``, and a hash of their names, sizes and content.

    Of files above ``WHOLE_BYTES`` three blocks stand for the content, unless ``whole``.
    """
    digest, total = xxhash.xxh3_128(), 0
    for path in files:
        size, digest = patiently(partial(_with_file, digest, path, whole), path)
        total += size
    return f"{len(files)} file(s) of {total:,} bytes, hash {digest.hexdigest()[:16]}"


def _with_file(before: xxhash.xxh3_128, path: Path, whole: bool) -> tuple[int, xxhash.xxh3_128]:
    """Size of a file, and the digest ``before`` with what ``identity_of_files`` takes of it."""
    digest = before.copy()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        digest.update(f"{path.name}\0{size}\0".encode())
        parts = (0, (size - BLOCK_BYTES) // 2, size - BLOCK_BYTES)
        for start in range(0, size, BLOCK_BYTES) if whole or size <= WHOLE_BYTES else parts:
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return size, digest


def identity_of_names(names: Sequence[str]) -> str:
    """For files of the hub, whose names hold the revision."""
    digest = xxhash.xxh3_128_hexdigest("\0".join(names).encode())
    return f"{len(names)} file(s), hash of their names {digest[:16]}"
