"""Reports on a step that takes too long: what each rank was doing, and who was waiting for whom."""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

from torchtrain.log import logger

# Ranks enter a step at slightly different times; give each the time to write down where it is.
COLLECT_SECONDS = 3
# How much longer than a step a collective must be allowed to take, for the report to be written before it fails.
REPORT_SECONDS = 6
# Files whose functions are collectives.
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", "torchtrain/distributed/process_group.py")
PACKAGE = Path(__file__).parent.parent


def enable_flight_recorder(folder: Path) -> None:
    """Let NCCL, when a collective times out, write the last ones of each rank to ``folder``. Before groups exist."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "flight-recorder-"))


class HangWatch:
    """While a step is under way longer than ``timeout_seconds``, writes ``folder/step-N-rank-R.txt`` on every rank.

    The file holds the Python stacks of all threads, under a line of JSON that says where the main thread is. A little
    later the lowest rank that could still write logs which ranks wait in a collective, which are elsewhere, and which
    said nothing. It only reports: the collective's own time-out, ``REPORT_SECONDS`` later, ends the process.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout_seconds: float) -> None:
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self._main = threading.main_thread().ident
        self._step: int | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Expect the body to be done within ``timeout_seconds``."""
        self._set(step)
        try:
            yield
        finally:
            self._set(None)

    def __enter__(self) -> "HangWatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _set(self, step: int | None) -> None:
        with self._changed:
            self._step = step
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                step = self._step
                changed = self._changed.wait(self.timeout_seconds if step is not None else None)
                if not changed and step is not None:
                    self._changed.release()
                    try:
                        self._report(step)
                    finally:
                        self._changed.acquire()
                    while self._step == step and not self._closed:
                        self._changed.wait()

    def _report(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self._file(step, self.rank)
        with own.with_suffix(".part").open("w") as file:
            frame = sys._current_frames().get(self._main or 0)
            file.write(json.dumps(_place(frame)) + "\n")
            file.flush()
            faulthandler.dump_traceback(file)
        own.with_suffix(".part").rename(own)
        time.sleep(COLLECT_SECONDS)
        places = {}
        for rank in range(self.world_size):
            path = self._file(step, rank)
            # An older one tells of an earlier attempt at this step.
            if path.exists() and path.stat().st_mtime > own.stat().st_mtime - self.timeout_seconds:
                places[rank] = json.loads(path.read_text().split("\n", 1)[0])
        if min(places) == self.rank:
            logger.error("%s", self._summary(step, places))

    def _file(self, step: int, rank: int) -> Path:
        return self.folder / f"step-{step}-rank-{rank}.txt"

    def _summary(self, step: int, places: dict[int, dict[str, str]]) -> str:
        """Who waits for whom, in a few lines."""
        groups: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            place = places.get(rank)
            if place is None:
                what = "say nothing: dead, stopped, or not in this step"
            elif place["collective"]:
                what = f"wait in {place['collective']} at {place['where']}"
            else:
                what = f"are at {place['where']}"
            groups.setdefault(what, []).append(rank)
        waiting = sorted(rank for rank, place in places.items() if place["collective"])
        awaited = sorted(set(range(self.world_size)) - set(waiting))
        lines = [f"step {step} takes more than {self.timeout_seconds:.0f} s; stacks of all ranks lie in {self.folder}"]
        lines += [f"  ranks {_ranges(ranks)} {what}" for what, ranks in groups.items()]
        if waiting and awaited:
            lines.append(f"  so ranks {_ranges(waiting)} are waiting for ranks {_ranges(awaited)}")
        return "\n".join(lines)


def _place(frame: FrameType | None) -> dict[str, str]:
    """Where a thread is: this package's innermost line, and the collective it has called there, or ''."""
    stack = traceback.extract_stack(frame)
    collective = next((entry.name for entry in stack if entry.filename.endswith(COLLECTIVES)), "")
    package = [entry for entry in stack if Path(entry.filename).is_relative_to(PACKAGE)]
    own = [entry for entry in package if not entry.filename.endswith(COLLECTIVES)]
    entry = own[-1] if own else stack[-1]
    return {"collective": collective, "where": f"{Path(entry.filename).name}:{entry.lineno} ({entry.name})"}


def _ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
