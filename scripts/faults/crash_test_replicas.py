"""``python scripts/faults/crash_test.py --replicas 3 --kills 100``: replicas of a run die at random moments.

Each round waits until all replicas train, and after a random time injects one fault (``FAULTS``):

- kill: SIGKILL to all ranks of one replica;
- kill_rank: SIGKILL to one rank; those that are left end by themselves, or are killed when they have noticed;
- kill_two: SIGKILL to two replicas at once;
- kill_joining: SIGKILL to a replica, and again while it starts or takes the state of another one;
- kill_all: SIGKILL to all; they resume from the newest checkpoint;
- hang: SIGSTOP to a replica for longer than ``replicas.collective_timeout_seconds``, then SIGCONT;
- lighthouse: a new lighthouse takes the place of the old one;
- kill_without_lighthouse: a replica dies while there is no lighthouse;
- lose_node: a replica and the lighthouse die, and the replica that is started again is the first one that a new
  lighthouse hears of;
- hang_alive: the training thread of a replica waits, while its process and its heartbeats continue;
- start_twice: a second process of a replica starts while the first one lives, which must end with 2;
- start_slowly: a replica that is started waits before it registers, until all others have saved, and died;
- pause_alone: the last living replica is suspended, and continues when others have resumed from a checkpoint.

What died is started again; no other replica may end. In the end all replicas are asked to stop, and some are started
again with the last step as the last one of the run: they change nothing. Only the newest checkpoint is kept. It, and
each loss and gradient norm that any replica has logged, must be bitwise those of one job without replicas; the metrics
of the run have each step once, in order, but for those that are computed again from a checkpoint.

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
from typing import Any

from crash_test import FOR_EVER, OPTIONS, metrics_in, numbers_in, write_training_data
from crash_test_s3 import SMALL_MODEL, tensors

from torchtrain.checkpoint.storage import open_storage
from torchtrain.errors import SupersededError
from torchtrain.metrics.history import UNDOING

TIMEOUT_SECONDS = 300
HELD, HANGS = "CRASH_TEST_HELD", "CRASH_TEST_HANGS"
"""Environment variables with a file; while it exists, the replica does not register, or waits in a step."""
COLLECTIVE_SECONDS = 5
RUN = f"""
{SMALL_MODEL} --training.sums exact --training.global_batch_size 12 --checkpoint.interval 5
--checkpoint.interval_minutes 0 --checkpoint.keep_latest_k 1 --metrics.log_freq 1 --lr_scheduler.warmup_steps 2
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

    from torchtrain.config.registry import HOOKS
    from torchtrain.metrics.hooks import Hook
    from torchtrain.plugins.replicas.group import ReplicaGroup
    from torchtrain.train import main

    def wait_while(variable: str) -> None:
        file = Path(environment.get(variable, "/none"))
        while file.exists():
            time.sleep(0.02)

    connect = ReplicaGroup.connect

    def connect_later(*arguments: Any, **named: Any) -> None:
        wait_while(HELD)
        connect(*arguments, **named)

    class Hang(Hook):
        def before_microbatch(self, index: int) -> None:  # noqa: ARG002
            wait_while(HANGS)

    ReplicaGroup.connect = connect_later  # type: ignore[method-assign]
    HOOKS.register("hang")(lambda _: Hang())
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
    replaced: list[BaseProcess] = field(default_factory=list)
    """Processes of replicas of which others have been started, and which have not ended yet."""
    started: dict[int, float] = field(default_factory=dict)
    may_end: set[int] = field(default_factory=set)
    """Replicas of which a rank was killed, so that the others end by themselves."""
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
            own |= {variable: str(self.flag(variable, name)) for variable in (HELD, HANGS)}
            process = self.context.Process(target=train, args=(options, own, self.log(name)), daemon=True)
            process.start()
            started.append(process)
        return started

    def flag(self, variable: str, name: object) -> Path:
        """The file of ``variable`` of a replica."""
        return self.folder / f"{variable}-{name}"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start(self, replica: int, steps: int = FOR_EVER) -> None:
        self.may_end.discard(replica)
        words = [*REPLICA.split(), "--replicas.lighthouse", f"http://127.0.0.1:{self.port}"]
        words += ["--replicas.id", str(replica)]
        words += ["--checkpoint.folder", self.checkpoints] if self.checkpoints else []
        self.started[replica] = time.time()
        self.processes[replica] = self.job(str(replica), self.dump, steps, words)

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
                if replica in self.may_end and any(codes):
                    # A rank whose neighbor was killed ends with 1; torchrun would kill it.
                    assert set(codes) <= {None, 1, -signal.SIGKILL, -signal.SIGABRT}, self.tail(replica)
                    self.kill(replica)
                    self.deaths -= 1
                    self.start(replica)
                else:
                    assert set(codes) <= {None, -signal.SIGKILL}, self.tail(replica)
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

    def since_start(self, replica: int) -> list[dict[str, Any]]:
        """The lines of metrics of the process of a replica that was started last."""
        lines = metrics_in(self.dump / "replicas" / str(replica))
        started = self.started[replica]
        newest = [number for number, line in enumerate(lines) if line.get("time", 0) > started]
        return lines[newest[0] :] if newest else []

    def usual_step(self) -> float:
        """Median duration of the last steps, in seconds."""
        lines = metrics_in(self.dump / "replicas/0")
        return statistics.median(line["step_seconds"] for line in lines[-20:] if "loss" in line)

    def newest_checkpoint(self) -> int:
        return max(open_storage(self.checkpoints or str(self.dump / "checkpoint")).steps(), default=0)

    def end(self) -> None:
        for process in [*self.replaced, *(process for of in self.processes.values() for process in of)]:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.join()
        self.kill_lighthouse()


