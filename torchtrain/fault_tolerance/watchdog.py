"""Watchdog for steps and saves that hang: reports where each rank is, and which ranks wait for which others."""

import faulthandler
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from torchtrain.distributed.process_group import all_reduce
from torchtrain.environment import LOST_CONNECTION
from torchtrain.errors import HangError
from torchtrain.files import atomic_write, json_object
from torchtrain.logging import BestEffort, logger, ranks_text
from torchtrain.torch_internals import all_groups, flight_record

POLL_SECONDS = 0.25  # a hang is detected at most this much later than its timeout
# Ranks enter a step at slightly different times: wait this long for the reports of all ranks.
COLLECT_SECONDS = 3
# The timeout of collectives is longer than that of a step, so that the report is written before a collective fails.
REPORT_SECONDS = 6
# On a CPU a step may take longer than the configured timeout: later steps may take this multiple of the first one.
TIMES_FIRST_STEP = 3
# Files whose functions wait for other ranks. They show waits that the flight recorder lacks, such as sends over gloo.
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
# The function in which ranks wait for a save, and tell each other several times a second whether it has ended.
POLLING = ("torchtrain/checkpoint/manager.py", "_has_ended_on_all_ranks")
PACKAGE = str(Path(__file__).parent.parent) + os.sep
# What gloo and NCCL say in the error of a collective in which a rank is missing.
TIMED_OUT = re.compile(rf"[Tt]imed out|[Tt]imeout|{LOST_CONNECTION.pattern}")
MAX_HOSTS = 4  # in a message


