"""scripts/train.slurm on a real SLURM cluster of two virtual nodes: requeueing, time limits and failures of a job."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import slurm
import torch
from forked_command import checked_command
from forked_run import NO_REPORT, logged_losses, saved_tensors
from slurm import Slurm

ROOT = Path(__file__).parent.parent
STEPS = 60
OPTIONS = [
    *("--model.shape.dim", "64", "--model.shape.n_layers", "2", "--model.shape.ffn_dim", "128"),
    *("--training.seq_len", "32", "--training.local_batch_size", "2", "--training.mixed_precision_param", "float32"),
    *("--metrics.log_freq", "1", "--metrics.no-enable_tensorboard", "--checkpoint.interval", "30"),
    *("--training.steps", str(STEPS), *NO_REPORT),
]

pytestmark = pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement())


def submit(
    cluster: Slurm, forked_ranks: dict[str, str], folder: Path, *options: str, sbatch: tuple[str, ...] = ()
) -> str:
    """Submit a job; return its number."""
    folder.mkdir()
    environment = {**cluster.env, **forked_ranks, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [
        *("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=1", f"--output={folder}/job.out", *sbatch),
        *("scripts/train.slurm", "--job.dump_folder", str(folder), *OPTIONS, *options),
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def output_of(folder: Path) -> str:
    return (folder / "job.out").read_text()


def train_without_slurm(folder: Path, *options: str) -> None:
    """Train the same run on two ranks of this machine, without SLURM."""
    config = ("--job.config_file", "train_configs/debug_model.toml")
    checked_command("torchtrain.train", *config, "--job.dump_folder", str(folder), *OPTIONS, *options, ranks=2)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an uninterrupted run on two ranks of one machine."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_without_slurm(folder)
    return folder


def assert_same_checkpoint(folder: Path, uninterrupted: Path, step: int = STEPS) -> None:
    expected = saved_tensors(uninterrupted, step)
    tensors = saved_tensors(folder, step)
    assert tensors.keys() == expected.keys()
    for name in expected:
        assert torch.equal(tensors[name], expected[name]), name


@pytest.mark.timeout(600)
def test_signaled_job_of_two_nodes_is_requeued_and_ends_bitwise_like_one_machine(
    cluster: Slurm, forked_ranks: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, forked_ranks, folder, sbatch=("--time=10",))
    cluster.wait_for(lambda: len(logged_losses(folder)) > 7, 200)
    cluster.ask("scancel", "--signal=USR1", job)
    # A requeued job is pending before it starts again: wait for the second start before waiting for the end.
    cluster.wait_for(lambda: "start 2" in output_of(folder), 120)
    assert cluster.wait_for_end(job, 200) == "COMPLETED", output_of(folder)
    output = output_of(folder)
    assert "start 1: 2 node(s) x 1 rank(s), rendezvous at 127.0.0.1:" in output
    signaled = re.search(r"SIGUSR1 received: .* with (\d+) s for a save", output)
    assert signaled
    assert 200 < int(signaled[1]) < 590
    assert "srun ended with 75" in output
    assert "resumed from" in output
    assert f"srun ended with 0; newest checkpoint: step {STEPS}" in output
    logs = {path.relative_to(folder / "logs").parts[1] for path in folder.rglob("stderr.log")}
    assert logs == {"node-0", "node-1"}
    assert logged_losses(folder) == logged_losses(uninterrupted)
    assert_same_checkpoint(folder, uninterrupted)


def test_invalid_option_ends_the_job_before_the_nodes_start(
    cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path
) -> None:
    job = submit(cluster, forked_ranks, tmp_path / "run", "--training.sed", "1")
    assert cluster.wait_for_end(job, 60) == "FAILED"
    assert cluster.field(job, "Restarts") == "0"
    assert "--training.sed is not a known option; did you mean '--training.seed'?" in output_of(tmp_path / "run")
    assert "start 1" not in output_of(tmp_path / "run")


def test_job_that_fails_without_progress_is_not_requeued(
    cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path
) -> None:
    data = ("--data.path", str(tmp_path / "nothing.txt"))
    job = submit(cluster, forked_ranks, tmp_path / "run", *data, sbatch=("--nodes=1",))
    assert cluster.wait_for_end(job, 120) == "FAILED"
    assert cluster.field(job, "Restarts") == "0"
    assert cluster.field(job, "ExitCode") == "2:0"
    assert "srun ended with 2; newest checkpoint: step -1" in output_of(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_job_at_its_time_limit_resumes_in_the_next_start(
    cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path
) -> None:
    steps = 130  # of a second each in the job: more than it can make in two minutes
    options = ("--training.steps", str(steps), "--checkpoint.interval", "1000")
    environment = {**forked_ranks, "PYTHONPATH": f"{ROOT / 'tests/harness'}:{ROOT}"}
    folder = tmp_path / "run"
    # SLURM may send the signal a minute early, which for a limit of one minute is before the ranks handle it.
    sbatch = ("--time=2", "--signal=USR1@20")
    job = submit(cluster, environment, folder, *options, "--job.import", "hook_that_sleeps", sbatch=sbatch)
    assert cluster.wait_for_end(job, 700) == "COMPLETED", output_of(folder)
    output = output_of(folder)
    assert "SIGUSR1 received" in output
    stopped_at = re.findall(r"stopped as requested: step (\d+)", output)
    assert stopped_at
    for step in stopped_at:
        assert f"resumed from {folder}/checkpoint/step-{step}\n" in output
    train_without_slurm(tmp_path / "local", *options)
    assert_same_checkpoint(folder, tmp_path / "local", steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_job_that_may_not_be_requeued_saves_and_stops_for_good(
    cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, forked_ranks, folder)
    cluster.wait_for(lambda: len(logged_losses(folder)) > 7, 200)
    cluster.ask("scontrol", "update", f"JobId={job}", "Requeue=0")
    cluster.ask("scancel", "--signal=USR1", job)
    assert cluster.wait_for_end(job, 200) == "FAILED"  # exit code 75
    assert "the job is not requeued: it has Requeue=0" in output_of(folder)
    assert cluster.field(job, "Restarts") == "0"
    assert list((folder / "checkpoint").glob("step-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_manually_requeued_job_ends_with_the_same_checkpoint(
    cluster: Slurm, forked_ranks: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, forked_ranks, folder, "--checkpoint.interval", "5")
    cluster.wait_for(lambda: len(logged_losses(folder)) > 7, 200)
    cluster.ask("scontrol", "requeue", job)
    cluster.wait_for(lambda: "start 2" in output_of(folder), 120)
    assert cluster.wait_for_end(job, 200) == "COMPLETED", output_of(folder)
    assert_same_checkpoint(folder, uninterrupted)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_job_survives_a_killed_slurmstepd(
    cluster: Slurm, forked_ranks: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, forked_ranks, folder, "--checkpoint.interval", "5")
    cluster.wait_for(lambda: len(logged_losses(folder)) > 7, 200)
    # Both nodes are this machine. The daemons of the step of job J have the process title "slurmstepd: [J.0]".
    daemons = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"slurmstepd: [{job}.0]" in " ".join(process.info["cmdline"] or ())
    ]
    assert len(daemons) == 2
    daemons[0].kill()
    # The ranks are not affected and train to the end. SLURM waits a minute for a message of that node, then continues.
    assert cluster.wait_for_end(job, 500) == "COMPLETED", output_of(folder)
    assert_same_checkpoint(folder, uninterrupted)


def test_srun_with_several_tasks_and_no_rank_is_an_error(
    cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path
) -> None:
    """Otherwise each task would train the entire run in the same folder."""
    train = [
        forked_ranks["PYTHON_EXEC"],
        "-m",
        "torchtrain.train",
        "--job.config_file",
        "train_configs/debug_model.toml",
    ]
    command = ["srun", "--ntasks=2", *train, "--job.dump_folder", str(tmp_path / "run"), *OPTIONS]
    found = subprocess.run(command, cwd=ROOT, env=cluster.env, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stderr
    assert "error: SLURM_STEP_NUM_TASKS = 2 in the environment, and RANK is not set" in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "run").exists()