def _choose(trial: Trial, count: int) -> list[int]:
    return trial.rng.sample(range(trial.replicas), min(count, trial.replicas - 1))


def kill(trial: Trial) -> None:
    trial.kill(*_choose(trial, 1))


def kill_rank(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    trial.may_end.add(victim)
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


def lose_node(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    trial.flag(HELD, victim).touch()
    trial.kill_lighthouse()
    trial.kill(victim)
    trial.start(victim)
    time.sleep(trial.rng.uniform(2, 12))
    trial.start_lighthouse()
    while socket.socket().connect_ex(("127.0.0.1", trial.port)):
        time.sleep(0.02)
    trial.flag(HELD, victim).unlink()


def hang_alive(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    trial.flag(HANGS, victim).touch()
    time.sleep(COLLECTIVE_SECONDS + trial.rng.uniform(1, 5))
    trial.flag(HANGS, victim).unlink()


def start_twice(trial: Trial) -> None:
    (victim,) = _choose(trial, 1)
    trial.replaced += trial.processes[victim]
    trial.start(victim)

    def has_ended() -> bool:
        codes = {process.exitcode for process in trial.replaced}
        assert codes <= {None, SupersededError.exit_code}, (codes, trial.tail(victim))
        return None not in codes

    trial.wait_for(has_ended)
    trial.replaced.clear()


def start_slowly(trial: Trial) -> None:
    slow, *_ = _choose(trial, 1)
    trial.flag(HELD, slow).touch()
    trial.kill(slow)
    trial.start(slow)
    before = trial.newest_checkpoint()
    trial.wait_for(lambda: trial.newest_checkpoint() > before)
    time.sleep(trial.rng.uniform(0, 2))
    trial.kill(*(replica for replica in trial.processes if replica != slow))
    time.sleep(trial.rng.uniform(0, 8))
    trial.flag(HELD, slow).unlink()


def pause_alone(trial: Trial) -> None:
    left, *others = trial.rng.sample(range(trial.replicas), trial.replicas)
    trial.kill(*others)
    before = trial.step()
    steps = trial.rng.randrange(2, 8)
    trial.wait_for(lambda: trial.step(left) > before + steps)
    time.sleep(trial.rng.uniform(0, 2 * trial.usual_step()))
    trial.send(left, signal.SIGSTOP)
    for other in others:
        trial.start(other)

    def have_resumed() -> bool:
        return all(len(numbers_in(trial.since_start(other))) > 1 for other in others)

    trial.wait_for(have_resumed)
    time.sleep(trial.rng.uniform(0, 3))
    trial.send(left, signal.SIGCONT)


Fault = Callable[[Trial], None]
RARE: tuple[Fault, ...] = (
    *(kill_two, kill_joining, kill_all, hang, lighthouse, kill_without_lighthouse),
    *(lose_node, hang_alive, start_twice, start_slowly, pause_alone),
)
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
    return trial.newest_checkpoint()


def start_again(trial: Trial, steps: int) -> None:
    """Start replicas of the run, which is complete after ``steps``: they change nothing."""

    def outputs() -> dict[str, bytes]:
        files = [*trial.dump.glob("metrics*"), *trial.dump.glob("checkpoint/step-*/*")]
        return {str(file): file.read_bytes() for file in files if file.is_file()}

    before = outputs()
    for replica in range(trial.replicas):
        trial.start(replica, steps)
    processes = [process for of in trial.processes.values() for process in of]
    for process in processes:
        process.join(TIMEOUT_SECONDS)
    assert {process.exitcode for process in processes} == {0}, "\n".join(map(trial.tail, trial.processes))
    assert outputs() == before


def require_order(lines: list[dict[str, Any]]) -> None:
    """Assert that each step comes once, in order, but for those after the step of a start or a rollback."""
    last = 0
    for line in lines:
        if line.get("event") in UNDOING:
            assert line["step"] <= last, (line, last)
            last = line["step"]
        elif "loss" in line and "event" not in line:
            assert line["step"] == last + 1, f"step {line['step']} follows step {last}"
            last = line["step"]


def compare(trial: Trial, steps: int) -> tuple[int, int]:
    """Train ``steps`` as one undisturbed job; returns the number of tensors and of logged steps that were compared."""
    undisturbed = trial.folder / "undisturbed"
    for process in trial.job("undisturbed", undisturbed, steps, []):
        process.join()
        assert process.exitcode == 0, trial.log("undisturbed").read_text()
    expected = dict(numbers_in(metrics_in(undisturbed)))
    compared = 0
    require_order(metrics_in(trial.dump))
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
    rare = [fault for fault in RARE if fault.__name__ in (options.kinds or (fault.__name__,))]
    rounds += [rare[number % len(rare)] for number in range(options.faults)]
    rng.shuffle(rounds)
    steps = disturb(trial, rounds)
    start_again(trial, steps)
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
