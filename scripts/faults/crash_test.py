"""Fault-injection stress test of a training run: ``python scripts/faults/crash_test.py --kills 30 --faults 50``.

Two ranks train the debug model with an asynchronous checkpoint every second step. Each round starts the run and injects
one fault, in random order:

- kill: SIGKILL to one rank or to all, at any moment, or, every other time, a moment after a save has begun;
- full disk: every write fails for a while;
- read error: a file of the newest checkpoint cannot be read, by one rank;
- all damaged: there is no valid checkpoint;
- stop in validation: SIGTERM to one rank while the ranks validate;
- hung save: the disk of one rank hangs, and the run is asked to stop;
- generation: the file of the writer lease cannot be read for a while;
- late listing: while a start waits for the list of checkpoints, a newer one is started and saves;
- late commit: a newer start is removing leftovers of an older one, which hung, when the older one commits them;
- changed data: a data file is replaced by another one of the same size and time before the run starts;
- flipped read: while a checkpoint is verified and loaded, one read returns a flipped bit.

``--grains`` computes in grains, and starts each run on another layout of two or four ranks: data, tensor, context and
pipeline parallelism, and two of them. ``--composed`` injects several faults into each round
(``crash_test_composed.py``). ``--replicas 3`` trains replicas instead, which die (``crash_test_replicas.py``).

Every exit code must be the one that docs/faults.md documents, and every complete checkpoint must match its manifest. In
the end the run must be bitwise identical to an undisturbed run, and no process or temporary file may be left.
All rounds but the kills need Linux and a C compiler. ``--storage s3`` injects the faults of ``crash_test_s3.py``.
"""

import argparse
import atexit
import errno
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from disk_faults import DiskFaults
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtrain.checkpoint.format import read_manifest, verify
from torchtrain.checkpoint.local_storage import LocalCheckpoint, saved_steps, step_folder
from torchtrain.files import PARTIAL_SUFFIX

RANKS = 2
TIMEOUT_SECONDS = 600
VALIDATION_INTERVAL = 6
GRACE_SECONDS = 2
OPTIONS = """
--model.flavor debugmodel --job.device cpu --training.mixed_precision_param float32 --training.seq_len 32
--training.local_batch_size 1 --training.global_batch_size 4 --metrics.no-enable_tensorboard
"""
# What the rounds count on, whatever the model.
RUN = f"""
--checkpoint.enable --checkpoint.interval 2 --checkpoint.keep_latest_k 4 --checkpoint.max_failed_saves 100
--metrics.log_freq 1 --lr_scheduler.warmup_steps 2 --lr_scheduler.decay_type constant
--faults.stop_grace_seconds {GRACE_SECONDS}
--validation.enable --validation.interval {VALIDATION_INTERVAL} --validation.steps 8
"""
GRAINS = "--training.sums exact --grains.tensor 2 --grains.context 4"
TENSOR, CONTEXT = "--parallelism.tensor_parallel_degree 2", "--parallelism.context_parallel_degree 2"
PIPELINE = "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2"
LAYOUTS = {  # with one row in a microbatch: their options, and numbers of ranks
    "": 2,
    TENSOR: 2,
    f"{TENSOR} --parallelism.no-enable_sequence_parallel": 2,
    CONTEXT: 2,
    PIPELINE: 2,
    f"{TENSOR} {CONTEXT}": 4,
    f"{PIPELINE} {TENSOR}": 4,
    f"{PIPELINE} {CONTEXT}": 4,
    f"{TENSOR} --parallelism.data_parallel_shard_degree 2": 4,
}
FOR_EVER = 10**9  # steps
STOPPED, STORAGE, REJECTED = 75, 74, 2