def enable_flight_recorder(folder: Path) -> None:
    """Enable PyTorch's flight recorder, and let NCCL write its records to ``folder`` when a collective times out.

    Call it before process groups are created. On a machine with GPUs it creates the folder, which NCCL does not.
    """
    if torch.cuda.is_available():
        with BestEffort(f"the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "flight-recorder-"))


@dataclass(frozen=True)
class RankStatus:
    """What a rank is executing. Serialized as JSON, it is the first line of the rank's report."""

    where: str
    """The innermost stack frame of this package in the main thread: file, line and function."""
    waits_in: str
    """The function in which the main thread waits for other ranks; '' if it does not wait."""
    pending: dict[str, list[Any]]
    """For each process group: name and sequence number of the pending collective, and the ranks of the group."""
    begun: dict[str, int]
    """For each process group: sequence number of the last collective that this rank has started."""
    doing: str
    """What else this rank is doing in the background, such as a save."""


@dataclass(eq=False)
class Watchdog(AbstractContextManager["Watchdog"]):
    """Writes a report ``folder/WHAT-rank-R.txt`` on every rank if a step or a save exceeds ``timeout_seconds``.

    The file contains the ``RankStatus`` as a line of JSON, then the Python stack traces of all threads. A few seconds
    later the lowest rank that has written a report logs which ranks wait for which others. The watchdog only reports:
    the timeout of the collective, ``REPORT_SECONDS`` later, ends the process, by a ``HangError`` that names the ranks
    that hang. torchrun gets the same message in its error file, since NCCL aborts the process in a thread of its own.
    """

    folder: Path
    rank: int
    world_size: int
    timeout_seconds: float
    doing: Callable[[], str]  # describes what this rank is doing in the background
    synchronize: Callable[[], None] = lambda: None
    """Waits for the device; called at the end of what is watched while the duration of the first step is measured."""
    hosts: Sequence[str] = ()
    """The host of each rank, for messages; empty if they are not known."""

    def __post_init__(self) -> None:
        self.best_effort = BestEffort(f"reports in {self.folder}")
        self._watched: tuple[str, float] | None = None  # what is being watched, and its start by time.monotonic()
        self._reported: tuple[str, float] | None = None  # the last of them that took too long
        self._has_report = threading.Event()  # set when the report about it is complete
        self._conclusion = ""  # of that report; empty if a lower rank logs it
        self._longest_seconds = 0.0  # the longest duration of anything watched up to the first step
        self._is_measuring = True
        self._closed = threading.Event()

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """A context manager that reports if its body takes longer than ``timeout_seconds``. ``what`` names the body.

        Raises:
            HangError: a collective has failed after the report. Without a message if a lower rank has that.
        """
        self._watched = watched = what, time.monotonic()
        try:
            yield
            if self._is_measuring:
                self.synchronize()
                self._longest_seconds = max(self._longest_seconds, time.monotonic() - self._watched[1])
        except RuntimeError as error:
            if self._reported is not watched or not TIMED_OUT.search(str(error)):
                raise
            self._has_report.wait(COLLECT_SECONDS + REPORT_SECONDS)
            raise HangError(self._conclusion) from error
        else:
            if self._reported is watched:  # it was only slow
                self._has_report.wait(COLLECT_SECONDS + REPORT_SECONDS)
                with self.best_effort:
                    _write_error_file("")
        finally:
            self._watched = None

    def set_timeout_after_first_step(self, configured_seconds: float, device: torch.device) -> None:
        """Set ``timeout_seconds`` to the configured value, or to more if the first step of any rank was slow.

        Collective. ``device``: that of the ranks' process group.
        """
        self._is_measuring = False
        longest = torch.tensor(self._longest_seconds, dtype=torch.float64, device=device)
        all_reduce(longest, op=dist.ReduceOp.MAX)
        self.timeout_seconds = max(configured_seconds, TIMES_FIRST_STEP * longest.item())

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            watched = self._watched
            if watched and watched is not self._reported and time.monotonic() > watched[1] + self.timeout_seconds:
                self._has_report.clear()
                self._conclusion, self._reported = "", watched
                self._report(watched[0])
                self._has_report.set()

    def _report(self, what: str) -> None:
        name = f"{what.replace(' ', '-')}-rank-{{}}.txt"
        own = _current_status(sys._current_frames().get(threading.main_thread().ident or 0), self.doing())
        now = time.time()
        with self.best_effort:
            self.folder.mkdir(parents=True, exist_ok=True)
            own_file = self.folder / name.format(self.rank)
            with atomic_write(own_file) as file:
                file.write(json.dumps(asdict(own)).encode() + b"\n")
                file.flush()
                faulthandler.dump_traceback(file)
            now = own_file.stat().st_mtime  # the clock of the file system may differ from this machine's
        time.sleep(COLLECT_SECONDS)
        statuses = {self.rank: own}
        for rank in range(self.world_size):
            with self.best_effort:
                path = self.folder / name.format(rank)
                # An older file is from an earlier attempt at this step.
                if path.exists() and path.stat().st_mtime > now - self.timeout_seconds:
                    if rank < self.rank:
                        return  # that rank logs the summary, so that only one rank reads the reports of all
                    with path.open() as file:
                        statuses[rank] = RankStatus(**(json_object(file.readline()) or {}))
        summary, self._conclusion = self._summary(what, statuses)
        logger.error("%s", summary)
        with self.best_effort:
            _write_error_file(self._conclusion)

    def _summary(self, what: str, statuses: dict[int, RankStatus]) -> tuple[str, str]:
        """Which ranks wait for which others, in a few lines, and in one which ranks hang."""
        lines = [f"{what} takes more than {self.timeout_seconds:.0f} s; the stack traces are in {self.folder}"]
        groups: dict[str, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(_described(statuses.get(rank)), []).append(rank)
        lines += [f"  {ranks_text(ranks)}: {described}" for described, ranks in groups.items()]
        awaited_by: dict[Any, tuple[int, ...]] = {}  # a cache, because most ranks wait in the same collective
        waits: dict[tuple[int, ...], list[int]] = {}
        for rank, status in sorted(statuses.items()):
            wait = (
                bool(status.waits_in),
                *((name, number, ranks[0]) for name, (_, number, ranks) in status.pending.items()),
            )
            if wait not in awaited_by:
                awaited_by[wait] = tuple(sorted(_awaited(status, statuses, self.world_size)))
            waits.setdefault(awaited_by[wait], []).append(rank)
        waiting: set[int] = set()
        for awaited, ranks in sorted(waits.items()):
            if awaited:
                verb = "is" if len(ranks) == 1 else "are"
                lines.append(f"  so {ranks_text(ranks)} {verb} waiting for {ranks_text(awaited)}")
                waiting.update(ranks)
        return "\n".join(lines), self._concluded(what, {rank for ranks in waits for rank in ranks}, waiting, groups)

    def _concluded(
        self, what: str, awaited: Collection[int], waiting: Collection[int], groups: dict[str, list[int]]
    ) -> str:
        """One line that names the ranks that hang, and their hosts: those that are awaited and wait for none."""
        hanging = sorted(set(awaited) - set(waiting))
        where = f"the stack traces are in {self.folder}"
        if not hanging:
            others = f"{ranks_text(sorted(awaited))} wait for each other" if awaited else "no rank waits for another"
            return f"{what} takes more than {self.timeout_seconds:.0f} s, and {others}; {where}"
        doing = "; ".join(described for described, ranks in groups.items() if not set(ranks).isdisjoint(hanging))
        on = ""
        if self.hosts:
            hosts = list(dict.fromkeys(self.hosts[rank] for rank in hanging))
            more = f" and {len(hosts) - MAX_HOSTS} more" if len(hosts) > MAX_HOSTS else ""
            on = f" on host{'s' * (len(hosts) > 1)} {', '.join(hosts[:MAX_HOSTS])}{more}"
        verb = "hangs" if len(hanging) == 1 else "hang"
        return f"{ranks_text(hanging)}{on} {verb} in {what}: {doing}; {where}"


def _write_error_file(message: str) -> None:
    """Leave ``message`` to torchrun, which reads it if the process fails; an empty one removes an earlier one."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and message:
        try:
            raise HangError(message)
        except HangError as error:
            get_error_handler().record_exception(error)  # with the traceback, which torchrun shows
    elif file:
        Path(file).unlink(missing_ok=True)


def _current_status(frame: FrameType | None, doing: str) -> RankStatus:
    """The ``RankStatus`` of this process. ``frame``: the current frame of its main thread."""
    stack = traceback.extract_stack(frame)
    # A rank whose own save is at work waits for that, and not for the collective in which it polls: it ends at once.
    polls = bool(doing) and any(of.filename.endswith(POLLING[0]) and of.name == POLLING[1] for of in stack)
    pending, begun = _collectives(of_background_only=polls)
    waits_in = next((entry.name for entry in reversed(stack) if entry.filename.endswith(WAITING)), "")
    if polls:
        waits_in = ""
    own = [entry for entry in stack if entry.filename.startswith(PACKAGE) and not entry.filename.endswith(WAITING)]
    entry = (own or stack)[-1]
    where = f"{Path(entry.filename).name}:{entry.lineno} ({entry.name})"
    return RankStatus(where, waits_in, pending, begun, doing)


def _collectives(of_background_only: bool) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """``RankStatus.pending`` and ``RankStatus.begun``, from PyTorch's flight recorder.

    ``of_background_only``: whether collectives of the main thread are not pending.
    """
    pending: dict[str, list[Any]] = {}
    of_background: dict[str, list[Any]] = {}
    begun: dict[str, int] = {}
    main = threading.main_thread()
    background_threads = {
        str(t.ident) for t in threading.enumerate() if t is not main and not isinstance(t, threading._DummyThread)
    }
    ranks = {group.group_name: dist.get_process_group_ranks(group) for group in all_groups()}
    for entry in flight_record():
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if entry["is_p2p"] or name not in ranks:
            continue
        begun[name] = max(begun.get(name, 0), number)
        if not entry["retired"] and entry["state"] != "completed":
            which = of_background if entry["thread_id"] in background_threads else pending
            which.setdefault(name, [entry["profiling_name"].split(":", 1)[-1], number, ranks[name]])
    # A save in the background may wait while training continues: it counts only if no other collective is pending.
    return of_background if of_background_only else pending or of_background, begun


def _described(status: RankStatus | None) -> str:
    if status is None:
        return "no report: dead, stopped, or not in this step"
    waits_in = status.waits_in or next((operation for operation, _, _ in status.pending.values()), "")
    doing = f"; {status.doing}" if status.doing else ""
    return (f"waiting in {waits_in} at {status.where}" if waits_in else f"at {status.where}") + doing


def _awaited(status: RankStatus, statuses: dict[int, RankStatus], world_size: int) -> set[int]:
    """The ranks that a rank with ``status`` waits for: those that have not started its pending collectives."""
    if status.pending:
        return {
            rank
            for name, (_, number, ranks) in status.pending.items()
            for rank in ranks
            if rank not in statuses or statuses[rank].begun.get(name, 0) < number
        }
    if not status.waits_in:
        return set()
    # A send or a receive, whose peer is not known: assume all ranks that are not waiting themselves.
    waiting = {rank for rank, other in statuses.items() if other.waits_in or other.pending}
    return set(range(world_size)) - waiting
