"""Kill one rank of a run with two replicas on this machine, and compare the run with an undisturbed one:

    python scripts/faults/kill_replica.py FOLDER --ranks 4 --job.config_file train_configs/debug_model.toml

Each replica has ``--ranks`` ranks, on GPUs of its own if there are any. When both train, one rank of the second replica
is killed (SIGKILL). The first one must continue; the second one is started again and joins it, then both are asked to
stop and save. One job without replicas, on all of these GPUs, trains as many steps. Losses, gradient norms and all
tensors of the checkpoint must have the same bits; otherwise the exit code is 1. Other options are those of the run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from crash_test_replicas import free_port, serve_lighthouse
from crash_test_s3 import tensors
from torch import multiprocessing

from torchtrain.checkpoint.storage import open_storage

TIMEOUT_SECONDS = 200
STEPS_BEFORE, STEPS_AFTER = 5, 5
FOR_EVER = 1_000_000  # steps
RUN = [
    *("--training.sums=exact", "--lr_scheduler.warmup_steps=2", "--lr_scheduler.decay_type=constant"),
    *("--metrics.log_freq=1", "--checkpoint.enable", "--checkpoint.interval=1000000", "--checkpoint.keep_latest_k=1"),
    "--report.no-enable",
]


class Job:
    """A job of ``ranks`` ranks, on the GPUs from number ``first`` on."""

    def __init__(self, name: str, folder: Path, ranks: int, first: int, options: list[str]) -> None:
        place = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
        command = [sys.executable, "-m", "torchtrain.launch", f"--nproc-per-node={ranks}", *place]
        command += ["--module", "torchtrain.train", *options]
        environment = dict(os.environ)
        if torch.cuda.is_available():
            own = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own.split(",")[first : first + ranks])
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill_a_rank(self) -> None:
        """SIGKILL to one process of the job."""
        children = [
            int(pid)
            for file in Path(f"/proc/{self.process.pid}/task").glob("*/children")
            for pid in file.read_text(encoding="utf-8").split()
        ]
        ranks = [pid for pid in children if b"torchtrain.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


def steps_of(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step in ``metrics.jsonl``."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return {}
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


def wait_for(condition: Callable[[], bool], *jobs: Job) -> float:
    """Wait until ``condition`` holds, while ``jobs`` live; returns the seconds."""
    start = time.monotonic()
    while not condition():
        for job in jobs:
            assert job.process.poll() is None, job.tail()
        assert time.monotonic() - start < TIMEOUT_SECONDS, "\n".join(job.tail() for job in jobs)
        time.sleep(0.01)
    return time.monotonic() - start


def disturb(folder: Path, ranks: int, options: list[str]) -> dict[str, Any]:
    """Train on two replicas, kill a rank of the second one, start it again, and stop both."""
    run, port = folder / "run", free_port()
    lighthouse = multiprocessing.get_context("spawn").Process(target=serve_lighthouse, args=(port,), daemon=True)
    lighthouse.start()
    words = [*options, f"--training.steps={FOR_EVER}", f"--job.dump_folder={run}", "--replicas.host=127.0.0.1"]
    words += [f"--replicas.lighthouse=http://127.0.0.1:{port}", "--replicas.on_stop=all"]

    def start(replica: int) -> Job:
        return Job(str(replica), folder, ranks, replica * ranks, [*words, f"--replicas.id={replica}"])

    def newest(replica: int) -> int:
        return max(steps_of(run / "replicas" / str(replica)), default=0)

    jobs = [start(0), start(1)]
    try:
        wait_for(lambda: min(newest(0), newest(1)) >= STEPS_BEFORE, *jobs)
        jobs[1].kill_a_rank()
        killed_after = newest(0)
        lost = wait_for(lambda: newest(0) > killed_after + 1, jobs[0])
        wait_for(lambda: jobs[1].process.poll() is not None, jobs[0])
        before = newest(1)
        jobs[1] = start(1)
        joined = wait_for(lambda: newest(1) > before, *jobs)
        together = newest(1)
        wait_for(lambda: newest(1) >= together + STEPS_AFTER, *jobs)
        for job in jobs:
            job.process.send_signal(signal.SIGTERM)
        wait_for(lambda: all(job.process.poll() is not None for job in jobs))
    finally:
        for job in jobs:
            job.process.kill()
            job.process.wait()
        lighthouse.kill()
        lighthouse.join()
    steps = max(open_storage(str(run / "checkpoint")).steps(), default=0)
    assert steps >= together, "\n".join(job.tail() for job in jobs)
    return {"steps": steps, "killed_after": killed_after, "lost_seconds": lost, "joined_seconds": joined}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the runs; it must be empty")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a replica")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments, others = parser.parse_known_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    options = [*others, *RUN]
    found = disturb(folder, arguments.ranks, options)
    steps, run, undisturbed = found["steps"], folder / "run", folder / "undisturbed"
    job = Job(
        "undisturbed",
        folder,
        2 * arguments.ranks,
        0,
        [*options, f"--training.steps={steps}", f"--job.dump_folder={undisturbed}"],
    )
    assert job.process.wait() == 0, job.tail()
    expected, theirs = steps_of(undisturbed), tensors(open_storage(str(undisturbed / "checkpoint")).open(steps))
    ours = tensors(open_storage(str(run / "checkpoint")).open(steps))
    different = [f"step {step}" for step, numbers in expected.items() if steps_of(run).get(step) != numbers]
    different += [name for name, tensor in theirs.items() if name not in ours or not tensor.equal(ours[name])]
    found |= {"tensors": len(theirs), "different": different}
    text = json.dumps(found)
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
