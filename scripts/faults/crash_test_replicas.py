"""``python scripts/faults/crash_test.py --replicas 3 --kills 100``: replicas of a run die at random moments.

Each round waits until all replicas train, and after a random time injects one fault (``FAULTS``):

- kill: SIGKILL to all ranks of one replica;
- kill_rank: SIGKILL to one rank; those that are left end by themselves, or are killed when they have noticed;
- kill_two: SIGKILL to two replicas at once;
- kill_joining: SIGKILL to a replica, and again while it starts or takes the state of another one;
- kill_all: SIGKILL to all; they resume from the newest checkpoint;
- hang: SIGSTOP to a replica for longer than ``replicas.collective_timeout_seconds``, then SIGCONT;
- lighthouse: a new lighthouse takes the place of the old one;
- kill_without_lighthouse: a replica dies while there is no lighthouse.

What died is started again. In the end all replicas are asked to stop. The last checkpoint, and each loss and gradient
norm that any of them has logged, must be bitwise those of one job without replicas.

The ranks are forked from a server that has imported PyTorch, so that a start takes about a second.
"""

import argparse
import atexit
import multiprocessing
import os
import random
import signal
import socket
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from crash_test import FOR_EVER, OPTIONS, metrics_in, numbers_in, write_training_data
from crash_test_s3 import SMALL_MODEL, tensors

from torchtrain.checkpoint.storage import open_storage

TIMEOUT_SECONDS = 300
COLLECTIVE_SECONDS = 5
RUN = f"""
{SMALL_MODEL} --training.sums exact --training.global_batch_size 12 --checkpoint.interval 5
--checkpoint.interval_minutes 0 --metrics.log_freq 1 --lr_scheduler.warmup_steps 2
--lr_scheduler.decay_type constant --report.no_enable
"""
REPLICA = f"""
--replicas.host 127.0.0.1 --replicas.on_stop all --replicas.lighthouse_retries 60
--replicas.collective_timeout_seconds {COLLECTIVE_SECONDS} --replicas.max_discarded 100
"""
LAYOUTS = {
    "fsdp": "",
    "tensor": "--parallelism.tensor_parallel_degree 2",
    "pipeline": "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 2",
    "muon": "--optimizer.name muon --ema.enable",
}


def serve_lighthouse(port: int, host: str = "127.0.0.1") -> None:
    """Be a lighthouse at ``port`` of ``host``, which may still be in use by connections of the one before."""
    os.environ["RUST_LOG"] = "warn"
    from torchft.coordination import LighthouseServer

    while True:
        try:
            server = LighthouseServer(
                bind=f"{host}:{port}",
                min_replicas=1,
                join_timeout_ms=60_000,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=5_000,  # its default
            )
            break
        except RuntimeError:
            time.sleep(0.1)
    while server:
        time.sleep(1)


def train(options: list[str], environment: dict[str, str], log: Path) -> None:
    """Train as one rank, and end the process."""
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import torch

    from torchtrain.train import main

    torch.set_num_threads(1)
    os._exit(main(options))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass
