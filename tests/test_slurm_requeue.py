"""scripts/train.slurm with fake SLURM commands: after which exit codes of a step it requeues the job."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRUN = """#!/bin/bash
set -- $(head -n 1 "$STEPS"); sed -i 1d "$STEPS"  # the exit code, and the step of a checkpoint to save first
echo "$SLURM_JOB_END_TIME" >"$STEPS.end"
[ -z "$2" ] || mkdir -p "$CHECKPOINTS/step-$2"
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
case "$1 $2" in
  *checkpoint_storage*) [ -z "$SILENT_STORE" ] || exit 74 ;;
  "-c "*) echo "$FOLDER"; echo "${{LOCATION:-$CHECKPOINTS}}"; exit ;;
esac
exec {sys.executable} "$@"
"""


END_TIME = "EndTime=2030-01-01T00:00:10"


class Job:
    """Runs scripts/train.slurm for one job with fake SLURM commands."""

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
            "CHECKPOINTS": str(self.run / "checkpoint"),
            "SLURM_JOB_ID": "7",
            "JOB": "",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "a",
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_SUBMIT_DIR": str(ROOT),
        }

    def run_step(self, step: str) -> tuple[int, bool]:
        """Run the script with a step that ends as in ``step``; return its exit code and whether it requeued the job."""
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


def test_storage_failure_requeues_ten_times(job: Job) -> None:
    tries = job.run / "logs/7.tries"
    for number in (1, 2):
        assert job.run_step("74") == (0, True)
        assert tries.read_text() == f"{number}\n"
    tries.write_text("9\n")
    assert job.run_step("74") == (0, True)
    assert job.run_step("74") == (74, False)


def test_progress_resets_the_number_of_storage_failures(job: Job) -> None:
    tries = job.run / "logs/7.tries"
    tries.parent.mkdir(parents=True)
    tries.write_text("9\n")
    assert job.run_step("74 20") == (0, True)
    assert job.run_step("74") == (0, True)
    assert tries.read_text() == "1\n"
    tries.write_text("9\n")
    assert job.run_step("74") == (0, True)
    assert job.run_step("74") == (74, False)


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
def test_exit_code_decides_whether_the_job_is_requeued(job: Job, step: str, end: tuple[int, bool]) -> None:
    assert job.run_step(step) == end


def test_checkpoint_folder_may_be_a_symbolic_link(job: Job, tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    job.run.mkdir()
    (job.run / "checkpoint").symlink_to(tmp_path / "large disk")
    assert job.run_step("1 20") == (0, True)
    assert job.run_step("1") == (1, False)


def test_progress_is_found_where_the_checkpoints_are(job: Job, tmp_path: Path) -> None:
    job.environment["CHECKPOINTS"] = str(tmp_path / "elsewhere")
    assert job.run_step("1 20") == (0, True)
    assert job.run_step("1") == (1, False)
    # A URL is listed by its storage; the options of the job name it.
    (tmp_path / "run.toml").write_text(f'[checkpoint]\nfolder = "file://{tmp_path}/elsewhere"\n')
    job.environment |= {"LOCATION": f"file://{tmp_path}/elsewhere", "CONFIG_FILE": str(tmp_path / "run.toml")}
    assert job.run_step("1 40") == (0, True)
    assert "from checkpoint step 20" in job.output
    assert job.run_step("1") == (1, False)


def test_silent_bucket_is_not_a_lack_of_progress(job: Job) -> None:
    tries = job.run / "logs/7.tries"
    job.environment |= {"LOCATION": "s3://bucket/run", "SILENT_STORE": "yes"}
    assert job.run_step("1 20") == (0, True)
    assert "from checkpoint step unknown" in job.output
    assert tries.read_text() == "1\n"
    assert job.run_step("0") == (0, False)
    assert job.run_step("2") == (2, False)
    tries.write_text("10\n")
    assert job.run_step("137 40") == (137, False)


def test_unavailable_dump_folder_is_retried(job: Job, tmp_path: Path) -> None:
    job.run.write_text("a file where the folder should be")
    third = '[ $(wc -l <"$FOLDER.slept") != 3 ] || rm "$FOLDER"'
    (tmp_path / "sleep").write_text(f'#!/bin/bash\necho >>"$FOLDER.slept"\n{third}\n')
    (tmp_path / "sleep").chmod(0o755)
    assert job.run_step("74") == (0, True)
    assert (job.run / "logs/7.tries").read_text() == "1\n"


@pytest.mark.parametrize(
    ("job_info", "end"),
    [
        (f"JobId=7 Name=a StartTime=2030-01-01T00:00:00 {END_TIME} Nodes=a\\n", "1893456010"),
        (f"JobId=8 Name=a EndTime=2031-01-01T00:00:00 Nodes=a\\nJobId=7 Name=a {END_TIME} Nodes=a\\n", "1893456010"),
        ("JobId=7 JobName=a EndTime=Unknown NodeList=a\\n", ""),
        ("JobId=7\\n", ""),
        ("", ""),  # scontrol fails
    ],
)
def test_end_time_of_the_job_is_passed_to_the_ranks(job: Job, job_info: str, end: str) -> None:
    job.environment |= {"JOB": job_info, "TZ": "UTC"}
    assert job.run_step("0") == (0, False)
    assert job.steps.with_name("steps.end").read_text() == f"{end}\n"


def test_job_that_may_not_be_requeued_ends_after_its_save(job: Job) -> None:
    """After scontrol update JobId=7 Requeue=0, and scancel --signal=USR1 7."""
    job.environment["JOB"] = "JobId=8 Requeue=0 Nodes=a\\nJobId=7 Requeue=1 Nodes=a\\n"
    assert job.run_step("75 10") == (0, True)
    job.environment["JOB"] = "JobId=7 Name=a Requeue=0 Nodes=a\\n"
    assert job.run_step("75 20") == (75, False)
    assert "the job is not requeued: it has Requeue=0" in job.output


def test_job_without_gpus_has_one_rank(job: Job) -> None:
    job.environment |= {"SLURM_GPUS_PER_NODE": "0"}
    assert job.run_step("0") == (0, False)
    assert "1 node(s) x 1 rank(s)" in job.output
    assert "error" not in job.output


def test_invalid_option_ends_the_job_before_srun(job: Job) -> None:
    job.environment |= {"PYTHON": sys.executable, "CONFIG_FILE": "no where.toml"}
    command = ["bash", "scripts/train.slurm"]
    result = subprocess.run(command, cwd=ROOT, env=job.environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: job.config_file = 'no where.toml' is not a file")
    configs = result.stderr.splitlines()[1:]
    assert configs
    assert [line for line in configs if not line.startswith("  in ")] == []


# They run the command that they are given, with CONTAINED set if it is in the image.
RUNNING_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
  case $1 in
    --container-image) export CONTAINED=$2 && shift 2 ;;
    --container-mounts) export MOUNTS=$2 && shift 2 ;;
    --container-workdir | --nodes | --ntasks) shift 2 ;;
    *) shift ;;
  esac
done
SLURM_NODEID=0 exec "$@"
"""
APPTAINER = """#!/bin/bash
[ "$1 $2 $3 $5 $6" = "exec --nv --bind --pwd $PWD" ] || exit 9
CONTAINED=$7 MOUNTS=$4 exec "${@:8}"
"""
RECORDING_PYTHON = """#!/bin/bash
echo "${CONTAINED:-none} ${MOUNTS:-none}" >>"$PLACES"
case "$1 $2" in
  *checkpoint_storage*) echo 20 ;;
  "-c "*) echo "$FOLDER"; echo s3://bucket/run ;;
  *) echo "$*" >"$PLACES.launch"; grep SigIgn /proc/$$/status >"$PLACES.ignored" ;;
esac
"""


