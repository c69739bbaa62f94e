"""What a checkpoint costs: ``python scripts/benchmark_checkpoint.py``, or under torchrun for several ranks.

Measures, in turn and several times: bare ``torch.save`` of each rank's state, plain DCP, our verified save, and our
asynchronous one: the seconds for which training stands still, and the seconds that the save and the ten steps after it
take beyond ten steps without one. Prints medians and ratios.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.states import ModelState, OptimizerState, TensorSavePlanner, flatten, local_part
from torchtrain.config.schema import Checkpoint
from torchtrain.distributed.process_group import init_process_group

STEPS_AFTER = 10


class Benchmark:
    def __init__(self, width: int, layers: int, folder: Path) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        init_process_group(self.device, 300)
        self.folder = folder
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=self.device) for _ in range(layers)))
        fully_shard(self.model, mesh=init_device_mesh(self.device.type, (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.input = torch.randn(64, width, device=self.device)
        self.states = {"model": ModelState([self.model]), "optimizer": OptimizerState([self.model], self.optimizer)}
        self.managers = {mode: self.manager(mode) for mode in ("disabled", "async")}
        self.step()
        self.saves = 0

    def manager(self, mode: str) -> CheckpointManager:
        config = Checkpoint(enable=True, interval=1, keep_latest_k=1, async_mode=mode)  # type: ignore[arg-type]
        return CheckpointManager(config, self.folder / mode, self.states, "")

    def step(self) -> None:
        self.model(self.input).square().mean().backward()
        self.managers["async"].before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sync(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter()

    def torch_save(self) -> None:
        path = self.folder / f"plain-{dist.get_rank()}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save({name: local_part(tensor) for name, tensor in flatten(self.states).items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def plain_dcp(self) -> None:
        shutil.rmtree(self.folder / "plain", ignore_errors=True)
        tensors = flatten(self.states)
        staged = {name: local_part(tensor) for name, tensor in tensors.items()}
        writer = dcp.FileSystemWriter(self.folder / "plain")
        dcp.save(tensors, storage_writer=writer, planner=TensorSavePlanner(staged))

    def verified(self) -> None:
        self.managers["disabled"].maybe_save(self.saves)

    def asynchronous(self) -> None:
        self.managers["async"].maybe_save(self.saves)

    def measure(self, save: Callable[[], None]) -> tuple[float, float]:
        """Seconds that ``save`` blocks, and seconds that it and the steps after it take."""
        self.saves += 1
        start = self.sync()
        save()
        blocked = self.sync() - start
        for _ in range(STEPS_AFTER):
            self.step()
        whole = self.sync() - start
        for manager in self.managers.values():
            manager.wait()
        self.sync()
        return blocked, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmark_checkpoint"))
    options = parser.parse_args()
    benchmark = Benchmark(options.width, options.layers, options.folder)
    saves: dict[str, Callable[[], None]] = {
        "no save": lambda: None,
        "torch.save": benchmark.torch_save,
        "plain DCP": benchmark.plain_dcp,
        "verified": benchmark.verified,
        "async": benchmark.asynchronous,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in saves}
    for number in range(options.rounds + 1):
        for name, save in saves.items():
            measured = benchmark.measure(save)
            if number:  # the first round allocates
                times[name].append(measured)
    if dist.get_rank() == 0:
        state_gib = 3 * 4 * options.width**2 * options.layers / 2**30
        print(
            f"torch {torch.__version__}, {benchmark.device.type}, {dist.get_world_size()} rank(s), {state_gib:.2f} GiB"
        )
        blocked = {name: statistics.median(pair[0] for pair in pairs) for name, pairs in times.items()}
        whole = {name: statistics.median(pair[1] for pair in pairs) for name, pairs in times.items()}
        print(f"{'':12}{'blocks':>10}{'lost over the next ' + str(STEPS_AFTER) + ' steps':>32}")
        for name in list(saves)[1:]:
            print(f"{name:12}{blocked[name]:>8.3f} s{whole[name] - whole['no save']:>30.3f} s")
        print(f"verified / plain DCP: {blocked['verified'] / blocked['plain DCP']:.2f}")
        print(f"async / verified, blocking: {blocked['async'] / blocked['verified']:.2f}")
    for manager in benchmark.managers.values():
        manager.close()
    dist.destroy_process_group()
    shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
