"""The launcher ends as its ranks end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchtrain.errors import StoppedError, StorageError, TorchtrainError
from torchtrain.launch import SHARED_ENDINGS

ROOT = Path(__file__).parent.parent


def launch(script: str, ranks: int = 2) -> subprocess.Popen[str]:
    """Ranks that run a line of bash."""
    command = [sys.executable, "-m", "torchtrain.launch", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, "--no-python", "bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit $((RANK == 1 ? 75 : 0))", 75),
        ("[ $RANK = 0 ] && sleep 60; kill -9 $BASHPID", 137),
        # SIGUSR1 is inherited as ignored, by the ranks, too, until they have a handler.
        ("kill -USR1 $BASHPID $PPID; exit", 0),
    ],
)
def test_exit_code_is_that_of_the_first_failure(script: str, code: int) -> None:
    with launch(script) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert ("rank 1 was ended by SIGKILL" in errors) == (code == 137)


def test_sigterm_reaches_the_ranks_and_is_the_end() -> None:
    with launch(
        'trap "echo rank $RANK stops; exit 0" TERM; echo ready; for i in $(seq 300); do sleep 0.2; done'
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert sorted(output.splitlines()) == ["rank 0 stops", "rank 1 stops"]
    assert process.returncode == 143
    assert "Traceback" not in errors


def test_sigterm_while_ranks_are_started_leaves_none_behind() -> None:
    with launch("[ $RANK = 0 ] && kill -TERM $PPID; for i in $(seq 300); do sleep 0.2; done", ranks=8) as process:
        _, errors = process.communicate(timeout=40)  # a rank that is left behind holds the pipes for a minute
    assert process.returncode == 143
    assert "Traceback" not in errors


def test_shared_endings_are_those_of_the_trainer() -> None:
    assert set(SHARED_ENDINGS) == {TorchtrainError.exit_code, StorageError.exit_code, StoppedError.exit_code}