@pytest.mark.parametrize("image", [None, "/images/torchtrain.sif", "registry.example.com#torchtrain:1"])
def test_every_python_process_runs_in_the_container(job: Job, tmp_path: Path, image: str | None) -> None:
    fakes = {"srun": RUNNING_SRUN, "apptainer": APPTAINER, "python": RECORDING_PYTHON}
    for name, text in fakes.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    places = tmp_path / "places"
    job.environment["PLACES"] = str(places)
    if image:
        job.environment |= {"CONTAINER": image, "CONTAINER_MOUNTS": "/data:/data,/local:/local"}
    command = ["bash", "scripts/train.slurm", "--data.path", "two words"]
    result = subprocess.run(command, cwd=ROOT, env=job.environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    # The check of the options, the newest step before and after, and the launcher.
    place = f"{image} {ROOT}:{ROOT},/data:/data,/local:/local" if image else "none none"
    assert places.read_text().splitlines() == [place] * 4
    launch = (tmp_path / "places.launch").read_text()
    assert launch.startswith("-m torchtrain.launch --nnodes 1 --node-rank 0 --nproc-per-node 1 ")
    assert launch.endswith(
        "-m torchtrain.train --job.config_file train_configs/debug_model.toml --data.path two words\n"
    )
    # Until the launcher handles SIGUSR1, it is ignored.
    ignored = int((tmp_path / "places.ignored").read_text().split()[1], 16)
    assert ignored & 1 << (signal.SIGUSR1 - 1)