class Run(Protocol):
    """A run under way."""

    def wait(self) -> list[int]:
        """Exit codes of all ranks, which must end by themselves."""
        ...

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds, while the run continues."""
        ...

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None: ...

    def end(self) -> None:
        """Kill what is left."""
        ...

    def output(self) -> str: ...


class Processes:
    """A run of ``ranks`` processes that train into ``folder``, or each into a folder of its own in one of ``apart``."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        environment: dict[str, str],
        apart: list[Path] | None = None,
        ranks: int = RANKS,
    ) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "torchtrain.train", *OPTIONS.split(), *options]
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder.with_name(f"{folder.name}.log")
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    [*command, "--job.dump_folder", folder.name if apart else str(folder)],
                    cwd=apart[rank] if apart else None,
                    env={**os.environ, **environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank in range(ranks)
            ]
        atexit.register(self.end)

    def wait(self) -> list[int]:
        try:
            return [process.wait(timeout=TIMEOUT_SECONDS) for process in self.processes]
        finally:
            self.end()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.002)

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send_signal(number)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def output(self) -> str:
        return self.log.read_bytes()[self.begin :].decode(errors="replace")


@dataclass
class Trial:
    """A run that is disturbed, and what disturbs it."""

    folder: Path
    rng: random.Random
    disk: DiskFaults | None
    starts: Callable[[Path, list[str]], Run]
    validation_data: Path
    rounds: Counter[str] = field(default_factory=Counter)
    inside_saves: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def training_data(self) -> Path:
        """Texts that the disturbed and the undisturbed run train on; made when they are first asked for."""
        file = self.folder.with_name("training.jsonl")
        if not file.exists():
            write_training_data(file)
        return file

    def start(self, steps: int = FOR_EVER) -> Run:
        data = ["--data.path", str(self.training_data), "--validation.path", str(self.validation_data)]
        return self.starts(self.folder, [*RUN.split(), "--training.steps", str(steps), *data])

    def newest(self) -> int:
        return max(saved_steps(self.checkpoints), default=0)

    def start_and_save(self) -> Run:
        """Start, and wait for one more checkpoint."""
        before, run = self.newest(), self.start()
        run.wait_for(lambda: self.newest() > before)
        return run

    def stop(self, run: Run, *ranks: int) -> None:
        run.kill(*ranks, number=signal.SIGTERM)
        expect(run, STOPPED)

    def saving(self) -> bool:
        return any(self.checkpoints.glob(f"*{PARTIAL_SUFFIX}"))

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return metrics_in(self.folder)


