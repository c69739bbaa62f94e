"""Runs of several replicas in forked processes, and places in a step at which one of them is killed."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from crash_test_replicas import serve_lighthouse
from forked_run import read_metrics, same_tensors, saved_tensors, train_and_exit
from forkserver import context, context_of, free_port

from torchtrain.models.llama import TransformerConfig

DEADLINE_SECONDS = 240
SHAPE = TransformerConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=32, vocab_size=4096, max_seq_len=16)
PLACES = (
    *("forward", "all-reduce", "before clipping", "before the vote", "after the vote"),
    *("between optimizers", "after the update", "in a save"),
)

CONFIG = """
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
decay_type = "constant"
[training]
local_batch_size = 1
global_batch_size = 12
seq_len = 16
steps = 12
sums = "exact"
[metrics]
log_freq = 1
enable_tensorboard = false
[report]
enable = false
[checkpoint]
interval = 5
interval_minutes = 0
keep_latest_k = 0
"""


@dataclass
class Kill:
    """SIGKILL of rank ``rank`` of a replica in ``step``, at one of ``PLACES``; also slows steps down."""

    step: int = 0
    place: str = ""
    rank: int = 0
    slow_seconds: float = 0.0
    connected: Path | None = None
    """A file that exists while the replica is registered at the lighthouse."""

    def now(self, place: str, step: int) -> None:
        """Die if this is the place."""
        if place == self.place and step >= self.step > 0 and int(os.environ["RANK"]) == self.rank:
            sys.stderr.write(f"killed: {place}, step {step}\n")
            sys.stderr.flush()
            if self.connected is not None:
                self.connected.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Patch the trainer of this process."""
        import torchtrain.checkpoint.manager as manager
        from torchtrain.config.registry import HOOKS
        from torchtrain.metrics.hooks import Hook
        from torchtrain.plugins.replicas.group import ReplicaGroup

        kill = self
        trainers: list[Any] = []

        def step() -> int:
            return int(trainers[0].step) + 1 if trainers else 0

        class Killer(Hook):
            def before_microbatch(self, index: int) -> None:
                time.sleep(kill.slow_seconds)
                kill.now("forward", step() if index == 1 else 0)

            def after_gradients(self) -> None:
                kill.now("before clipping", step())

            def after_update(self) -> None:
                kill.now("after the update", step())

        @HOOKS.register("killer")
        def killer(trainer: Any) -> Hook:
            trainers.append(trainer)
            parts = trainer.optimizer.optimizers
            original_steps = [part.step for part in parts]

            def step_of(number: int, *arguments: Any) -> None:
                original_steps[number](*arguments)
                if number == 0:
                    kill.now("between optimizers", step())

            for number, part in enumerate(parts):
                part.step = partial(step_of, number)
            return Killer()

        vote, reduce, save = ReplicaGroup.vote, ReplicaGroup.all_reduce, manager.save_tensors

        def voting(group: ReplicaGroup) -> None:
            kill.now("before the vote", step())
            vote(group)
            kill.now("after the vote", step())

        def reducing(group: ReplicaGroup, tensor: Any, *arguments: Any) -> None:
            if tensor.numel() > 500 and tensor.ndim == 1 and trainers:
                allreduce = group._pg.allreduce

                def killed(*of: Any) -> Any:
                    work = allreduce(*of)
                    kill.now("all-reduce", step())
                    return work

                with patch.object(group._pg, "allreduce", killed):
                    reduce(group, tensor, *arguments)
            else:
                reduce(group, tensor, *arguments)

        def saving(*arguments: Any, **options: Any) -> None:
            kill.now("in a save", step())
            save(*arguments, **options)

        ReplicaGroup.vote, ReplicaGroup.all_reduce = voting, reducing  # type: ignore[method-assign]
        manager.save_tensors = saving


def wait_for_all(folder: Path, members: int, kill: Kill) -> None:
    """Patch this process: it waits until so many replicas are registered at the lighthouse before its first step, and
    before the one in which it dies.

    So the first one to start does not train alone, none dies while it is alone, and the replicas have the order of
    their names.
    """
    from torchtrain.plugins.replicas.group import ReplicaGroup

    connect, begin = ReplicaGroup.connect, ReplicaGroup.begin

    def wait() -> None:
        while len(list(folder.glob("connected-*"))) < members:
            time.sleep(0.01)

    def connected(replica: ReplicaGroup, *arguments: Any, **options: Any) -> None:
        connect(replica, *arguments, **options)
        kill.connected = folder / f"connected-{replica.config.own_id}"
        kill.connected.touch()
        wait()

    def beginning(replica: ReplicaGroup, *arguments: Any) -> bool:
        if replica.step + 1 == kill.step:
            wait()
        return begin(replica, *arguments)

    ReplicaGroup.connect, ReplicaGroup.begin = connected, beginning  # type: ignore[method-assign]


def _call(hooks: Sequence[Callable[[], object]]) -> None:
    for hook in hooks:
        hook()


