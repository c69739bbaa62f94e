"""scripts/replicas.slurm on a real SLURM cluster: an array of jobs, of which one dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import slurm
from forked_command import ROOT, checked_command
from forked_run import read_metrics
from slurm import Slurm

pytest.importorskip("torchft")
from replica_run import CONFIG, Reference, differences

pytestmark = pytest.mark.skipif(bool(slurm.missing_requirement()), reason=slurm.missing_requirement())
STEPS = ("--training.steps", "200", "--lr_scheduler.total_steps", "200", "--checkpoint.interval", "50")
SMALL = (
    *("--model.shape.dim", "16", "--model.shape.n_layers", "2", "--model.shape.n_heads", "2"),
    *("--model.shape.n_kv_heads", "2", "--model.shape.ffn_dim", "32"),
)


def submit(cluster: Slurm, forked_ranks: dict[str, str], folder: Path, *sbatch: str) -> str:
    """Submit an array; return its number."""
    folder.mkdir()
    (folder / "own.toml").write_text(CONFIG)
    environment = {
        **cluster.env,
        **forked_ranks,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PAUSE_SECONDS": "1",
    }
    command = [
        *("sbatch", "--parsable", "--nodes=1", "--gpus-per-node=1", f"--output={folder}/job-%a.out", *sbatch),
        *("scripts/replicas.slurm", "--job.config_file", str(folder / "own.toml"), "--job.dump_folder", str(folder)),
        *("--replicas.host", "127.0.0.1", *SMALL, *STEPS),
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_replicas_need_an_array(cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path) -> None:
    job = submit(cluster, forked_ranks, tmp_path / "run", f"--output={tmp_path}/job.out")
    assert cluster.wait_for_end(job, 60) == "FAILED"
    assert "error: replicas are the elements of an array of jobs" in (tmp_path / "job.out").read_text()


def ranks_of(folder: Path, replica: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("SLURM_ARRAY_TASK_ID") == replica
        and "RANK" in process.info["environ"]
        and str(folder) in " ".join(process.info["cmdline"] or ())
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_element_of_an_array_is_requeued_and_changes_no_bit(
    cluster: Slurm, forked_ranks: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit(cluster, forked_ranks, folder, "--array=0-1")

    def output() -> str:
        return "".join(path.read_text() for path in folder.glob("job-*.out"))

    cluster.wait_for(lambda: any("loss" in line for line in read_metrics(folder / "replicas/1")), 200)
    victims = ranks_of(folder, "1")
    assert victims, output()
    os.kill(victims[0].pid, signal.SIGKILL)
    cluster.wait_for(lambda: "start 2" in (folder / "job-1.out").read_text(), 120)
    for element in ("0", "1"):
        assert cluster.wait_for_end(f"{job}_{element}", 300) == "COMPLETED", output()
    assert cluster.field(f"{job}_0", "Restarts") == "0"
    reference = tmp_path / "reference"
    reference.mkdir()
    config = ("--job.config_file", str(folder / "own.toml"), "--job.dump_folder", str(reference))
    checked_command("torchtrain.train", *config, *SMALL, *STEPS)
    assert differences(folder, Reference(reference)) == []
