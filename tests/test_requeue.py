"""scripts/train.slurm, among stand-ins for SLURM's commands: which ends of a step put the job into the queue again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRUN = """#!/bin/bash
set -- $(head -n 1 "$STEPS"); sed -i 1d "$STEPS"  # the exit code, and the step of a checkpoint that is saved before
[ -z "$2" ] || mkdir -p "$FOLDER/checkpoint/step-$2"
exit "$1"
"""
SCONTROL = """#!/bin/bash
case $1 in
  requeue) echo "$2" >>"$REQUEUED" ;;
  *) [ "$2" = node ] && echo "NodeName=a NodeAddr=localhost Port=1" || echo a ;;
esac
"""
PYTHON = f"""#!/bin/bash
[ "$1" != -c ] || {{ echo "$FOLDER"; exit; }}
exec {sys.executable} "$@"
"""


class Job:
    """Starts of one job."""

    def __init__(self, folder: Path) -> None:
        self.run, self.steps, self.requeued = folder / "run", folder / "steps", folder / "requeued"
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": "python",
            "PAUSE_SECONDS": "0",
            "STEPS": str(self.steps),
            "REQUEUED": str(self.requeued),
            "FOLDER": str(self.run),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "a",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }

    def ends(self, step: str) -> tuple[int, bool]:
        """The script's exit code, and whether it has put the job into the queue again."""
        self.steps.write_text(step + "\n")
        self.requeued.unlink(missing_ok=True)
        command = ["bash", "scripts/train.slurm"]
        result = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        assert f"srun ended with {step.split()[0]}" in result.stdout, result.stderr
        return result.returncode, self.requeued.exists()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_storage_that_does_not_answer_is_tried_ten_times(job: Job) -> None:
    assert [job.ends("74") for _ in range(10)] == [(0, True)] * 10
    assert job.ends("74") == (74, False)


def test_a_start_that_came_further_is_tried_ten_times_more(job: Job) -> None:
    assert [job.ends("74") for _ in range(9)] == [(0, True)] * 9
    assert job.ends("74 20") == (0, True)
    assert [job.ends("74") for _ in range(10)] == [(0, True)] * 10
    assert job.ends("74") == (74, False)


@pytest.mark.parametrize(
    ("step", "end"),
    [
        ("0 20", (0, False)),
        ("2", (2, False)),
        ("75", (0, True)),
        ("1", (1, False)),
        ("1 20", (0, True)),
        ("137 20", (0, True)),
    ],
)
def test_other_ends(job: Job, step: str, end: tuple[int, bool]) -> None:
    assert job.ends(step) == end
