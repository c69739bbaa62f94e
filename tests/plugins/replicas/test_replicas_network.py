"""Replicas on machines whose names nobody resolves, or that do not reach each other."""

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from forked_run import read_metrics
from network_namespaces import bridged_namespaces, enter_namespace
from replica_run import Kill, Replicas, curves, differences

pytest.importorskip("torchft")
SUBNET, NAMES = "10.79.0", ("torchtrain-replica-0", "torchtrain-replica-1")
BRIDGE_ADDRESS = f"{SUBNET}.254"
NOTHING_LISTENS = "http://127.0.0.1:9"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
FOR_EVER = "--training.steps=100000"
QUICK = ("--training.local_batch_size=3", "--training.mixed_precision_param=float32")


@pytest.fixture
def pods() -> Iterator[None]:
    with bridged_namespaces(NAMES, "train-replica", SUBNET):
        yield


@dataclass
class Pod(Kill):
    """In a network namespace, with a host name that nobody resolves, and proxies that do not exist."""

    namespace: str = ""

    def install(self) -> None:
        enter_namespace(self.namespace, f"nowhere-{self.namespace}")
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(socket.gethostname(), 0)
        os.environ.update({of: NOTHING_LISTENS for name in PROXIES for of in (name, name.upper())})
        super().install()


def start(replicas: Replicas, number: int, host: str = "") -> None:
    pod = Pod(namespace=NAMES[number], slow_seconds=0.1)
    replicas.start(str(number), pod, "--replicas.host", host or f"{SUBNET}.{number + 1}")


def last_step(replicas: Replicas, name: str) -> int:
    """The last step that a replica has logged itself."""
    return max((step for step, _, _ in curves(replicas.folder / "replicas" / name)), default=0)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_pods_join_die_and_join_again(rounds: int, pods: None, references: Any, started: Any) -> None:  # noqa: ARG001
    replicas = started(FOR_EVER, *QUICK, "--replicas.on_stop=all", members=2, host=BRIDGE_ADDRESS)

    def both_train() -> None:
        before = replicas.step()
        replicas.wait_until(lambda: all(last_step(replicas, name) > before + 1 for name in "01"))

    for number in (0, 1):
        start(replicas, number)
    for index in range(rounds):
        both_train()
        victim = index % 2
        replicas.kill(str(victim))
        replicas.wait_for_death(str(victim))
        start(replicas, victim)
    both_train()
    replicas.kill("0", number=signal.SIGTERM)
    assert replicas.wait() == {"0": [75], "1": [75]}, replicas.output()
    end = last_step(replicas, "0")
    assert differences(replicas.folder, references(f"--training.steps={end}", *QUICK)) == []


@pytest.mark.slow
def test_an_address_that_only_its_own_pod_reaches(pods: None, started: Any) -> None:  # noqa: ARG001
    """Replica 0 gives a wrong replicas.host: 1 cannot join, and says which address it has not reached."""
    replicas = started(FOR_EVER, "--replicas.collective_timeout_seconds=5", members=1, host=BRIDGE_ADDRESS)
    start(replicas, 0, "127.0.0.1")
    replicas.wait_until(lambda: replicas.step() >= 3)
    start(replicas, 1)
    replicas.wait_until(lambda: replicas.is_dead("1"))
    assert replicas.codes("1") == [74]
    error = replicas.log("1").read_text()
    assert "no connection with all members, which meet at 127.0.0.1:" in error
    assert "set replicas.host to an address at which the others reach it" in error
    before = replicas.step()
    replicas.wait_until(lambda: replicas.step() > before + 2)
    assert not replicas.is_dead("0")


@dataclass
class Unreachable(Kill):
    """Serves its state at an address where nothing listens."""

    def install(self) -> None:
        super().install()
        from torchtrain.plugins.replicas.transport import StateTransport

        StateTransport.address = lambda _: f"{NOTHING_LISTENS}/checkpoint/"  # type: ignore[method-assign]


@pytest.mark.slow
def test_only_a_replica_that_cannot_take_the_state_ends(references: Any, started: Any) -> None:
    options = ["--training.steps=20", "--replicas.max_discarded=2"]
    replicas = started(*options, "--replicas.collective_timeout_seconds=5", members=1)
    replicas.start("0", Unreachable(slow_seconds=0.05))
    replicas.wait_until(lambda: replicas.step() >= 3)
    replicas.start("1")
    assert replicas.wait() == {"0": [0], "1": [74]}, replicas.output()
    error = replicas.log("1").read_text()
    assert "error: rank 0 of this replica has not reached the others in 3 attempts" in error
    assert f"the state at {NOTHING_LISTENS}/checkpoint/" in error
    assert "Connection refused" in error
    assert differences(replicas.folder, references(options[0])) == []
    assert "step_discarded" not in [line.get("event") for line in read_metrics(replicas.folder)]
