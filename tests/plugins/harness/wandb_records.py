"""Read what Weights & Biases writes in its offline mode."""

import struct
from collections.abc import Iterator


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, a log as that of LevelDB: pieces with a header of 7 bytes, in blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