class Replicas:
    """A lighthouse, and replicas that train with ``folder`` as the dump folder; logs are in ``folder/logs``.

    ``host``: the address of the lighthouse.
    """

    def __init__(self, folder: Path, *options: str, ranks: int = 1, members: int = 3, host: str = "127.0.0.1") -> None:
        self.folder, self.options, self.ranks, self.members, self.host = folder, options, ranks, members, host
        (folder / "logs").mkdir(parents=True)
        (folder / "own.toml").write_text(CONFIG)
        self.port = free_port()
        self.lighthouse = self._start_lighthouse()
        self.processes: dict[str, list[Any]] = {}
        self.starts = 0
        self.deaths = 0

    def _start_lighthouse(self) -> Any:
        lighthouse = context().Process(target=serve_lighthouse, args=(self.port, self.host), daemon=True)
        lighthouse.start()

        def is_listening() -> bool:
            with socket.socket() as client:
                return client.connect_ex((self.host, self.port)) == 0

        self.wait_until(is_listening)
        return lighthouse

    def restart_lighthouse(self) -> None:
        """Kill the lighthouse, and start a new one, which knows nothing."""
        self.lighthouse.kill()
        self.lighthouse.join()
        self.lighthouse = self._start_lighthouse()

    def start(self, replica: str, kill: Kill | None = None, *options: str) -> None:
        """Start the processes of a replica, in place of dead ones."""
        port = free_port()
        self.starts += 1
        address = f"http://{self.host}:{self.port}"
        argv = ["--job.config_file", str(self.folder / "own.toml"), "--job.dump_folder", str(self.folder)]
        argv += ["--replicas.lighthouse", address, "--replicas.id", replica, "--replicas.host", "127.0.0.1"]
        argv += [*self.options, *options]
        kill = kill or Kill()
        hooks = [kill.install, partial(wait_for_all, self.folder, self.members, kill)]
        self.processes[replica] = [
            context_of(argv).Process(  # type: ignore[attr-defined]  # of each of them
                target=train_and_exit,
                args=(rank, self.ranks, port, argv, partial(_call, hooks), self.log(replica, rank), SHAPE),
                daemon=True,
            )
            for rank in range(self.ranks)
        ]
        for process in self.processes[replica]:
            process.start()

    def log(self, replica: str, rank: int = 0) -> Path:
        return self.folder / f"logs/{replica}-{rank}.log"

    def output(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted((self.folder / "logs").iterdir()))

    def kill(self, replica: str, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank of a replica, or to all of its ranks."""
        for of, process in enumerate(self.processes[replica]):
            if rank in (None, of) and process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def codes(self, replica: str) -> list[int | None]:
        return [process.exitcode for process in self.processes[replica]]

    def is_dead(self, replica: str) -> bool:
        return all(code is not None for code in self.codes(replica))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def wait_for_death(self, replica: str) -> None:
        """Wait until a replica that is killed at a place has died, and kill its other ranks, as torchrun does."""
        self.wait_until(lambda: any(code is not None for code in self.codes(replica)))
        self.kill(replica)
        self.wait_until(lambda: self.is_dead(replica))
        self.deaths += 1

    def wait(self) -> dict[str, list[int | None]]:
        """Wait for all replicas; returns their exit codes."""
        self.wait_until(lambda: all(map(self.is_dead, self.processes)))
        return {replica: self.codes(replica) for replica in self.processes}

    def step(self) -> int:
        """The last step in the run's metrics, or in those of a replica."""
        steps = [0]
        for folder in (self.folder, *self.folder.glob("replicas/*")):
            with suppress(ValueError):  # a line that is being written
                steps += [line["step"] for line in read_metrics(folder) if "loss" in line]
        return max(steps)

    def end(self) -> None:
        """Kill what is left."""
        for replica in self.processes:
            self.kill(replica, number=signal.SIGCONT)
            self.kill(replica)
            for process in self.processes[replica]:
                process.join()
        self.lighthouse.kill()
        self.lighthouse.join()


def curves(folder: Path) -> list[tuple[int, str, str]]:
    """Step, loss and gradient norm of each line of metrics in the dump folder, in its order, with all bits."""
    return [
        (line["step"], line["loss"].hex(), "NaN" if line["grad_norm"] is None else line["grad_norm"].hex())
        for line in read_metrics(folder)
        if "loss" in line and "event" not in line
    ]


@dataclass
class Reference:
    """A run that nothing has disturbed."""

    folder: Path
    tensors: dict[str, Any] = field(init=False)
    curve: dict[int, tuple[int, str, str]] = field(init=False)
    lines: set[tuple[int, str, str]] = field(init=False)
    """Also those that a rollback has undone."""

    def __post_init__(self) -> None:
        self.lines = set(curves(self.folder))
        self.curve = {line[0]: line for line in curves(self.folder)}
        self.tensors = saved_tensors(self.folder, max(self.curve))


def events(folder: Path) -> list[str]:
    """The events in the metrics of a run, in their order."""
    return [line["event"] for line in read_metrics(folder) if "event" in line]


def differences(run: Path, reference: Reference, steps: Sequence[int] | None = None) -> list[str]:
    """In what a run of replicas differs from the reference: last checkpoint, and each loss and norm that was logged.

    ``steps``: those of the lines of the run; default: each step of the reference once.
    """
    found = []
    last = max(reference.curve)
    if not same_tensors(saved_tensors(run, last), reference.tensors):
        found.append("the last checkpoint")
    main = curves(run)
    if [line[0] for line in main] != (sorted(reference.curve) if steps is None else list(steps)):
        found.append(f"steps {[line[0] for line in main]} in the run's metrics")
    for folder in (run, *run.glob("replicas/*")):
        found += [f"{folder.name}: {line}" for line in curves(folder) if line not in reference.lines]
    return found


def kill_and_restart(replicas: Replicas, victims: Sequence[str], kill: Kill) -> dict[str, list[int | None]]:
    """Train with all replicas, of which ``victims`` die, and start again; returns exit codes."""
    for number in range(replicas.members):
        replica = str(number)
        replicas.start(replica, kill if replica in victims else None)
    for victim in victims:
        replicas.wait_for_death(victim)
        assert "killed: " in replicas.log(victim, kill.rank).read_text()
        replicas.start(victim)
    return replicas.wait()
