"""Multi-node training: two torchrun agents with the c10d rendezvous, on loopback and in two network namespaces."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked_command import checked_command, start_command
from forked_run import NO_REPORT, logged_losses
from forkserver import free_port
from network_namespaces import bridged_namespaces, ip, network_namespaces

ROOT = Path(__file__).parent.parent
OPTIONS = [
    *("--job.config_file", "train_configs/debug_model.toml", "--training.seq_len", "32"),
    *("--model.shape.dim", "64", "--model.shape.n_layers", "2", "--model.shape.n_heads", "2"),
    *("--model.shape.n_kv_heads", "2", "--model.shape.ffn_dim", "128"),
    *("--training.global_batch_size", "4", "--training.local_batch_size", "2"),
    *("--training.mixed_precision_param", "float32", "--metrics.log_freq", "1", "--metrics.no-enable_tensorboard"),
    *NO_REPORT,
]
NAMESPACES = ("torchtrain-a", "torchtrain-b")


def arguments(node: int, endpoint: str, local_address: str, folder: Path, *options: str) -> list[str]:
    """The arguments of torchtrain.launch for one of two agents, each with one rank."""
    # Both agents have the same host name, so torchrun cannot tell from it which one hosts the store: is_host does.
    return [
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *("--rdzv-id", "test", "--rdzv-conf", f"is_host={1 - node}", "--local-addr", local_address),
        *("-m", "torchtrain.train", "--job.dump_folder", str(folder), *OPTIONS, *options),
    ]


def start_agent(node: int, endpoint: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start one of two agents, each in a network namespace, in which its address is 10.77.0.<node + 1>."""
    command = ["ip", "netns", "exec", NAMESPACES[node], sys.executable, "-m", "torchtrain.launch"]
    command += arguments(node, endpoint, address(node), folder, *options)
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"veth{node}"}
    with (folder.parent / f"agent-{node}.log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log, text=True)


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def test_two_agents_have_the_losses_of_one_process(forked_ranks: dict[str, str], tmp_path: Path) -> None:
    endpoint, started = f"127.0.0.1:{free_port()}", []
    options = ("--training.steps", "3")
    for node in (0, 1):
        (folder := tmp_path / f"agent-{node}").mkdir()
        words = arguments(node, endpoint, "127.0.0.1", tmp_path / "two", *options)
        environment = {**forked_ranks, "GLOO_SOCKET_IFNAME": "lo"}
        started.append(start_command(folder, "torchtrain.launch", *words, environment=environment))
    for [agent], [_, errors] in started:
        agent.join(200)
        assert agent.exitcode == 0, errors.read_text()
    checked_command("torchtrain.train", "--job.dump_folder", str(tmp_path / "one"), *OPTIONS, *options)
    assert logged_losses(tmp_path / "two") == pytest.approx(logged_losses(tmp_path / "one"), rel=1e-5)


def test_namespaces_that_are_still_in_use_can_be_made_again() -> None:
    names = ("torchtrain-again-0", "torchtrain-again-1")
    with ExitStack() as open_files:
        for _ in range(2):
            with bridged_namespaces(names, "train-again", "10.81.0"):
                for name in names:  # as by a process that is killed, but has not ended yet
                    open_files.enter_context(open(f"/var/run/netns/{name}"))


@pytest.fixture
def namespaces() -> Iterator[None]:
    """Two network namespaces, connected by a pair of veth devices."""
    first, second = NAMESPACES
    with network_namespaces(NAMESPACES):
        ip("link", "add", "veth0", "netns", first, "type", "veth", "peer", "name", "veth1", "netns", second)
        for node, namespace in enumerate(NAMESPACES):
            ip("-n", namespace, "addr", "add", f"{address(node)}/24", "dev", f"veth{node}")
            ip("-n", namespace, "link", "set", f"veth{node}", "up")
        yield


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_connection_ends_both_agents_and_a_new_start_resumes(namespaces: None, tmp_path: Path) -> None:  # noqa: ARG001
    folder = tmp_path / "run"
    endless = ["--training.steps", "100000", "--checkpoint.interval", "5", "--comm.train_timeout_seconds", "20"]
    agents = [start_agent(n, f"{address(0)}:29500", folder, *endless) for n in (0, 1)]
    try:
        wait_for(lambda: len(logged_losses(folder)) > 7, 200)
        ip("-n", NAMESPACES[0], "link", "set", "veth0", "down")
        cut = time.monotonic()
        codes = [agent.wait(timeout=240) for agent in agents]
        assert time.monotonic() - cut < 240
    finally:
        for agent in agents:
            agent.kill()
    assert 0 not in codes
    logs = [(tmp_path / f"agent-{node}.log").read_text() for node in (0, 1)]
    assert "takes more than 20 s" in logs[0] + logs[1]
    # Of the watchdog, or what gloo says where its time limit ends, at the other end, and for other tensors.
    messages = ("error: step", "Timed out waiting", "Connection closed by peer", "timeout caused pair closure")
    assert any(message in logs[0] for message in messages), logs[0]
    assert "the rendezvous node does not answer" in logs[1]
    ip("-n", NAMESPACES[0], "link", "set", "veth0", "up")
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoint").glob("step-*[0-9]"))
    more = ["--training.steps", str(saved + 3)]
    agents = [start_agent(n, f"{address(0)}:29501", folder, *more) for n in (0, 1)]
    assert [agent.wait(timeout=200) for agent in agents] == [0, 0], (tmp_path / "agent-0.log").read_text()
    assert f"resumed from {folder}/checkpoint/step-{saved}" in (tmp_path / "agent-0.log").read_text()


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)
