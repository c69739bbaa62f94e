"""Which incarnation of a run may write its checkpoints: the newest.

Where a network splits, or a job is started twice, two incarnations of one run are alive at once. Each takes the next
generation number when it starts, and looks whether it is still the newest before a checkpoint gets its final name.
"""

import json
import os
import socket
import time
import uuid
from pathlib import Path

from torchtrain.errors import SupersededError

FILE = "generation.json"


class Claim:
    """This process's generation in ``folder``; made by ``take``, on one rank."""

    def __init__(self, folder: Path, owner: dict[str, str | int]):
        self.folder = folder
        self.owner = owner

    @property
    def generation(self) -> int:
        return int(self.owner["generation"])

    @classmethod
    def take(cls, folder: Path) -> "Claim":
        """Become the newest incarnation of the run that saves in ``folder``."""
        before = _read(folder)
        owner: dict[str, str | int] = {
            "generation": int(before.get("generation", 0)) + 1,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "id": uuid.uuid4().hex,  # of two that start in the same moment, one is last
        }
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{FILE}.{owner['id']}"
        written.write_text(json.dumps(owner), encoding="utf-8")
        written.replace(folder / FILE)
        return cls(folder, owner)

    def check(self) -> None:
        """Raise SupersededError if another incarnation has started since."""
        newest = _read(self.folder)
        if newest.get("id") != self.owner["id"]:
            raise SupersededError(
                f"generation {newest.get('generation', '?')} of this run, on {newest.get('host', '?')} (process "
                f"{newest.get('process', '?')}) since {newest.get('since', '?')}, now saves in {self.folder}; this "
                f"one, generation {self.generation}, stops. To train beside it, take another job.dump_folder"
            )


def _read(folder: Path) -> dict[str, str | int]:
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
