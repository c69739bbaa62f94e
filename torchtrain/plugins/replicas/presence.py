"""Which replicas of a run live, by notes beside its checkpoints: a lighthouse that was restarted does not know it.

A replica that has the state of the run stores a note every ``BEAT_SECONDS``, each with another content. One whose note
has not changed for ``DEAD_SECONDS`` does not live; clocks of different machines are not compared. A process that starts
reads the notes first when it starts, so that it rarely has to wait when it is ready to train.

A note also has the number of the newest beginning of the run that its replica knows (``ReplicaGroup.progress``), and
stays when its process has ended, so that the next beginning gets a higher number.
"""

import json
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace

from torchtrain.checkpoint.storage import CheckpointStorage
from torchtrain.files import json_object
from torchtrain.logging import BestEffort
from torchtrain.plugins.replicas.group import BEGINNINGS

BEAT_SECONDS = 2.0
DEAD_SECONDS = 10.0  # of several beats: a busy machine or a storage may delay some


@dataclass(frozen=True)
class Note:
    """What a process of a replica tells those that start."""

    id: str
    """``replicas.id``"""
    process: int
    """Higher for a process of the replica that has started later."""
    host: str = ""
    stage: int = 0
    """The number of the stage of the run."""
    beginning: int = 0
    """The newest beginning of the run that it knows."""
    lives: bool = False
    """Whether it has the state of the run; False again when it has ended."""
    beats: int = 0

    @staticmethod
    def of(content: bytes) -> "Note | None":
        """The note with this ``content``; None if it is not one, or not complete."""
        try:
            note = Note(**(json_object(content) or {}))
        except TypeError:
            return None
        bounds = ((note.process, 1 << 62), (note.stage, 1 << 8), (note.beginning, BEGINNINGS))
        return note if all(isinstance(number, int) and 0 <= number < end for number, end in bounds) else None


class Presence:
    """The notes of a run in ``storage``, and that of this process. On rank 0 of a replica.

    Attributes:
        process: see ``Note``.
        beginning: the newest beginning of the run in any note.
    """

    def __init__(self, storage: CheckpointStorage, own_id: str, stage: int) -> None:
        self.storage = storage
        self._seen: dict[str, tuple[bytes, float]] = {}  # by name, the content, and when it was first read
        self._notes: dict[str, Note] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._best_effort = BestEffort("the note that this replica lives")
        self.beginning = self.process = 0
        self._own_id, self._stage = own_id, stage
        self.others()
        earlier = [note.process for note in self._notes.values() if note.id == own_id]
        self.process = max([time.time_ns(), *(number + 1 for number in earlier)])
        self._note = Note(own_id, self.process, socket.gethostname(), stage)

    def others(self) -> list[str]:
        """The replicas, by ``replicas.id``, that have the state of this or a later stage of the run and live, or may.

        Raises:
            StorageError: the notes cannot be read.
        """
        now = time.monotonic()
        for name, content in self.storage.read_notes().items():
            note = Note.of(content)
            if note is not None and (name not in self._seen or self._seen[name][0] != content):
                self._seen[name], self._notes[name] = (content, now), note
                self.beginning = max(self.beginning, note.beginning)
        return sorted(
            note.id
            for name, note in self._notes.items()
            if note.lives
            and note.stage >= self._stage
            and (note.id, note.process) != (self._own_id, self.process)
            and now - self._seen[name][1] < DEAD_SECONDS
        )

    def begin(self, beginning: int) -> None:
        """Tell from now on that this replica has the state of the run.

        Raises:
            StorageError: the note cannot be written.
        """
        self.beginning = max(beginning, self.beginning)
        self._write(lives=True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="presence", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Tell that this replica has ended."""
        if self._thread is not None and not self._ended.is_set():
            self._ended.set()
            self._thread.join(BEAT_SECONDS)  # so that it writes no other note later, unless the storage hangs
            with self._best_effort:
                self._write(lives=False)

    def _write(self, *, lives: bool) -> None:
        self._note = replace(self._note, beginning=self.beginning, lives=lives, beats=self._note.beats + 1)
        name = f"{self._note.id}.{self.process}"
        self.storage.write_note(name, json.dumps(asdict(self._note)).encode())

    def _beat(self) -> None:
        started, has_cleaned = time.monotonic(), False
        while not self._ended.wait(BEAT_SECONDS):
            with self._best_effort:
                self._write(lives=True)
            if not has_cleaned and time.monotonic() - started > DEAD_SECONDS:
                has_cleaned = True
                with self._best_effort:
                    self._delete_earlier()

    def _delete_earlier(self) -> None:
        """Delete the notes of earlier processes of this replica that do not live. This one knows their beginning."""
        living = set(self.others())
        for name, note in self._notes.items():
            if note.id == self._own_id and note.process < self.process and note.id not in living:
                self.storage.delete_note(name)
