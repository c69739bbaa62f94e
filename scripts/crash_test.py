"""Kill a training run at random moments, again and again: ``python scripts/crash_test.py --kills 30``.

Two ranks train the debug model with a checkpoint every second step, written in the background. Each round starts the
run, lets it finish one save, and sends SIGKILL to one rank or to both: at any moment of the following steps, or, every
other time, a moment after the next save has begun. In the end the weights must be bitwise those of a run that nobody
disturbed, no checkpoint may have been found damaged, and whatever has a final name must be what its manifest says.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtrain.checkpoint.manager import saved_steps, step_folder
from torchtrain.checkpoint.storage import PARTIAL_SUFFIX, read_manifest, verify_file

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


def newest_step(folder: Path) -> int:
    return max(saved_steps(folder / "checkpoint"), default=0)


def begun_save(folder: Path) -> bool:
    return any(folder.glob(f"checkpoint/*{PARTIAL_SUFFIX}"))


def wait_for(condition: Callable[[], bool], processes: list["subprocess.Popen[bytes]"]) -> None:
    while not condition():
        assert all(process.poll() is None for process in processes), "a rank ended by itself: see log.txt"
        time.sleep(0.002)


def run_and_kill(folder: Path, steps: int, rng: random.Random, aimed: bool) -> list[int]:
    """Go on with the run for one save at least; returns the ranks that SIGKILL hit first. ``aimed``: at a save."""
    before = newest_step(folder)
    processes = start(folder, steps)
    wait_for(lambda: newest_step(folder) > before, processes)
    if aimed:
        wait_for(lambda: begun_save(folder), processes)
    time.sleep(rng.random() * (0.1 if aimed else 0.5))
    victims = rng.choice([[0], [1], [0, 1]])
    for rank in victims:
        processes[rank].send_signal(signal.SIGKILL)
    for process in processes:
        process.kill()
        process.wait()
    return victims


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
    steps = 8 * options.kills  # more than the rounds can get through before they are killed
    shutil.rmtree(options.folder, ignore_errors=True)
    killed, undisturbed = options.folder / "killed", options.folder / "undisturbed"
    for folder in (killed, undisturbed):
        folder.mkdir(parents=True)

    inside_saves = 0
    for kill in range(1, options.kills + 1):
        victims = run_and_kill(killed, steps, rng, aimed=kill % 2 == 0)
        inside = begun_save(killed)  # nobody is left to finish it
        inside_saves += inside
        for step in saved_steps(killed / "checkpoint"):
            folder = step_folder(killed / "checkpoint", step)
            for record in read_manifest(folder):
                assert verify_file(folder, record) is None, (kill, step)
        newest = newest_step(killed)
        print(f"kill {kill}: ranks {victims}{', inside a save' if inside else ''}; newest step {newest}", flush=True)

    finish(killed, steps)
    finish(undisturbed, steps)
    ours, theirs = tensors(killed, steps), tensors(undisturbed, steps)
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    assert not different, different
    assert not list(killed.glob("checkpoint/*.damaged"))
    assert inside_saves, "no kill fell inside a save"
    print(f"{options.kills} kills, {inside_saves} of them inside saves: {len(ours)} tensors bitwise equal")


if __name__ == "__main__":
    main()
