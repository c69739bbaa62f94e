"""Text is tokenized by machines with a network of their own (namespaces): one run on two of them, and two runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_samples import write_jsonl
from forked_run import logged_losses
from network_namespaces import bridged_namespaces

from torchtrain.datasets.token_folder import MANIFEST

NAMES = ("torchtrain-cache-0", "torchtrain-cache-1")
ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with bridged_namespaces(NAMES, "tt-cache", "10.80.0"):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
    write_jsonl(path, [" ".join(words[number * k % 11] for k in range(200)) for number in range(20_000)])
    return path


def start(machine: int, text: Path, outputs: Path, cache: Path, *torchrun: str) -> "subprocess.Popen[str]":
    """Start torchrun on a machine with its own network and host name."""
    outputs.mkdir(parents=True, exist_ok=True)
    options = [
        *("--job.config_file", str(ROOT / "train_configs/debug_model.toml"), "--job.dump_folder", str(outputs)),
        *("--data.path", str(text), "--data.held_out", "0", "--training.steps", "3", "--training.seq_len", "64"),
        *("--training.local_batch_size", "2", "--training.global_batch_size", "4", "--metrics.log_freq", "1"),
        *("--model.shape.n_layers", "1", "--checkpoint.no-enable"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "torchtrain.train", *options]
    in_machine = ["ip", "netns", "exec", NAMES[machine], "unshare", "--uts"]
    own_name = ["sh", "-c", f'hostname {NAMES[machine]}; exec "$@"', "sh"]
    environment = {**os.environ, "TORCHTRAIN_CACHE": str(cache), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"}
    return subprocess.Popen(
        [*in_machine, *own_name, *command],
        cwd=outputs,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: "list[subprocess.Popen[str]]") -> list[str]:
    """The output of each; AssertionError if one fails."""
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def tokens_in(cache: Path) -> dict[str, bytes]:
    """The files of the one folder of tokens in a cache."""
    (folder,) = {path.parent for path in (cache / "tokens").glob(f"*/{MANIFEST}")}
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_run_on_two_machines_with_one_cache_and_with_two(network: None, text: Path, tmp_path: Path) -> None:  # noqa: ARG001
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=10.80.0.1", "--master-port=29500"]
    losses = {}
    for case, caches in (("one", ["shared", "shared"]), ("two", ["own-0", "own-1"])):
        starts = [
            start(machine, text, tmp_path / case / str(machine), tmp_path / cache, *nodes, f"--node-rank={machine}")
            for machine, cache in enumerate(caches)
        ]
        finish(starts)
        losses[case] = logged_losses(tmp_path / case / "0")
    assert len(losses["one"]) == 3
    assert losses["one"] == losses["two"]
    assert tokens_in(tmp_path / "shared") == tokens_in(tmp_path / "own-0") == tokens_in(tmp_path / "own-1")


def test_two_runs_that_start_at_once_on_two_machines(network: None, text: Path, tmp_path: Path) -> None:  # noqa: ARG001
    alone = ["--nnodes=1", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--master-port=29501"]
    cache = tmp_path / "cache"
    outputs = finish([start(machine, text, tmp_path / str(machine), cache, *alone) for machine in range(2)])
    assert sum("another run tokenizes it into" in output for output in outputs) <= 1  # none if one is much later
    assert [output for output in outputs if "tokens in the cache" not in output] == []
    assert logged_losses(tmp_path / "0") == logged_losses(tmp_path / "1")
    assert len(tokens_in(cache)) > 3
