"""Reports on a step, or a save, that takes too long: what each rank was doing, and who was waiting for whom."""

import faulthandler
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torchtrain.distributed.process_group import all_reduce
from torchtrain.files import atomic_write
from torchtrain.logging import BestEffort, logger
from torchtrain.torch_internals import all_groups, flight_record

POLL_SECONDS = 0.25  # how much later than its time-out a hang may be noticed
# Ranks enter a step at slightly different times; give each the time to write down where it is.
COLLECT_SECONDS = 3
# A collective's time-out must be longer than a step's by this, so that the report is written before it fails.
REPORT_SECONDS = 6
# On a CPU a step may take minutes, which no option can know: later steps may take so many times as long as the first.
TIMES_FIRST_STEP = 3
# Files whose functions wait for other ranks: they show waits that the flight recorder does not know, as gloo's sends.
WAITING = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "distributed/pipelining/schedules.py",
    "distributed/pipelining/stage.py",
    "distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    "torchtrain/distributed/connections.py",
    "torchtrain/distributed/process_group.py",
    "torchtrain/distributed/agreement.py",
)
PACKAGE = str(Path(__file__).parent.parent) + os.sep


def enable_flight_recorder(folder: Path) -> None:
    """Let torch note the last collectives of each group, and NCCL write them to ``folder`` when one times out.

    Call it before groups exist. On a machine with GPUs it makes the folder, which NCCL would not.
    """
    if torch.cuda.is_available():
        with BestEffort(f"the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "flight-recorder-"))


@dataclass(frozen=True)
class Place:
    """Where a rank is. As JSON it is the first line of its report."""

    where: str
    """This package's innermost line in the main thread."""
    waits_in: str
    """The function in which the main thread waits for other ranks; '' where it does not."""
    pending: dict[str, list[Any]]
    """By group: the collective that is not done, its number in the group, and the group's ranks."""
    begun: dict[str, int]
    """By group: number of the last collective that this rank has begun."""
    doing: str
    """What else is under way on this rank, such as a save."""


@dataclass(eq=False)
class Watchdog(AbstractContextManager["Watchdog"]):
    """While something is under way longer than ``timeout_seconds``, writes ``folder/WHAT-rank-R.txt`` on every rank.

    The file holds the Python stacks of all threads, under a line of JSON that says where the rank is. Soon after, the
    lowest rank that could still write logs which ranks wait for which others. It only reports: the collective's own
    time-out, ``REPORT_SECONDS`` later, ends the process.
    """

    folder: Path
    rank: int
    world_size: int
    timeout_seconds: float
    doing: Callable[[], str]  # says what else is under way on this rank, beside the main thread

    def __post_init__(self) -> None:
        self.best_effort = BestEffort(f"reports in {self.folder}")
        self._watched: tuple[str, float] | None = None  # what is under way, and since when by time.monotonic()
        self._longest_seconds = 0.0  # that anything watched has taken
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._run, name="hang watch", daemon=True).start()
        return self

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Report if the body, ``what``, takes longer than ``timeout_seconds``."""
        self._watched = what, time.monotonic()
        try:
            yield
        finally:
            self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._watched[1])
            self._watched = None

    def set_timeout_after_first_step(self, configured_seconds: float, device: torch.device) -> None:
        """Set ``timeout_seconds`` to the configured one, on a CPU to more if the first step was slow. Collective."""
        longest = torch.tensor(self._longest_seconds, dtype=torch.float64)
        if device.type == "cpu":
            all_reduce(longest, op=dist.ReduceOp.MAX)
            configured_seconds = max(configured_seconds, TIMES_FIRST_STEP * longest.item())
        self.timeout_seconds = configured_seconds

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _run(self) -> None:
        reported = None
        while not self._closed.wait(POLL_SECONDS):
            watched = self._watched
            if watched and watched is not reported and time.monotonic() > watched[1] + self.timeout_seconds:
                reported = watched
                self._report(watched[0])

    def _report(self, what: str) -> None:
        name = f"{what.replace(' ', '-')}-rank-{{}}.txt"
        own = _place(sys._current_frames().get(threading.main_thread().ident or 0), self.doing())
        now = time.time()
        with self.best_effort:
            self.folder.mkdir(parents=True, exist_ok=True)
            own_file = self.folder / name.format(self.rank)
            with atomic_write(own_file) as file:
                file.write(json.dumps(asdict(own)).encode() + b"\n")
                file.flush()
                faulthandler.dump_traceback(file)
            now = own_file.stat().st_mtime  # the file system may have another clock
        time.sleep(COLLECT_SECONDS)
        places = {self.rank: own}
        for rank in range(self.world_size):
            with self.best_effort:
                path = self.folder / name.format(rank)
                # An older file is of an earlier attempt at this step.
                if path.exists() and path.stat().st_mtime > now - self.timeout_seconds:
                    if rank < self.rank:
                        return  # that rank makes the summary: of thousands, one reads the files of all
                    with path.open() as file:
                        places[rank] = Place(**json.loads(file.readline()))
        logger.error("%s", self._summary(what, places))

    def _summary(self, what: str, places: dict[int, Place]) -> str:
        """Who waits for whom, in a few lines."""
        lines = [f"{what} takes more than {self.timeout_seconds:.0f} s; stacks of all ranks lie in {self.folder}"]
        groups: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(_described(places.get(rank)), []).append(rank)
        lines += [f"  ranks {_ranges(ranks)} {described}" for described, ranks in groups.items()]
        awaited_by: dict[Any, tuple[int, ...]] = {}  # most ranks wait in the same collective: looked up once
        waits: dict[tuple[int, ...], list[int]] = {}
        for rank, place in sorted(places.items()):
            wait = (
                bool(place.waits_in),
                *((name, number, ranks[0]) for name, (_, number, ranks) in place.pending.items()),
            )
            if wait not in awaited_by:
                awaited_by[wait] = tuple(sorted(_awaited(place, places, self.world_size)))
            waits.setdefault(awaited_by[wait], []).append(rank)
        for awaited, waiting in sorted(waits.items()):
            if awaited:
                lines.append(f"  so ranks {_ranges(waiting)} are waiting for ranks {_ranges(list(awaited))}")
        return "\n".join(lines)


def _place(frame: FrameType | None, doing: str) -> Place:
    """Where this process is; ``frame``: of its main thread."""
    pending, begun = _collectives()
    stack = traceback.extract_stack(frame)
    waits_in = next((entry.name for entry in reversed(stack) if entry.filename.endswith(WAITING)), "")
    own = [entry for entry in stack if entry.filename.startswith(PACKAGE) and not entry.filename.endswith(WAITING)]
    entry = (own or stack)[-1]
    where = f"{Path(entry.filename).name}:{entry.lineno} ({entry.name})"
    return Place(where, waits_in, pending, begun, doing)


def _collectives() -> tuple[dict[str, list[Any]], dict[str, int]]:
    """``Place``'s ``pending`` and ``begun``, from torch's flight recorder."""
    pending: dict[str, list[Any]] = {}
    of_helpers: dict[str, list[Any]] = {}
    begun: dict[str, int] = {}
    main = threading.main_thread()
    helpers = {
        str(t.ident) for t in threading.enumerate() if t is not main and not isinstance(t, threading._DummyThread)
    }
    ranks = {group.group_name: dist.get_process_group_ranks(group) for group in all_groups()}
    for entry in flight_record():
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or name not in ranks:
            continue
        begun[name] = max(begun.get(name, 0), number)
        if not entry["retired"] and entry["state"] != "completed":
            which = of_helpers if entry["thread_id"] in helpers else pending
            which.setdefault(name, [entry["profiling_name"].split(":", 1)[-1], number, ranks[name]])
    # A save in the background may wait while the step goes on: it counts only where nothing else waits.
    return pending or of_helpers, begun


def _described(place: Place | None) -> str:
    if place is None:
        return "sent no report: dead, stopped, or not in this step"
    waits_in = place.waits_in or next((operation for operation, _, _ in place.pending.values()), "")
    doing = f"; {place.doing}" if place.doing else ""
    return (f"wait in {waits_in} at {place.where}" if waits_in else f"are at {place.where}") + doing


def _awaited(place: Place, places: dict[int, Place], world_size: int) -> set[int]:
    """The ranks that one at ``place`` waits for: those that have not begun what it has."""
    if place.pending:
        return {
            rank
            for name, (_, number, ranks) in place.pending.items()
            for rank in ranks
            if rank not in places or places[rank].begun.get(name, 0) < number
        }
    if not place.waits_in:
        return set()
    # A send or a receive, whose peer is not known: whoever does not wait.
    return {rank for rank in range(world_size) if rank not in places or not (places[rank].waits_in or place.pending)}


def _ranges(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs = itertools.groupby(enumerate(ranks), key=lambda at: at[1] - at[0])
    parts = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
