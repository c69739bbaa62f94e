"""``python scripts/faults/crash_test.py --composed 20``: rounds with two or three faults of different kinds.

A round starts the run by ``run_llama_train.sh``, which starts torchrun, on 1, 2 or 4 ranks. Each fault is injected at a
random moment in the seconds after the start or, in every other round, after its first save, and ends some seconds
later. The seed of a round, which is
printed with its kinds, decides everything that is random: ``--composed 1 --seed N`` repeats the round. ``--kinds``
selects kinds. Between two starts:

- layout: another number of ranks; with ``training.sums = "exact"`` the run must stay bitwise identical;
- move: the dump folder, the checkpoint folder in it and the data get other names; with a bucket, the former is lost;
- file_times: the times of all files are moved by up to ten years.

While the run trains:

- kill_rank, kill_launcher: SIGKILL to a rank, or to the launcher, which is the script and then torchrun. The ranks of a
  killed launcher train on; every other time they are killed, too, otherwise the next start takes the run over;
- stop_rank, stop_launcher: SIGTERM;
- pause_rank, pause_launcher: SIGSTOP, then SIGCONT;
- clock: the wall clock of all processes is moved by up to ten days, and back;
- full_disk, read_error, slow_disk, flipped_read: as their names say, for files of the run.

With ``--storage s3`` in place of the last line:

- trouble, outage, silence: as in ``crash_test_s3.py``, for some seconds;
- no_bucket: all requests are answered that there is no such bucket;
- expired: all requests are answered that the credentials have expired;
- race: creates are answered by 409, or by 412 after the object has been created;
- short: the store keeps half of an object.

The exit code must be one that docs/faults.md documents for one of the faults, and every complete checkpoint must match
its manifest. In the end the run must be bitwise identical to an undisturbed one.
"""

import atexit
import errno
import heapq
import math
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil
from disk_faults import DiskFaults

from torchtrain.checkpoint.format import read_manifest, verify
from torchtrain.checkpoint.storage import CheckpointStorage, open_storage
from torchtrain.files import is_url

if TYPE_CHECKING:
    from s3_faults import S3Faults

ROOT = Path(__file__).parent.parent.parent
RANKS = (1, 2, 4)
LATEST_SECONDS = 10  # after the start of a run, or its first save; a fault begins earlier
TIMEOUT_SECONDS = 300
YEAR_SECONDS = 365 * 24 * 3600
# Imported by the runs. Slow steps, so that the undisturbed run, which must make all of them, takes less time.
SETTINGS = """
import os
import time
from torchtrain.plugins.object_storage import object_store
from torchtrain.models.loss import OutputLoss

object_store.PAUSES_SECONDS = (0.2, 0.5, 1, 1, 1, 1, 1)
compute = OutputLoss.__call__

def compute_slowly(*arguments, **options):
    time.sleep(float(os.environ.get("CRASH_TEST_SLEEP_SECONDS", "0")))
    return compute(*arguments, **options)

OutputLoss.__call__ = compute_slowly
"""


class Launched(Protocol):
    """A start of the run."""

    launcher: psutil.Process

    def ranks(self) -> list[psutil.Process]:
        """The ranks that are alive, by rank; they include the launcher if it does not start any."""
        ...

    def wait(self) -> int:
        """The launcher's exit code."""
        ...

    def end(self) -> None: ...

    def output(self) -> str: ...


