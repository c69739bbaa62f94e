"""The run's files: those of the replica that leads, so that several replicas write one curve."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtrain.files import json_object
from torchtrain.logging import BestEffort
from torchtrain.metrics.writers import Writers, rename_files_of_other_run

METRICS = "metrics.jsonl"
CONFIG = "config.toml"
COPIED = (CONFIG, "report.md", "curves.png")


class RunFiles:
    """Copies what this replica has written to its own folder into the folder of the run, while it leads.

    The lines of metrics go to all writers of the run, such as TensorBoard.

    Args:
        run_folder: ``job.dump_folder`` of the run.
        own_folder: that of this replica.
        open_writers: opens the writers of the run in ``run_folder``, given the step up to which it has lines.
        restore: adds the metrics in the newest checkpoint to those in ``run_folder``, which another replica may have
            written to another disk.
    """

    def __init__(
        self,
        run_folder: Path,
        own_folder: Path,
        open_writers: Callable[[int], Writers],
        restore: Callable[[], None],
    ) -> None:
        self.run_folder, self.own_folder = run_folder, own_folder
        self._open_writers, self._restore = open_writers, restore
        self._writers: Writers | None = None
        self.received = b""
        """The ``lines_after`` of the replica whose state this one has taken."""
        self._read = (own_folder / METRICS).stat().st_size if (own_folder / METRICS).exists() else 0
        self._begun = self._read  # the lines of this process begin here
        self._leads = False
        self._known: set[tuple[Any, ...]] = set()
        self._best_effort = BestEffort(f"the metrics in {run_folder}")

    def begin_run(self, run: str, resumed: bool) -> None:
        """This replica begins the run, or resumes it from a checkpoint: its event "start" is that of the run."""
        with self._best_effort:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            rename_files_of_other_run(self.run_folder, run, resumed)
            self._restore()
            self._leads = True

    def lines_after(self, step: int) -> bytes:
        """The lines of this replica of later steps, for one that joins, and may have to write them."""
        lines: list[bytes] = []
        with self._best_effort:
            for text in (self.received + (self.own_folder / METRICS).read_bytes()).splitlines(keepends=True):
                line = json_object(text)
                if line is not None and line["step"] > step and line.get("event") != "start":
                    lines.append(text)
        return b"".join(lines)

    def update(self, leads: bool) -> None:
        """Copy the lines written since the last call, if this replica leads.

        When it begins to lead, it adds those that the replica before it has not written any more.
        """
        with self._best_effort:
            if leads and not self._leads:
                self._restore()
                lines = _lines(self.run_folder / METRICS)
                self._known = {_key(line) for line in lines}
                self._read = self._begun
                self._writers = self._open_writers(lines[-1]["step"] if lines else 0)
                self._copy_lines(self.received)
            if not leads:
                self._close_writers()
            self._leads = leads
            if leads:
                self._copy_own_lines()
                if not (self.run_folder / CONFIG).exists():
                    self._copy(CONFIG)

    def end(self) -> None:
        """Copy the other files, at the end of training."""
        with self._best_effort:
            if self._leads:
                self._copy_own_lines()
                for name in COPIED:
                    self._copy(name)
            self._close_writers()

    def _close_writers(self) -> None:
        if self._writers is not None:
            self._writers.close()
            self._writers = None

    def _copy(self, name: str) -> None:
        if (self.own_folder / name).exists():
            shutil.copyfile(self.own_folder / name, self.run_folder / name)

    def _copy_own_lines(self) -> None:
        file = self.own_folder / METRICS
        if not file.exists():
            return
        with file.open("rb") as opened:
            opened.seek(self._read)
            content = opened.read()
        content = content[: content.rfind(b"\n") + 1]
        self._read += len(content)
        self._copy_lines(content)

    def _copy_lines(self, content: bytes) -> None:
        """Write those of the lines in ``content`` that the run does not have."""
        for text in content.splitlines():
            line = json_object(text)
            if line is None:
                continue
            # Of a replica that takes over, its own start is none of the run.
            if self._known and (line.get("event") == "start" or _key(line) in self._known):
                continue
            if self._writers is None:  # of a replica that begins the run
                self._writers = self._open_writers(line["step"])
            if line.get("event") == "rolled_back":
                self._writers.undo(line["step"])
            else:
                self._writers.write(line)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of the run that count: those before a start or a rollback, beyond its step, do not."""
    lines: list[dict[str, Any]] = []
    for text in file.read_bytes().splitlines() if file.exists() else ():
        line = json_object(text)
        if line is None:  # cut short by a kill
            continue
        if line.get("event") in ("start", "rolled_back"):
            lines = [earlier for earlier in lines if earlier["step"] <= line["step"]]
        lines.append(line)
    return lines


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is about: its step, and its event or the names of its numbers."""
    return line["step"], line.get("event") or frozenset(line), line.get("replica")
