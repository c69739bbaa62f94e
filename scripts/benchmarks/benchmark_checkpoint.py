"""Measure the cost of checkpoints, with torchrun for several ranks: ``scripts/benchmarks/benchmark_checkpoint.py``.

Measures bare ``torch.save`` of each rank's state, plain DCP, our verified save, and our asynchronous one: first the
seconds for which training is blocked, then the total cost of a save over the next ten steps.

The comparison is fair: all save the same state, in turns, forward in one round and backward in the next, each into a
new folder. Between turns, outside the measured time, the saved files are deleted, and the benchmark waits until the
disk is idle.
Plain DCP has its own defaults (one thread, one file for each rank, flushed by fsync), our planner, and the same process
group; it hashes nothing, has no manifest, and does not flush folders. A ratio is the median of the rounds' ratios.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import find_resume_point
from torchtrain.checkpoint.states import ModelState, TensorSavePlanner, flatten
from torchtrain.distributed.mesh import local
from torchtrain.distributed.process_group import init_process_group
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig

STEPS_AFTER = 10


class Benchmark:
    def __init__(self, width: int, layers: int, folder: Path) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        init_process_group(self.device, 300)
        self.folder = folder
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=self.device) for _ in range(layers)))
        fully_shard(self.model, mesh=init_device_mesh(self.device.type, (dist.get_world_size(),)))
        self.optimizer = build_optimizer([self.model], OptimizerConfig())
        self.input = torch.randn(16, width, device=self.device)
        self.states = {"model": ModelState([self.model]), "optimizer": self.optimizer}
        self.managers = {mode: self.manager(mode) for mode in ("disabled", "async")}
        self.step()
        self.saves = 0

    def manager(self, mode: str) -> CheckpointManager:
        config = CheckpointConfig(enable=True, interval=1, keep_latest_k=0, async_mode=mode)  # type: ignore[arg-type]
        folder = self.folder / mode
        storage = LocalStorage(str(folder))
        return CheckpointManager(config, storage, self.states, "", find_resume_point(config, storage, ""))

    def step(self) -> None:
        self.model(self.input).square().mean().backward()
        self.managers["async"].wait_for_copies()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sync(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    def no_save(self) -> None:
        pass

    def torch_save(self) -> None:
        with (self.folder / f"plain-{dist.get_rank()}.pt").open("wb") as file:
            torch.save({name: local(tensor) for name, tensor in flatten(self.states).items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def plain_dcp(self) -> None:
        tensors = flatten(self.states)
        planner = TensorSavePlanner({name: local(tensor) for name, tensor in tensors.items()}.__getitem__)
        writer = dcp.FileSystemWriter(self.folder / "plain")
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=self.managers["disabled"].group)

    def verified(self) -> None:
        self.managers["disabled"].maybe_save(self.saves)

    def asynchronous(self) -> None:
        self.managers["async"].maybe_save(self.saves)

    def measure(self, save: Callable[[], None], steps: int) -> tuple[float, float]:
        """Seconds that ``save`` blocks, and seconds that it and ``steps`` after it take."""
        self.saves += 1
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            os.sync()
        start = self.sync()
        save()
        blocked = self.sync() - start
        for _ in range(steps):
            self.step()
        whole = self.sync() - start
        for manager in self.managers.values():
            manager.wait()
        self.sync()
        return blocked, whole

    def rounds(self, count: int, steps: int) -> dict[str, list[tuple[float, float]]]:
        """What ``measure`` gives, by the name of the save, ``count`` times."""
        saves = {
            "no save": self.no_save,
            "torch.save": self.torch_save,
            "plain DCP": self.plain_dcp,
            "verified": self.verified,
            "async": self.asynchronous,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
        for number in range(count):
            for name in list(saves)[:: -1 if number % 2 else 1]:
                times[name].append(self.measure(saves[name], steps))
        return times


def described_ratio(above: Iterable[float], below: Iterable[float]) -> str:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    quarter, _, three_quarters = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.2f} (middle half of {len(ratios)}: {quarter:.2f} to {three_quarters:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=11, help="of saves alone; at least 2")
    parser.add_argument("--loops", type=int, default=3, help=f"rounds of a save and the {STEPS_AFTER} steps after it")
    parser.add_argument("--folder", type=Path, default=Path("outputs"), help="in which to make benchmark_checkpoint")
    options = parser.parse_args()
    folder = options.folder / "benchmark_checkpoint"
    benchmark = Benchmark(options.width, options.layers, folder)
    benchmark.rounds(1, steps=0)  # allocates
    alone, loops = benchmark.rounds(options.rounds, steps=0), benchmark.rounds(options.loops, steps=STEPS_AFTER)
    if dist.get_rank() == 0:
        state_gib = 3 * 4 * options.width**2 * options.layers / 2**30
        print(
            f"torch {torch.__version__}, {benchmark.device.type}, {dist.get_world_size()} rank(s), {state_gib:.2f} GiB"
        )
        blocked = {name: [seconds for seconds, _ in pairs] for name, pairs in alone.items()}
        whole = {name: statistics.median(seconds for _, seconds in pairs) for name, pairs in loops.items()}
        print(f"{'':12}{'blocks':>10}{'lost over the next ' + str(STEPS_AFTER) + ' steps':>32}")
        for name in list(blocked)[1:]:
            print(f"{name:12}{statistics.median(blocked[name]):>8.3f} s{whole[name] - whole['no save']:>30.3f} s")
        print("verified / plain DCP:", described_ratio(blocked["verified"], blocked["plain DCP"]))
        print("async / verified, blocking:", described_ratio(blocked["async"], blocked["verified"]))
    for manager in benchmark.managers.values():
        manager.close()
    dist.destroy_process_group()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
