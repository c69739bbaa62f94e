"""Only the newest start of a run may write its checkpoints.

Where a network splits, or a job is started twice, two starts (incarnations) of one run are alive at once. Each takes
the next generation number, and checks that it is still the newest before a checkpoint gets its final name.
"""

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtrain.errors import CheckpointError, SupersededError
from torchtrain.reading import MISSING, names_in, read_file

FILE = "generation.json"
BEING_WRITTEN_SECONDS = 60  # another start may be writing a temporary file younger than this


class Claim:
    """This process's generation in ``folder``; made by ``take``, on one rank."""

    def __init__(self, folder: Path, owner: dict[str, str | int]):
        self.folder = folder
        self.owner = owner

    @property
    def generation(self) -> int:
        return int(self.owner["generation"])

    @property
    def run(self) -> str:
        """Id of the run that saves in the folder: the same through all its starts."""
        return str(self.owner["run"])

    @classmethod
    def take(cls, folder: Path, run: str | None) -> "Claim":
        """Become the newest incarnation of the run that saves in ``folder``. ``run``: its id, if checkpoints have it.

        Raises:
            CheckpointError: the file cannot be written.
        """
        before = _read(folder)
        owner: dict[str, str | int] = {
            "run": run or before.get("run") or uuid.uuid4().hex,
            "generation": before.get("generation", 0) + 1,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "id": uuid.uuid4().hex,  # two that start at once take the same generation: the last to write is the newest
        }
        claim = cls(folder, owner)
        claim._write()
        return claim

    def check(self) -> None:
        """Raise SupersededError if another incarnation has started since; StorageError where that cannot be known."""
        newest = _read(self.folder)
        if not newest:
            self._write()  # nobody has claimed the folder since the file was lost
        elif newest["id"] != self.owner["id"]:
            raise SupersededError(
                f"generation {newest['generation']} of this run, on {newest.get('host', '?')} (process "
                f"{newest.get('process', '?')}) since {newest.get('since', '?')}, now saves in {self.folder}; this "
                f"one, generation {self.generation}, stops. To train beside it, take another job.dump_folder"
            )

    def _write(self) -> None:
        written = self.folder / f"{FILE}.{self.owner['id']}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(self.owner), encoding="utf-8")
            written.replace(self.folder / FILE)
        except OSError as error:
            with suppress(OSError):
                written.unlink(missing_ok=True)
            raise CheckpointError(
                f"{self.folder / FILE} cannot be written ({error.strerror}), and so no checkpoint: make room or let "
                "this user write there, or take another job.dump_folder"
            ) from error


def known_run(folder: Path) -> str | None:
    """Id of the run that saves in ``folder``; None where it is not known."""
    run: str | None = _read(folder).get("run")
    return run


def remove_left_overs(folder: Path) -> None:
    """Remove the temporary files of starts that were killed while they wrote."""
    for name in names_in(folder):
        if name.startswith(f"{FILE}."):
            with suppress(OSError):
                if time.time() - (folder / name).stat().st_mtime > BEING_WRITTEN_SECONDS:
                    (folder / name).unlink()


def _read(folder: Path) -> dict[str, Any]:
    """What the newest incarnation has written; empty where there is nothing, or nothing of ours."""
    try:
        content = json.loads(read_file(folder / FILE))
    except (*MISSING, ValueError):
        return {}
    known = isinstance(content, dict) and isinstance(content.get("generation"), int) and "id" in content
    return content if known else {}
