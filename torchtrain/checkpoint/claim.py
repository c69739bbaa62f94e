"""Only the newest start of a run may write its checkpoints.

Where a network splits, or a job is started twice, two starts (incarnations) of one run are alive at once. Each takes
the next generation number, and checks that it is still the newest before a checkpoint gets its final name.
"""

import json
import os
import shutil
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtrain.checkpoint.storage import PARTIAL_SUFFIX
from torchtrain.errors import CheckpointError, StorageError, SupersededError
from torchtrain.reading import MAY_PASS, MISSING, names_in, read_file

FILE = "generation.json"
BEING_WRITTEN_SECONDS = 60  # another start may be writing a temporary file younger than this


@dataclass(frozen=True)
class Claim:
    """A process that saves the checkpoints of a run; made by ``take``, on one rank. By default of nobody."""

    generation: int = 0
    id: str = ""
    """Two that start at once take the same generation: the last to write is the newest."""
    run: str = ""
    """Id of the run: the same through all its starts."""
    host: str = "?"
    process: int | str = "?"
    since: str = "?"

    @classmethod
    def take(cls, folder: Path, run: str | None) -> "Claim":
        """Become the newest incarnation of the run that saves in ``folder``. ``run``: its id, if checkpoints have it.

        Raises:
            CheckpointError: the file cannot be written.
            StorageError: the file system fails.
        """
        _remove_left_overs(folder)  # first: they may be what fills the disk
        before = read_claim(folder)
        claim = cls(
            before.generation + 1,
            uuid.uuid4().hex,
            run or before.run or uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        claim._write(folder)
        return claim

    def check(self, folder: Path) -> None:
        """Raise SupersededError if another incarnation has started since; StorageError where that cannot be known."""
        newest = read_claim(folder)
        if not newest.id:
            self._write(folder)  # nobody has claimed the folder since the file was lost
        elif newest.id != self.id:
            raise SupersededError(
                f"generation {newest.generation} of this run, on {newest.host} (process {newest.process}) since "
                f"{newest.since}, now saves in {folder}; this one, generation {self.generation}, stops. To train "
                "beside it, take another job.dump_folder"
            )

    def _write(self, folder: Path) -> None:
        written = folder / f"{FILE}.{self.id}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(asdict(self)), encoding="utf-8")
            written.replace(folder / FILE)
        except OSError as error:
            with suppress(OSError):
                written.unlink(missing_ok=True)
            if error.errno in MAY_PASS:
                raise StorageError(
                    f"{folder / FILE} cannot be written: {error.strerror}. Start again when the file system answers"
                ) from error
            raise CheckpointError(
                f"{folder / FILE} cannot be written ({error.strerror}), and so no checkpoint: make room or let this "
                "user write there, or take another job.dump_folder"
            ) from error


def _remove_left_overs(folder: Path) -> None:
    """Remove what earlier starts were writing when they were killed. One of them may still be alive, and writing."""
    for name in names_in(folder):
        path = folder / name
        if name.startswith("step-") and name.endswith(PARTIAL_SUFFIX):
            shutil.rmtree(path, ignore_errors=True)
        elif name.startswith(f"{FILE}."):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > BEING_WRITTEN_SECONDS:
                    path.unlink()


def read_claim(folder: Path) -> Claim:
    """What the newest incarnation has written; an empty claim where there is nothing, or nothing of ours."""
    try:
        claim = Claim(**json.loads(read_file(folder / FILE)))
    except (*MISSING, ValueError, TypeError):
        return Claim()
    return claim if isinstance(claim.generation, int) else Claim()