class Trial:
    """A run of replicas that is disturbed.

    Attributes:
        seconds_lost: for each fault, by kind: the time from it to the end of the next step, less that of a usual step.
        seconds_to_join: from each start of a replica to its first step.
    """

    folder: Path
    rng: random.Random
    replicas: int = 3
    ranks: int = 1
    options: str = ""
    checkpoints: str = ""
    """URL of the checkpoints; empty: in the dump folder."""
    environment: dict[str, str] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    seconds_lost: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds_to_join: list[float] = field(default_factory=list)
    processes: dict[int, list[BaseProcess]] = field(default_factory=dict)
    deaths: int = 0

    def __post_init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torchtrain.trainer", "torchtrain.train"])
        self.data = self.folder / "training.jsonl"
        write_training_data(self.data)
        self.dump, self.port = self.folder / "run", free_port()
        self.start_lighthouse()
        atexit.register(self.end)

    def start_lighthouse(self) -> None:
        self.lighthouse = self.context.Process(target=serve_lighthouse, args=(self.port,), daemon=True)
        self.lighthouse.start()

    def kill_lighthouse(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.join()

    def job(self, name: str, dump: Path, steps: int, words: list[str]) -> list[BaseProcess]:
        """The processes of a job, started."""
        port = free_port()
        options = [*OPTIONS.split(), *RUN.split(), *self.options.split(), "--data.path", str(self.data)]
        options += ["--training.steps", str(steps), "--job.dump_folder", str(dump), *words]
        common = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = []
        for rank in range(self.ranks):
            own = {**self.environment, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            process = self.context.Process(target=train, args=(options, own, self.log(name)), daemon=True)
            process.start()
            started.append(process)
        return started

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, replica: int) -> None:
        words = [*REPLICA.split(), "--replicas.lighthouse", f"http://127.0.0.1:{self.port}"]
        words += ["--replicas.id", str(replica)]
        words += ["--checkpoint.folder", self.checkpoints] if self.checkpoints else []
        self.processes[replica] = self.job(str(replica), self.dump, FOR_EVER, words)

    def is_over(self, replica: int) -> bool:
        return all(process.exitcode is not None for process in self.processes[replica])

    def kill(self, *replicas: int) -> None:
        for replica in replicas:
            for process in self.processes[replica]:
                process.kill()
        for replica in replicas:
            for process in self.processes[replica]:
                process.join()
            self.deaths += 1

    def send(self, replica: int, number: int) -> None:
        for process in self.processes[replica]:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)

    def step(self, replica: int | None = None) -> int:
        """The last step that a replica, or any of them, has logged."""
        names = range(self.replicas) if replica is None else [replica]
        steps = [0]
        for name in names:
            steps += [step for step, _ in numbers_in(metrics_in(self.dump / "replicas" / str(name)))[-1:]]
        return max(steps)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            for replica, processes in self.processes.items():
                codes = [process.exitcode for process in processes]
                # A rank whose neighbor was killed ends with 1; torchrun would kill it.
                assert set(codes) <= {None, 0, 1, 75, -signal.SIGKILL, -signal.SIGABRT}, self.tail(replica)
                if any(codes) and None in codes:
                    self.kill(replica)
                    self.deaths -= 1
                if any(codes) and 75 not in codes:
                    self.start(replica)
            assert time.monotonic() < deadline, "\n".join(self.tail(replica) for replica in self.processes)
            time.sleep(0.005)

    def tail(self, replica: int) -> str:
        codes = [process.exitcode for process in self.processes[replica]]
        lines = self.log(str(replica)).read_text(errors="replace").splitlines()
        return "\n".join([f"replica {replica}, exit codes {codes}:", *lines[-40:]])

    def all_train(self) -> None:
        """Wait until each replica takes part in the steps, and has for two of them."""
        self.wait_for(lambda: all(self.step(of) >= self.step() - 1 for of in self.processes) and self.step() > 0)
        before = self.step()
        self.wait_for(lambda: all(self.step(of) >= before + 2 for of in self.processes))

    def usual_step(self) -> float:
        """Median duration of the last steps, in seconds."""
        lines = metrics_in(self.dump / "replicas/0")
        return statistics.median(line["step_seconds"] for line in lines[-20:] if "loss" in line)

    def end(self) -> None:
        for replica in self.processes:
            self.send(replica, signal.SIGCONT)
            for process in self.processes[replica]:
                process.kill()
                process.join()
        self.kill_lighthouse()


def _choose(trial: Trial, count: int) -> list[int]:
    return trial.rng.sample(range(trial.replicas), min(count, trial.replicas - 1))


def kill(trial: Trial) -> None:
    trial.kill(*_choose(trial, 1))


