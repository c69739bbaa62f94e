"""The run's files: those of the replica that leads, so that several replicas write one curve."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtrain.files import json_object
from torchtrain.logging import BestEffort
from torchtrain.metrics.writers import Writers, rename_files_of_other_run

METRICS = "metrics.jsonl"
CONFIG = "config.toml"


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
        self._received, self._received_at = b"", 0
        self._begun = self._read = 0  # the lines of this process begin here; up to there they are copied
        self._leads = False
        self._size = 0  # of the metrics of the run, as this replica has last read or written them
        self._known: set[tuple[Any, ...]] = set()  # lines of the run before this replica has begun to lead
        self._newest: dict[frozenset[str], int] = {}  # step of the last line of numbers, by their names
        self._best_effort = BestEffort(f"the metrics in {run_folder}")

    def begin_run(self, run: str, resumed: bool) -> None:
        """This replica begins the run, or resumes it from a checkpoint: its event "start" is that of the run."""
        with self._best_effort:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            rename_files_of_other_run(self.run_folder, run, resumed)
            self._restore()
            self._size = self._size_of_run()
            self._leads = True

    def begin_process(self) -> None:
        """Called before this process writes its first line."""
        file = self.own_folder / METRICS
        self._begun = self._read = file.stat().st_size if file.exists() else 0

    def receive(self, lines: bytes) -> None:
        """Keep the ``lines_after`` of the replica whose state this one has taken: it may have to write them."""
        file = self.own_folder / METRICS
        self._received, self._received_at = lines, file.stat().st_size if file.exists() else 0

    def lines_after(self, step: int) -> bytes:
        """The lines of this replica of later steps, for one that joins, and may have to write them."""
        with self._best_effort:
            lines = parsed(self._own_and_received())
            of_steps = surviving(line for line in lines if line.get("event") != "start")
            later = [
                line
                for line in of_steps
                if line["step"] > step or (line["step"] == step and line.get("event") == "rolled_back")
            ]
            return b"".join(json.dumps(line).encode() + b"\n" for line in later)
        return b""

    def update(self, leads: bool) -> None:
        """Copy the lines written since the last call, if this replica leads.

        When it begins to lead, it adds those that the replica before it has not written any more.
        """
        with self._best_effort:
            if not leads:
                self._close_writers()
            elif not self._leads:
                self._restore()
                content = _content(self.run_folder / METRICS)
                self._size = len(content)
                all_of_run = list(parsed(content))
                of_run = surviving(all_of_run)
                self._known = {_key(line) for line in of_run}
                self._newest = {frozenset(line): line["step"] for line in of_run if "event" not in line}
                self._writers = self._open_writers(of_run[-1]["step"] if of_run else 0)
                lines = list(parsed(self._own_and_received()))
                self._read = self._begun + len(self._own_content(self._begun))
                in_run, in_own = (Counter(line["step"] for line in of if _undoes(line)) for of in (all_of_run, lines))
                # Of a replica that takes over, its own start is none of the run.
                survive = surviving(line for line in lines if not of_run or line.get("event") != "start")
                leads = self._write(
                    line for line in survive if not _undoes(line) or in_own[line["step"]] > in_run[line["step"]]
                )
            self._leads = leads
            if leads:
                self._leads = self._copy_own_lines()
                if not (self.run_folder / CONFIG).exists():
                    self._copy_config()

    def end(self) -> None:
        """Copy what is left, at the end of training."""
        with self._best_effort:
            if self._leads:
                self._copy_own_lines()
                self._copy_config()
            self._close_writers()

    def _close_writers(self) -> None:
        if self._writers is not None:
            self._writers.close()
            self._writers = None

    def _copy_config(self) -> None:
        if (self.own_folder / CONFIG).exists():
            shutil.copyfile(self.own_folder / CONFIG, self.run_folder / CONFIG)

    def _own_content(self, begin: int) -> bytes:
        """The complete lines of this replica from the byte ``begin`` on."""
        content = _content(self.own_folder / METRICS, begin)
        return content[: content.rfind(b"\n") + 1]

    def _own_and_received(self) -> bytes:
        """The lines of this process, and those received, in the order of time."""
        own, before = self._own_content(self._begun), max(0, self._received_at - self._begun)
        return own[:before] + self._received + own[before:]

    def _copy_own_lines(self) -> bool:
        content = self._own_content(self._read)
        self._read += len(content)
        return self._write(parsed(content))

    def _write(self, lines: Iterable[dict[str, Any]]) -> bool:
        """Write those of ``lines`` that the run does not have.

        Returns False if another replica writes to the same file: this one was suspended here, and the others have taken
        it for dead. The lines that are left are written by the next ``update``, if this replica leads then.
        """
        for line in lines:
            # Another process of this replica, which it has replaced, may have written a line late.
            is_late = "event" not in line and line["step"] <= self._newest.get(frozenset(line), -1)
            if not _undoes(line) and (is_late or _key(line) in self._known):
                continue
            if self._writers is None:  # of a replica that begins the run
                self._writers = self._open_writers(line["step"])
            if self._size_of_run() != self._size:
                self._close_writers()
                return False
            if _undoes(line):
                self._known = {key for key in self._known if key[0] <= line["step"]}
                self._newest = {names: min(step, line["step"]) for names, step in self._newest.items()}
                self._writers.undo(line["step"])
            else:
                self._writers.write(line)
                if "event" not in line:
                    self._newest[frozenset(line)] = line["step"]
            self._size = self._size_of_run()
        return True

    def _size_of_run(self) -> int:
        """The size of the metrics of the run; if it cannot be read, the last one."""
        try:
            with (self.run_folder / METRICS).open("rb") as opened:  # without this, NFS may return an old size
                return opened.seek(0, os.SEEK_END)
        except FileNotFoundError:
            return 0
        except OSError:
            return self._size


def _content(file: Path, begin: int = 0) -> bytes:
    if not file.exists():
        return b""
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read()


def _undoes(line: dict[str, Any]) -> bool:
    return line.get("event") == "rolled_back"


def parsed(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines of metrics in ``content``, but for those that a kill has cut short."""
    for text in content.splitlines():
        line = json_object(text)
        if line is not None and isinstance(line.get("step"), int):
            yield line


def surviving(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``lines`` that count, each once: those before a start or a rollback, beyond its step, do not."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if line.get("event") in ("start", "rolled_back"):
            found = {key: earlier for key, earlier in found.items() if earlier["step"] <= line["step"]}
        found.setdefault(_key(line), line)
    return list(found.values())


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    """What a line is about: its step, and its event or the names of its numbers."""
    return line["step"], line.get("event") or frozenset(line), line.get("replica")
