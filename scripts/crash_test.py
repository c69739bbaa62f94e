"""Kill a training run at random moments, again and again: ``python scripts/crash_test.py --kills 30``.

Two ranks train the debug model with a checkpoint every second step, written in the background. Each round starts the
run, waits a random while, and sends SIGKILL to one rank or to both, so that many of the kills fall into saves. In the
end the weights must be bitwise those of a run that nobody disturbed, no checkpoint may have been found damaged, and
whatever has a final name must be what its manifest says.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtrain.checkpoint.manager import saved_steps, step_folder
from torchtrain.checkpoint.storage import read_manifest, verify_file

RANKS = 2
OPTIONS = """
--model.flavor debugmodel --job.device cpu --training.mixed_precision_param float32 --training.seq_len 32
--training.local_batch_size 1 --training.global_batch_size 4 --checkpoint.enable --checkpoint.interval 2
--checkpoint.keep_latest_k 4 --metrics.log_freq 1 --metrics.no-enable_tensorboard --lr_scheduler.warmup_steps 2
"""


def start(folder: Path, steps: int) -> list["subprocess.Popen[bytes]"]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torchtrain.train", *OPTIONS.split(), "--training.steps", str(steps)]
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    log = (folder / "log.txt").open("ab")
    return [
        subprocess.Popen(
            [*command, "--job.dump_folder", str(folder)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log,
            stderr=log,
        )
        for rank in range(RANKS)
    ]


def newest_line(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return sum(1 for line in lines if "loss" in json.loads(line))


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / f"checkpoint/step-{step}", folder / "all.pt")
    loaded: dict[str, torch.Tensor] = torch.load(folder / "all.pt", weights_only=True)
    return loaded


def finish(folder: Path, steps: int) -> None:
    codes = [process.wait() for process in start(folder, steps)]
    assert codes == [0] * RANKS, (codes, (folder / "log.txt").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/crash_test"))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    steps = 2 * options.kills
    shutil.rmtree(options.folder, ignore_errors=True)
    killed, undisturbed = options.folder / "killed", options.folder / "undisturbed"
    for folder in (killed, undisturbed):
        folder.mkdir(parents=True)

    inside_a_save = 0
    for kill in range(1, options.kills + 1):
        processes = start(killed, steps)
        before = newest_line(killed)
        # Two steps further at least, so that the run gets on; then a moment at random within the next ones.
        while newest_line(killed) < before + 3 and all(process.poll() is None for process in processes):
            time.sleep(0.01)
        time.sleep(rng.random() * 0.5)
        victims = rng.choice([[0], [1], [0, 1]])
        for rank in victims:
            processes[rank].send_signal(signal.SIGKILL)
        partial = bool(list(killed.glob("checkpoint/*.partial")))
        inside_a_save += partial
        for process in processes:
            process.kill()
            process.wait()
        for step in saved_steps(killed / "checkpoint"):
            folder = step_folder(killed / "checkpoint", step)
            for record in read_manifest(folder):
                assert verify_file(folder, record) is None, (kill, step)
        newest = max(saved_steps(killed / "checkpoint"), default=0)
        print(f"kill {kill}: ranks {victims}{', inside a save' if partial else ''}; newest step {newest}", flush=True)

    finish(killed, steps)
    finish(undisturbed, steps)
    ours, theirs = tensors(killed, steps), tensors(undisturbed, steps)
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    assert not different, different
    assert not list(killed.glob("checkpoint/*.damaged"))
    print(f"{options.kills} kills, {inside_a_save} of them inside saves: {len(ours)} tensors bitwise equal")


if __name__ == "__main__":
    main()