def write_training_data(file: Path) -> None:
    words, rng = ["some", "words", "of", "which", "documents", "are", "made"], random.Random(1)
    texts = (" ".join(rng.choices(words, k=60)) for _ in range(9000))  # more than 3 MiB
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Of one that a killed process has not finished, or is writing now, nothing."""
    text = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
    complete, lines = text.rpartition("\n")[0], []
    for line in complete.splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def expect(run: Run, code: int) -> None:
    """Wait for the end of all ranks, whose exit code must be ``code``."""
    found = run.wait()
    assert {*found} == {code}, f"exit codes {found}, not {code}\n{run.output()}"


def kill(trial: Trial) -> None:
    aimed = trial.rounds["kill"] % 2 == 1
    run = trial.start_and_save()
    if aimed:
        run.wait_for(trial.saving)
    time.sleep(trial.rng.random() * (0.1 if aimed else 0.5))
    run.kill(*trial.rng.choice([[0], [1], []]))  # of the last, all
    run.end()
    trial.inside_saves += trial.saving()  # nobody is left to finish it


def full_disk(trial: Trial) -> None:
    assert trial.disk is not None
    run = trial.start_and_save()
    for pattern in ("checkpoint/*", "metrics.jsonl", "config.toml", "hangs/*"):  # all but the log
        for operation in ("write", "create"):
            trial.disk.fail(operation, trial.folder / pattern, errno.ENOSPC)
    run.wait_for(lambda: "could not be written" in run.output())
    time.sleep(trial.rng.random() * 0.3)
    trial.disk.heal()
    before = trial.newest()
    run.wait_for(lambda: trial.newest() > before)
    trial.stop(run)


def read_error(trial: Trial) -> None:
    assert trial.disk is not None
    operation, error = trial.rng.choice([("open", errno.EMFILE), ("read", errno.EIO), ("stat", errno.ESTALE)])
    file = trial.rng.choice(["manifest.json", "config.toml", "index.json", "__0_0.distcp", "__1_0.distcp"])
    before = sorted(trial.checkpoints.glob("step-*"))
    trial.disk.fail(operation, f"{step_folder(trial.checkpoints, trial.newest())}/{file}", error)
    expect(trial.start(), STORAGE)
    trial.disk.heal()
    assert [path for path in before if path.suffix != PARTIAL_SUFFIX] == sorted(
        path for path in trial.checkpoints.glob("step-*") if path.suffix != PARTIAL_SUFFIX
    )


def all_damaged(trial: Trial) -> None:
    aside = trial.folder.with_name("aside")
    shutil.copytree(trial.checkpoints, aside)
    for step in saved_steps(trial.checkpoints):
        file = step_folder(trial.checkpoints, step) / trial.rng.choice(["manifest.json", "index.json", "__0_0.distcp"])
        os.truncate(file, file.stat().st_size // 2)
    run = trial.start()
    expect(run, REJECTED)
    assert "none of these is a valid checkpoint" in run.output(), run.output()
    shutil.rmtree(trial.checkpoints)
    aside.rename(trial.checkpoints)


def stop_in_validation(trial: Trial) -> None:
    run = trial.start_and_save()

    def validates() -> bool:
        lines = trial.lines()
        return bool(lines) and lines[-1]["step"] % VALIDATION_INTERVAL == 0 and "loss" in lines[-1]

    run.wait_for(validates)
    due = trial.lines()[-1]["step"]
    trial.stop(run, trial.rng.randrange(RANKS))
    assert trial.newest() >= due, run.output()


def hung_save(trial: Trial) -> None:
    assert trial.disk is not None
    rank = trial.rng.randrange(RANKS)
    run = trial.start_and_save()
    operation = trial.rng.choice(["write", "fsync"])
    trial.disk.fail(operation, f"{trial.checkpoints}/step-*/__{rank}_0.distcp", seconds=3600, rank=rank)
    before = trial.newest()
    time.sleep(2)  # a save that had begun before may still end; the next one hangs, and then the training
    asked = time.monotonic()
    trial.stop(run)
    assert time.monotonic() - asked < GRACE_SECONDS + 10, run.output()
    assert trial.newest() <= before + 2
    trial.disk.heal()


def generation(trial: Trial) -> None:
    assert trial.disk is not None
    run = trial.start_and_save()
    trial.disk.fail("read", f"{trial.checkpoints}/generation.json", errno.EIO)
    time.sleep(trial.rng.random() * 4)
    trial.disk.heal()
    before = trial.newest()
    run.wait_for(lambda: trial.newest() > before)
    trial.stop(run)


def late_listing(trial: Trial) -> None:
    disk = trial.disk
    assert disk is not None
    older = trial.start_and_save()
    # While the next checkpoint is written, so that the folder is listed before the save, not to delete old checkpoints.
    older.wait_for(lambda: any(trial.checkpoints.glob(f"step-*.{'?' * 32}{PARTIAL_SUFFIX}")))
    listing = disk.fail("list", trial.checkpoints, rank=0, times=1, seconds=3600)
    older.wait_for(lambda: disk.has_struck(listing))
    end_the_older(trial, older, trial.start_and_save())


def late_commit(trial: Trial) -> None:
    disk = trial.disk
    assert disk is not None
    older = trial.start_and_save()
    commit = disk.fail("rename", trial.checkpoints / "step-*[0-9]", rank=0, times=1, seconds=3600)
    older.wait_for(lambda: disk.has_struck(commit))
    removal = disk.fail("remove", trial.checkpoints / "*.partial/*", rank=0, times=1, seconds=3600, skip=1)
    newer = trial.start()
    newer.wait_for(lambda: disk.has_struck(removal))
    disk.heal(commit)
    time.sleep(2)  # in which the older one would delete checkpoints, had it committed what is half removed
    end_the_older(trial, older, newer)


def end_the_older(trial: Trial, older: Run, newer: Run) -> None:
    """Let the hanging operations continue: of two starts the older one ends, and changes nothing of the newer one."""
    assert trial.disk is not None
    trial.disk.heal()
    expect(older, REJECTED)
    assert "now saves to" in older.output(), older.output()
    before = trial.newest()
    newer.wait_for(lambda: trial.newest() > before + 2)
    assert not list(trial.checkpoints.glob("*.superseded*")), newer.output()
    trial.stop(newer)


def changed_data(trial: Trial) -> None:
    file = trial.training_data
    content, status = file.read_bytes(), file.stat()
    place = content.index(b"words", trial.rng.randrange(len(content) - 1000))
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"swore")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    run = trial.start()
    expect(run, REJECTED)
    assert "data.path" in run.output(), run.output()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    trial.stop(trial.start_and_save())


def flipped_read(trial: Trial) -> None:
    """It is read again, or the checkpoint before is loaded, or the start ends with an error."""
    assert trial.disk is not None
    before = trial.newest()
    names = ("manifest.json", "config.toml", "index.json", "__0_0.distcp", "__1_0.distcp")
    file = step_folder(trial.checkpoints, before) / trial.rng.choice(names)
    rank, skip = trial.rng.randrange(RANKS), trial.rng.randrange(4)
    trial.disk.fail("flip", file, rank=rank, times=1, skip=skip)
    run = trial.start()
    try:
        run.wait_for(lambda: trial.newest() > before)
    except AssertionError:  # it has ended
        expect(run, REJECTED)
        trial.disk.heal()
        run = trial.start_and_save()
    trial.disk.heal()
    trial.stop(run)
    for path in trial.checkpoints.glob("*.damaged*"):  # as the start took it for
        shutil.rmtree(path)


FAULTS = (
    *(full_disk, read_error, all_damaged, stop_in_validation, hung_save, generation),
    *(late_listing, late_commit, changed_data, flipped_read),
)


def disturb(trial: Trial, rounds: list[Callable[[Trial], None]]) -> int:
    """Make all ``rounds``; returns the step that the run has come to when it is finished a little later."""
    for number, make in enumerate(rounds, 1):
        name = make.__name__
        make(trial)
        trial.rounds[name] += 1
        for step in saved_steps(trial.checkpoints):
            folder = step_folder(trial.checkpoints, step)
            checkpoint = LocalCheckpoint(folder)
            verify(checkpoint, read_manifest(checkpoint).files)
        print(f"{number}/{len(rounds)} {name}: newest step {trial.newest()}", flush=True)
    steps = trial.newest() + 4
    expect(trial.start(steps), 0)
    left = [path.name for path in trial.checkpoints.iterdir() if not path.name.removeprefix("step-").isdecimal()]
    assert left == ["generation.json"], left
    return steps


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder / f"checkpoint/step-{step}", file)
    loaded: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return loaded


def compare(trial: Trial, undisturbed: Trial, steps: int) -> tuple[int, int]:
    """Return the number of tensors and of steps compared, all of which must be bitwise equal."""
    expect(undisturbed.start(steps), 0)
    ours, theirs = tensors(trial.folder, steps), tensors(undisturbed.folder, steps)
    assert ours.keys() == theirs.keys()
    assert not (different := [name for name in theirs if not torch.equal(ours[name], theirs[name])]), different
    different_steps = steps_that_differ(trial.lines(), undisturbed.lines())
    assert not different_steps, different_steps
    return len(ours), len({step for step, _ in numbers_in(trial.lines())})


def numbers_in(lines: list[dict[str, Any]]) -> list[tuple[int, tuple[float, ...]]]:
    """Step, and loss, gradient norm and learning rate, of each line of a training step, also of repeated ones."""
    keys = ("loss", "grad_norm", "lr")
    return [
        (line["step"], tuple(line[key] for key in keys)) for line in lines if "loss" in line and "event" not in line
    ]


def steps_that_differ(lines: list[dict[str, Any]], undisturbed: list[dict[str, Any]]) -> list[int]:
    """The steps of which any line has other numbers than in the undisturbed run. On a full disk lines are dropped."""
    expected = dict(numbers_in(undisturbed))
    return sorted({step for step, numbers in numbers_in(lines) if expected[step] != numbers})


def run_in_s3(folder: Path, kills: int, faults: int, rng: random.Random) -> None:
    """``--storage s3``: see ``crash_test_s3.py``."""
    import crash_test_s3

    server, proxy, environment = crash_test_s3.set_up(folder)
    atexit.register(server.stop)
    disks = [folder / f"disk-{rank}" for rank in range(RANKS)]
    data, validation_data = folder / "training.jsonl", folder / "validation.txt"
    write_training_data(data)

    def start(name: str, checkpoints: str, steps: int) -> Run:
        options = [*RUN.split(), *crash_test_s3.SMALL_MODEL.split(), "--training.steps", str(steps)]
        options += ["--checkpoint.folder", checkpoints]
        options += ["--data.path", str(data), "--validation.path", str(validation_data), "--job.import", "short_pauses"]
        return Processes(folder / name, options, environment, disks)

    crash_test_s3.lose(disks)
    trial = crash_test_s3.Trial(server, proxy, rng, start, lambda: crash_test_s3.lose(disks), RANKS)
    rounds = [crash_test_s3.kill] * kills
    rounds += [crash_test_s3.FAULTS[number % len(crash_test_s3.FAULTS)] for number in range(faults)]
    rng.shuffle(rounds)
    steps = crash_test_s3.disturb(trial, [crash_test_s3.kill, *rounds])
    undisturbed = start("undisturbed", str(folder / "checkpoint"), steps)
    expect(undisturbed, 0)
    ours = crash_test_s3.tensors(trial.storage.open(steps))
    theirs = crash_test_s3.tensors(LocalCheckpoint(step_folder(folder / "checkpoint", steps)))
    assert ours.keys() == theirs.keys()
    assert not (different := [name for name in theirs if not torch.equal(ours[name], theirs[name])]), different
    lines = [metrics_in(disks[0] / name) for name in ("run", "undisturbed")]
    made = ", ".join(f"{count} x {name}" for name, count in sorted(trial.rounds.items()))
    print(f"{made} ({trial.inside_saves} kills inside saves); {steps} steps: {len(ours)} tensors bitwise equal")
    # Also those from before a disk was lost, whose metrics come from checkpoints.
    missing = set(range(1, steps + 1)) - {step for step, _ in numbers_in(lines[0])}
    differ = sorted({*missing, *steps_that_differ(*lines)})
    print(f"{len(differ)} of {steps} steps differ; nothing is left in the bucket")
    assert not differ, differ


def run_composed(folder: Path, options: argparse.Namespace, disk: DiskFaults) -> None:
    """``--composed``: see ``crash_test_composed.py``."""
    import crash_test_composed
    import crash_test_s3

    (folder / "crash_test_settings.py").write_text(crash_test_composed.SETTINGS)
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent.parent.parent)])}
    checkpoints, proxy = "checkpoint", None
    if options.storage == "s3":
        server, proxy, settings = crash_test_s3.set_up(folder)
        atexit.register(server.stop)
        environment = {**settings, **environment}
        checkpoints = crash_test_s3.URL
    data, validation_data = folder / "training.jsonl", folder / "validation.txt"
    write_training_data(data)

    def start(dump: Path, checkpoints: str, data: Path, ranks: int, steps: int, sleep_seconds: float = 0.1) -> Any:
        words = [*OPTIONS.split(), *RUN.split(), *crash_test_s3.SMALL_MODEL.split(), "--training.sums", "exact"]
        words += ["--training.steps", str(steps), "--job.dump_folder", str(dump), "--checkpoint.folder", checkpoints]
        words += ["--data.path", str(data), "--validation.path", str(validation_data)]
        words += ["--job.import", "crash_test_settings"]
        settings = {
            **environment,
            **disk.environment,
            "OMP_NUM_THREADS": "1",
            "CRASH_TEST_SLEEP_SECONDS": str(sleep_seconds),
        }
        return crash_test_composed.Script(ranks, words, settings, folder / "run.log")

    trial = crash_test_composed.Trial(folder, start, data, disk, proxy, checkpoints)
    newest = crash_test_composed.disturb(trial, options.composed, options.seed, options.kinds, options.minutes)
    steps = max(newest, *(step for step, _ in numbers_in(metrics_in(trial.dump)))) + 4
    undisturbed = folder / "undisturbed"
    for dump, checkpoints in ((trial.dump, trial.checkpoints), (undisturbed, "checkpoint")):
        finished = start(dump, checkpoints, trial.data, 1, steps, sleep_seconds=0)
        assert finished.wait() == 0, finished.output()
    assert not [
        name for name in trial.storage().names() if not name.removeprefix("step-").partition(".")[0].isdecimal()
    ]
    ours = crash_test_s3.tensors(trial.storage().open(steps))
    theirs = crash_test_s3.tensors(LocalCheckpoint(step_folder(undisturbed / "checkpoint", steps)))
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    lines = [metrics_in(dump) for dump in (trial.dump, undisturbed)]
    different_steps, compared = steps_that_differ(*lines), len({step for step, _ in numbers_in(lines[0])})
    made = ", ".join(f"{count} x {name}" for name, count in sorted(trial.faults.items()))
    print(f"{trial.rounds} rounds: {made}; {steps} steps: {len(different)} of {len(ours)} tensors differ")
    print(f"{len(different_steps)} of {compared} steps differ")
    assert not different, different
    assert not different_steps, different_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--composed", type=int, default=0, help="rounds of crash_test_composed.py instead")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no round of --composed begins later")
    parser.add_argument("--kinds", nargs="+", help="kinds of the faults of --composed or --replicas; default: all")
    parser.add_argument("--grains", action="store_true", help="another layout at each start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", choices=["local", "s3"], default="local", help="s3: crash_test_s3.py")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs"), help="folder in which crash_test is created again"
    )
    parser.add_argument(
        "--replicas", type=int, help="so many replicas, whose faults are those of crash_test_replicas.py"
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a replica")
    parser.add_argument("--layout", help="of replicas: fsdp, tensor, pipeline, or muon")
    options = parser.parse_args()
    if options.composed:
        from crash_test_composed import kinds_of

        if unknown := {*(options.kinds or ())} - {*kinds_of(options.storage)}:
            parser.error(f"--kinds: {' '.join(sorted(unknown))}; there are {' '.join(kinds_of(options.storage))}")
        options.kinds = options.kinds or kinds_of(options.storage)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with the ranks
    rng = random.Random(options.seed)
    folder = options.folder.absolute() / "crash_test"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    validation_data = folder / "validation.txt"
    validation_data.write_text("".join(f"{rng.random()} and other words that nobody trains on\n" for _ in range(5000)))
    if options.replicas:
        import crash_test_replicas

        crash_test_replicas.run(folder, options, rng)
        return
    if options.composed:
        run_composed(folder, options, DiskFaults(folder))
        return
    if options.storage == "s3":
        run_in_s3(folder, options.kills, options.faults, rng)
        return
    disk = DiskFaults(folder) if options.faults else None

    layouts: Counter[str] = Counter()

    def start(where: Path, words: list[str]) -> Run:
        ranks = RANKS
        if options.grains:
            layout, ranks = rng.choice(list(LAYOUTS.items()))
            layouts[layout] += 1
            words = [*words, *GRAINS.split(), *layout.split()]
        return Processes(where, words, disk.environment if disk else {}, ranks=ranks)

    disturbed, undisturbed = (
        Trial(folder / name, rng, disk, start, validation_data) for name in ("run", "undisturbed")
    )
    rounds = [kill] * options.kills + [FAULTS[number % len(FAULTS)] for number in range(options.faults)]
    rng.shuffle(rounds)
    rounds.insert(0, kill)  # some rounds need checkpoints
    steps = disturb(disturbed, rounds)
    assert disturbed.inside_saves or options.kills < 10, "no kill fell inside a save"
    equal, compared = compare(disturbed, undisturbed, steps)
    made = ", ".join(f"{count} x {name}" for name, count in sorted(disturbed.rounds.items()))
    print(f"{made} ({disturbed.inside_saves} kills inside saves); {steps} steps: {equal} tensors bitwise equal")
    print(f"0 of {compared} steps differ")
    for layout, starts in layouts.items():
        print(f"{starts} starts with {layout or 'data parallelism'}")


if __name__ == "__main__":
    main()