class Script:
    """A start of the run by ``run_llama_train.sh``."""

    def __init__(self, ranks: int, options: list[str], environment: dict[str, str], log: Path) -> None:
        self.log, self.begin = log, log.stat().st_size if log.exists() else 0
        command = [str(ROOT / "run_llama_train.sh"), *options]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment, "NGPU": str(ranks)}, stdout=file, stderr=file
            )
        self.launcher = psutil.Process(self.process.pid)
        atexit.register(self.end)
        self.started: dict[int, psutil.Process] = {}

    def ranks(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            for process in (self.launcher, *self.launcher.children()):
                if "torchtrain.train" in process.cmdline() and "torchtrain.launch" not in process.cmdline():
                    self.started[process.pid] = process
        return [process for process in self.started.values() if is_alive(process)]

    def wait(self) -> int:
        return self.process.wait(timeout=TIMEOUT_SECONDS)

    def end(self) -> None:
        """Kill what is left."""
        for process in (*self.ranks(), self.launcher):
            send(signal.SIGKILL, process)

    def output(self) -> str:
        return self.log.read_bytes()[self.begin :].decode(errors="replace")


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class Trial:
    """A run that is disturbed."""

    folder: Path  # its dump folders, and its data, are in it
    start: Callable[[Path, str, Path, int, int], Launched]
    """Starts the run with its dump folder, ``checkpoint.folder``, data, number of ranks and of steps."""
    data: Path
    disk: DiskFaults | None
    proxy: "S3Faults | None" = None
    checkpoints: str = "checkpoint"
    ranks_allowed: tuple[int, ...] = RANKS
    latest_seconds: float = LATEST_SECONDS
    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.dump = self.folder / "run"
        self.ranks = 2
        self.orphans: list[psutil.Process] = []

    def storage(self) -> CheckpointStorage:
        return open_storage(self.checkpoints if is_url(self.checkpoints) else self.dump / self.checkpoints)

    def newest(self) -> int:
        return max(self.storage().steps(), default=0)

    def launch(self, steps: int = 10**9) -> Launched:
        return self.start(self.dump, self.checkpoints, self.data, self.ranks, steps)

    def verify(self) -> None:
        """Check all complete checkpoints, unless ranks of an earlier start still save and delete some."""
        if any(map(is_alive, self.orphans)):
            return
        storage = self.storage()
        for step in storage.steps():
            checkpoint = storage.open(step)
            verify(checkpoint, read_manifest(checkpoint).files)

    def end_orphans(self) -> None:
        for process in filter(is_alive, self.orphans):
            process.kill()
            process.wait()
        self.orphans.clear()


@dataclass
class Round:
    """A start of the run, and the faults that are injected into it."""

    trial: Trial
    seed: int
    rng: random.Random
    codes: set[int] = field(default_factory=set)
    """Exit codes that the faults explain, if the run ends by itself."""

    def __post_init__(self) -> None:
        self.begin = 0.0
        self.number = count()
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.is_ending = False  # by a signal
        self.keeps_orphans = self.rng.random() < 0.5
        self.saves_before, self.saves_after = self.rng.random() < 0.5, self.rng.random() < 0.5

    @property
    def disk(self) -> DiskFaults:
        assert self.trial.disk is not None, "needs Linux and a C compiler"
        return self.trial.disk

    @property
    def proxy(self) -> "S3Faults":
        assert self.trial.proxy is not None, "needs --storage s3"
        return self.trial.proxy

    @property
    def files(self) -> str:
        """A pattern for the names of files in the checkpoint folder."""
        return f"{self.trial.dump / self.trial.checkpoints}/*"

    def wait_for_save(self, before: int) -> None:
        """Wait until there is a newer checkpoint than that of step ``before``, or the run has ended."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while is_alive(self.run.launcher) and self.trial.newest() <= before:
            assert time.monotonic() < deadline, f"no save\n{self.run.output()}"
            time.sleep(0.1)

    def at(self, moment: float, action: Callable[[], object]) -> None:
        """Plan an action some seconds after ``begin``."""
        heapq.heappush(self.events, (moment, next(self.number), action))

    def later(self, most: float, action: Callable[[], object]) -> None:
        """Plan an action that ends a fault, ``most`` seconds from now or earlier."""
        self.at(time.monotonic() - self.begin + self.rng.uniform(0.1, most), action)

    def rank(self) -> psutil.Process | None:
        """One of the ranks; None while there is none."""
        position, ranks = self.rng.random(), self.run.ranks()
        return ranks[int(position * len(ranks))] if ranks else None

    def end(self, number: int, process: psutil.Process | None) -> None:
        """Send a signal that ends the run."""
        self.run.ranks()  # known from now on, also without the launcher
        self.is_ending |= process is not None and is_alive(process)
        send(number, process)

    def play(self, kinds: list[str]) -> None:
        trial = self.trial
        during = []
        for name in kinds:
            kind = KINDS[name]
            self.codes |= kind.codes
            if kind.is_between_starts:
                kind.inject(self)
            else:
                during.append((self.rng.uniform(0, trial.latest_seconds), name))
        what = [f"{trial.ranks} ranks", *(name for name in kinds if KINDS[name].is_between_starts)]
        what += [f"{name} at {moment:.1f} s" for moment, name in sorted(during)]
        since = "after a save" if self.saves_before else "after the start"
        print(f"round with --seed {self.seed}: {', '.join(what)} {since}", flush=True)
        self.run = trial.launch()
        try:
            if self.saves_before:
                self.wait_for_save(trial.newest())
            self.begin = time.monotonic()
            for moment, name in during:
                self.at(moment, lambda inject=KINDS[name].inject: inject(self))
            self.at(trial.latest_seconds, lambda: None)
            while self.events:
                moment, _, action = heapq.heappop(self.events)
                time.sleep(max(0, self.begin + moment - time.monotonic()))
                action()
            self.heal()
            self.finish()
        except BaseException:
            self.heal()
            self.run.end()
            raise

    def heal(self) -> None:
        if self.trial.disk is not None:
            self.trial.disk.heal()
        if self.trial.proxy is not None:
            self.trial.proxy.heal()

    def finish(self) -> None:
        """Stop what is left of the run, and check its exit code."""
        trial, run, asked = self.trial, self.run, False
        ranks = run.ranks()
        if is_alive(run.launcher) and not self.is_ending:
            if self.saves_after:
                self.wait_for_save(trial.newest())
            asked = is_alive(run.launcher)
            send(signal.SIGTERM, run.launcher)
        code = run.wait()
        allowed = self.codes | (STOPPED if asked else set())
        assert code in allowed, f"exit code {code}, not one of {sorted(allowed)}\n{run.output()}"
        if not self.is_ending:
            assert "Traceback" not in run.output(), run.output()
        trial.orphans += filter(is_alive, ranks)
        if not self.keeps_orphans:
            trial.end_orphans()


@dataclass(frozen=True)
class Kind:
    inject: Callable[[Round], object]
    codes: frozenset[int] = frozenset()
    is_between_starts: bool = False
    storages: tuple[str, ...] = ("local", "s3")


def layout(round_: Round) -> None:
    trial = round_.trial
    trial.ranks = round_.rng.choice([ranks for ranks in trial.ranks_allowed if ranks != trial.ranks])


def move(round_: Round) -> None:
    trial = round_.trial
    trial.end_orphans()  # they would save to the old folders
    if is_url(trial.checkpoints):
        shutil.rmtree(trial.dump, ignore_errors=True)
    elif trial.dump.exists():
        checkpoints = f"checkpoint-{trial.rounds}"
        if (trial.dump / trial.checkpoints).exists():
            (trial.dump / trial.checkpoints).rename(trial.dump / checkpoints)
        trial.checkpoints = checkpoints
        trial.dump = trial.dump.rename(trial.folder / f"run-{trial.rounds}")
    trial.data = trial.data.rename(trial.folder / f"training-{trial.rounds}.jsonl")


def file_times(round_: Round) -> None:
    trial = round_.trial
    for path in sorted([*trial.dump.rglob("*"), trial.data]):
        when = time.time() + round_.rng.uniform(-10, 10) * YEAR_SECONDS
        with suppress(FileNotFoundError):  # ranks that a killed launcher has left may be at work
            os.utime(path, (when, when))


def send(number: int, process: psutil.Process | None) -> None:
    with suppress(psutil.Error):
        if process is not None:
            process.send_signal(number)


def pause(round_: Round, process: psutil.Process | None) -> None:
    send(signal.SIGSTOP, process)
    round_.later(4, lambda: send(signal.SIGCONT, process))


def clock(round_: Round) -> None:
    rule = round_.disk.move_clock(round_.rng.choice([-1, 1]) * round_.rng.randrange(10 * 24 * 3600))
    round_.later(5, lambda: round_.disk.heal(rule))


def full_disk(round_: Round) -> None:
    dump = round_.trial.dump
    rules = [
        round_.disk.fail(operation, pattern, errno.ENOSPC)
        for pattern in (round_.files, f"{dump}/metrics.jsonl", f"{dump}/config.toml")
        for operation in ("write", "create")
    ]
    round_.later(5, lambda: [round_.disk.heal(rule) for rule in rules])


def read_error(round_: Round) -> None:
    operation, error = round_.rng.choice([("open", errno.EMFILE), ("read", errno.EIO), ("stat", errno.ESTALE)])
    rule = round_.disk.fail(operation, f"{round_.files}.distcp", error)
    round_.later(5, lambda: round_.disk.heal(rule))


def slow_disk(round_: Round) -> None:
    operation = round_.rng.choice(["write", "fsync", "read", "list", "rename", "remove"])
    rule = round_.disk.fail(operation, round_.files, times=3, seconds=round_.rng.randrange(1, 4))
    round_.later(8, lambda: round_.disk.heal(rule))


def flipped_read(round_: Round) -> None:
    file = round_.rng.choice(["manifest.json", "config.toml", "index.json", "*.distcp"])
    rule = round_.disk.fail("flip", f"{round_.files}/{file}", times=1)
    round_.later(8, lambda: round_.disk.heal(rule))


def in_bucket(round_: Round, kind: str, requests: str = "", *, most: float, every: int = 1, times: float = 1e9) -> None:
    fault = round_.proxy.fail(kind, requests, every=every, times=times, seconds=most)
    round_.later(most, lambda: round_.proxy.heal(fault))


def trouble(round_: Round) -> None:
    kind = round_.rng.choice(["slow down", "error", "reset", "truncate", "lost answer"])
    in_bucket(round_, kind, every=3, most=8)


def outage(round_: Round) -> None:
    in_bucket(round_, round_.rng.choice(["slow down", "error", "reset"]), most=5)


def silence(round_: Round) -> None:
    in_bucket(round_, "silence", round_.rng.choice(["PUT", "GET", "distcp", "manifest"]), times=2, most=8)


def race(round_: Round) -> None:
    in_bucket(round_, round_.rng.choice(["conflict", "precondition"]), times=3, most=8)


def short(round_: Round) -> None:
    in_bucket(
        round_, "short", round_.rng.choice(["PUT .*distcp", "PUT .*manifest", "PUT .*lease", "PUT"]), times=2, most=8
    )


# torchrun's after SIGTERM, before and after it handles signals, and a single rank's.
STOPPED = {128 + signal.SIGTERM, -signal.SIGTERM, 75}
KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL, 1})  # 1: another rank's, whose connection is lost
ASKED = frozenset(STOPPED)
USER_ERROR, STORAGE_ERROR = frozenset({2}), frozenset({74})
LOCAL, S3 = ("local",), ("s3",)
KINDS = {
    "layout": Kind(layout, is_between_starts=True),
    "move": Kind(move, is_between_starts=True),
    "file_times": Kind(file_times, is_between_starts=True),
    "kill_rank": Kind(lambda it: it.end(signal.SIGKILL, it.rank()), KILLED),
    "kill_launcher": Kind(lambda it: it.end(signal.SIGKILL, it.run.launcher), KILLED),
    "stop_rank": Kind(lambda it: it.end(signal.SIGTERM, it.rank()), ASKED),
    "stop_launcher": Kind(lambda it: it.end(signal.SIGTERM, it.run.launcher), ASKED),
    "pause_rank": Kind(lambda it: pause(it, it.rank())),
    "pause_launcher": Kind(lambda it: pause(it, it.run.launcher)),
    "clock": Kind(clock),
    "full_disk": Kind(full_disk, USER_ERROR, storages=LOCAL),
    "read_error": Kind(read_error, STORAGE_ERROR, storages=LOCAL),
    "slow_disk": Kind(slow_disk, storages=LOCAL),
    "flipped_read": Kind(flipped_read, USER_ERROR, storages=LOCAL),
    "trouble": Kind(trouble, STORAGE_ERROR, storages=S3),
    "outage": Kind(outage, STORAGE_ERROR, storages=S3),
    "silence": Kind(silence, storages=S3),
    "no_bucket": Kind(lambda it: in_bucket(it, "no bucket", most=5), USER_ERROR, storages=S3),
    "expired": Kind(lambda it: in_bucket(it, "expired", most=5), USER_ERROR, storages=S3),
    "race": Kind(race, storages=S3),
    "short": Kind(short, storages=S3),
}


def kinds_of(storage: str) -> list[str]:
    return [name for name, kind in KINDS.items() if storage in kind.storages]


def disturb(trial: Trial, rounds: int, seed: int, kinds: list[str], minutes: float = math.inf) -> int:
    """Make ``rounds``, of which none begins after ``minutes``; returns the step that the run has come to."""
    began = time.monotonic()
    for number in range(rounds):
        if time.monotonic() - began > 60 * minutes:
            break
        trial.rounds += 1
        rng = random.Random(seed + number)
        names = rng.sample(kinds, min(len(kinds), rng.choice([2, 3])))
        Round(trial, seed + number, rng).play(names)
        trial.faults.update(names)
        trial.verify()
        print(f"{number + 1}/{rounds}: newest step {trial.newest()}", flush=True)
    # A start ends the ranks that killed launchers have left, by its lease.
    before, run = trial.newest(), trial.launch()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while trial.newest() <= before or any(map(is_alive, trial.orphans)):
        assert is_alive(run.launcher), run.output()
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.2)
    send(signal.SIGTERM, run.launcher)
    assert (code := run.wait()) in STOPPED, f"{code}\n{run.output()}"
    trial.verify()
    return trial.newest()
