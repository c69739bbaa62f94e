"""scripts/train.slurm, among stand-ins for SLURM's commands: which ends of a step put the job into the queue again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRUN = """#!/bin/bash
set -- $(head -n 1 "$STEPS"); sed -i 1d "$STEPS"  # the exit code, and the step of a checkpoint that is saved before
echo "$SLURM_JOB_END_TIME" >"$STEPS.end"
[ -z "$2" ] || mkdir -p "$FOLDER/checkpoint/step-$2"
exit "$1"
"""
SCONTROL = """#!/bin/bash
case $1 in
  requeue) echo "$2" >>"$REQUEUED" ;;
  *)
    case $2 in
      node) echo "NodeName=a NodeAddr=localhost Port=1" ;;
      job) [ -n "$JOB" ] || exit 1; printf "$JOB" ;;
      *) echo a ;;
    esac
    ;;
esac
"""
PYTHON = f"""#!/bin/bash
[ "$1" != -c ] || {{ echo "$FOLDER"; exit; }}
exec {sys.executable} "$@"
"""


ENDS = "EndTime=2030-01-01T00:00:10"


class Job:
    """Starts of one job."""

    def __init__(self, folder: Path) -> None:
        self.run, self.steps, self.requeued = folder / "run", folder / "steps", folder / "requeued"
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.output = ""
        self.environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHON": "python",
            "PAUSE_SECONDS": "0",
            "STEPS": str(self.steps),
            "REQUEUED": str(self.requeued),
            "FOLDER": str(self.run),
            "SLURM_JOB_ID": "7",
            "JOB": "",
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
        self.output = result.stdout + result.stderr
        assert f"srun ended with {step.split()[0]}" in result.stdout, result.stderr
        return result.returncode, self.requeued.exists()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_storage_that_does_not_answer_is_tried_ten_times(job: Job) -> None:
    tries = job.run / "logs/7.tries"
    for number in (1, 2):
        assert job.ends("74") == (0, True)
        assert tries.read_text() == f"{number}\n"
    tries.write_text("9\n")
    assert job.ends("74") == (0, True)
    assert job.ends("74") == (74, False)


def test_a_start_that_came_further_is_tried_ten_times_more(job: Job) -> None:
    tries = job.run / "logs/7.tries"
    tries.parent.mkdir(parents=True)
    tries.write_text("9\n")
    assert job.ends("74 20") == (0, True)
    assert job.ends("74") == (0, True)
    assert tries.read_text() == "1\n"
    tries.write_text("9\n")
    assert job.ends("74") == (0, True)
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


def test_a_link_to_the_checkpoints_is_followed(job: Job, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    job.run.mkdir()
    (job.run / "checkpoint").symlink_to(tmp_path / "large disk")
    assert job.ends("1 20") == (0, True)
    assert job.ends("1") == (1, False)


def test_storage_of_the_run_that_does_not_answer_is_waited_for(job: Job, tmp_path: Path) -> None:
    job.run.write_text("in the place of a folder")
    third = '[ $(wc -l <"$FOLDER.slept") != 3 ] || rm "$FOLDER"'
    (tmp_path / "sleep").write_text(f'#!/bin/bash\necho >>"$FOLDER.slept"\n{third}\n')
    (tmp_path / "sleep").chmod(0o755)
    assert job.ends("74") == (0, True)
    assert (job.run / "logs/7.tries").read_text() == "1\n"


@pytest.mark.parametrize(
    ("told", "end"),
    [
        (f"JobId=7 Name=a StartTime=2030-01-01T00:00:00 {ENDS} Nodes=a\\n", "1893456010"),
        (f"JobId=8 Name=a EndTime=2031-01-01T00:00:00 Nodes=a\\nJobId=7 Name=a {ENDS} Nodes=a\\n", "1893456010"),
        ("JobId=7 JobName=a EndTime=Unknown NodeList=a\\n", ""),
        ("JobId=7\\n", ""),
        ("", ""),  # scontrol fails
    ],
)
def test_the_ranks_are_told_when_the_job_ends(job: Job, told: str, end: str) -> None:
    job.environment |= {"JOB": told, "TZ": "UTC"}
    assert job.ends("0") == (0, False)
    assert job.steps.with_name("steps.end").read_text() == f"{end}\n"


def test_a_job_without_gpus_has_one_rank(job: Job) -> None:
    job.environment |= {"SLURM_GPUS_PER_NODE": "0"}
    assert job.ends("0") == (0, False)
    assert "1 node(s) x 1 rank(s)" in job.output
    assert "error" not in job.output


def test_a_wrong_option_ends_the_job_before_srun(job: Job) -> None:
    job.environment |= {"PYTHON": sys.executable, "CONFIG_FILE": "no where.toml"}
    command = ["bash", "scripts/train.slurm"]
    result = subprocess.run(command, cwd=ROOT, env=job.environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: job.config_file = 'no where.toml' is not a file")
    assert len(result.stderr.splitlines()) == 1