def kill_rank(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    process = trial.rng.choice(trial.processes[victim])
    process.kill()
    process.join()
    trial.deaths += 1


def kill_two(trial: Trial) -> None:
    trial.kill(*_choose(trial, 2))


def kill_joining(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    trial.kill(victim)
    trial.start(victim)
    time.sleep(trial.rng.uniform(0.5, 6.0))
    trial.kill(victim)


def kill_all(trial: Trial) -> None:
    trial.kill(*range(trial.replicas))


def hang(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    trial.send(victim, signal.SIGSTOP)
    time.sleep(COLLECTIVE_SECONDS + trial.rng.uniform(1, 5))
    trial.send(victim, signal.SIGCONT)


def lighthouse(trial: Trial) -> None:
    trial.kill_lighthouse()
    time.sleep(trial.rng.uniform(0, 2))
    trial.start_lighthouse()


def kill_without_lighthouse(trial: Trial) -> None:
    trial.kill_lighthouse()
    trial.kill(*_choose(trial, 1))
    time.sleep(trial.rng.uniform(0, 2))
    trial.start_lighthouse()


Fault = Callable[[Trial], None]
RARE: tuple[Fault, ...] = (kill_two, kill_joining, kill_all, hang, lighthouse, kill_without_lighthouse)
FAULTS = (kill, kill_rank, *RARE)


def disturb(trial: Trial, rounds: list[Fault]) -> int:
    """Make all ``rounds``, and stop the run; returns its last step."""
    for replica in range(trial.replicas):
        trial.start(replica)
    for number, make in enumerate(rounds, 1):
        trial.all_train()
        usual = trial.usual_step()
        time.sleep(trial.rng.uniform(0, 4 * usual + 0.05))
        before, began = trial.step(), time.time()
        make(trial)
        started = time.time()
        ended = [replica for replica in trial.processes if trial.is_over(replica)]
        for replica in ended:
            trial.start(replica)
        trial.wait_for(lambda before=before: trial.step() > before + 1)  # the next one may have been complete
        trial.seconds_lost[make.__name__].append(max(0.0, time.time() - began - 2 * usual))
        trial.wait_for(lambda ended=ended: all(trial.step(of) >= trial.step() - 1 for of in ended))
        if ended:
            trial.seconds_to_join.append(time.time() - started)
        trial.faults[make.__name__] += 1
        print(f"{number}/{len(rounds)} {make.__name__}: step {trial.step()}, {trial.deaths} deaths", flush=True)
    trial.all_train()
    for replica in trial.processes:
        trial.send(replica, signal.SIGTERM)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not all(map(trial.is_over, trial.processes)):
        assert time.monotonic() < deadline, "\n".join(map(trial.tail, trial.processes))
        time.sleep(0.05)
    codes = {process.exitcode for processes in trial.processes.values() for process in processes}
    assert codes == {75}, "\n".join(map(trial.tail, trial.processes))
    steps = open_storage(trial.checkpoints or str(trial.dump / "checkpoint")).steps()
    return steps[-1]


def compare(trial: Trial, steps: int) -> tuple[int, int]:
    """Train ``steps`` as one undisturbed job; returns the number of tensors and of logged steps that were compared."""
    undisturbed = trial.folder / "undisturbed"
    for process in trial.job("undisturbed", undisturbed, steps, []):
        process.join()
        assert process.exitcode == 0, trial.log("undisturbed").read_text()
    expected = dict(numbers_in(metrics_in(undisturbed)))
    compared = 0
    folders = [trial.dump, *(trial.dump / "replicas" / str(replica) for replica in trial.processes)]
    for folder in folders:
        for step, numbers in numbers_in(metrics_in(folder)):
            assert step > steps or numbers == expected[step], (
                f"{folder}: step {step} has {numbers}, not {expected[step]}"
            )
            compared += 1
    of_run = {step for step, _ in numbers_in(metrics_in(trial.dump))}
    assert of_run >= set(range(1, steps + 1)), sorted(set(range(1, steps + 1)) - of_run)
    ours = tensors(open_storage(trial.checkpoints or str(trial.dump / "checkpoint")).open(steps))
    theirs = tensors(open_storage(str(undisturbed / "checkpoint")).open(steps))
    different = [name for name, tensor in theirs.items() if not tensor.equal(ours[name])]
    assert ours.keys() == theirs.keys()
    assert not different, different
    return len(theirs), compared


def run(folder: Path, options: argparse.Namespace, rng: random.Random) -> None:
    """``--replicas``."""
    words, environment, checkpoints = LAYOUTS[options.layout] if options.layout else "", {}, ""
    if options.storage == "s3":
        import crash_test_s3

        server, _, environment = crash_test_s3.set_up(folder)
        atexit.register(server.stop)
        checkpoints = crash_test_s3.URL
    trial = Trial(folder, rng, options.replicas, options.ranks, words, checkpoints=checkpoints, environment=environment)
    rounds = [rng.choice((kill, kill_rank)) for _ in range(options.kills)]
    rounds += [RARE[number % len(RARE)] for number in range(options.faults)]
    rng.shuffle(rounds)
    steps = disturb(trial, rounds)
    print(summary(trial, steps, *compare(trial, steps)))


def summary(trial: Trial, steps: int, tensors: int, lines: int) -> str:
    def spread(values: list[float]) -> str:
        ordered = sorted(values)
        return f"median {statistics.median(ordered):.1f}, at most {ordered[-1]:.1f}"

    made = [
        f"{count} x {name}: seconds lost {spread(trial.seconds_lost[name])}" for name, count in trial.faults.items()
    ]
    joined = f"seconds from a start to the first step: {spread(trial.seconds_to_join)}" if trial.seconds_to_join else ""
    counts = f"{trial.deaths} deaths; {steps} steps: {tensors} tensors and {lines} lines bitwise equal"
    return "\n".join([*made, joined, counts])
