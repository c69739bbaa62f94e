"""Measure the GPUs of one machine and what is between them: with one rank per GPU,

    python -m torchtrain.launch --nproc-per-node 8 scripts/benchmarks/measure_collectives.py

Each GPU multiplies matrices and copies memory by itself, all at the same time, so that a slow one shows. Then all
communicate: the bus bandwidth of each collective is counted as nccl-tests do
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and compares with the data sheet's bandwidth of a
GPU in one direction. Beside it is the planner's time of the collective. All-reduces of whole numbers, of which each sum
is exact in float32, are compared with the right result, element by element. ``--tiny`` runs small sizes with gloo on
CPUs. The results are JSON, written by the first rank; a wrong sum ends with exit code 1.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure_kernels import Device
from torch import Tensor

from torchtrain.distributed.process_group import init_process_group
from torchtrain.plugins.planner.hardware import Efficiency
from torchtrain.plugins.planner.nccl import Communicator

SIZES = (1 << 20, 16 << 20, 256 << 20, 1 << 30)  # bytes of the whole tensor
REPEATS = 20
ROUNDS = 50
"""Of the all-reduces that are compared with the right result."""
Row = dict[str, Any]


class Machine:
    """The GPUs of this machine, of which this process has one."""

    def __init__(self, tiny: bool) -> None:
        self.cuda = not tiny
        rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        init_process_group(self.device, 120)
        self.kind = Device(tiny)
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()

    def gathered(self, value: float) -> list[float]:
        """The value of each rank."""
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        values = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(values, own)
        return [other.item() for other in values]

    def seconds(self, run: Callable[[], Any]) -> float:
        """Median duration of a collective: of each repetition, that of the slowest rank."""
        durations = []
        for _ in range(3):
            run()
        for _ in range(REPEATS if self.cuda else 2):
            dist.barrier()
            self.kind.synchronize()
            start = time.perf_counter()
            run()
            self.kind.synchronize()
            durations.append(time.perf_counter() - start)
        return max(self.gathered(statistics.median(durations)))


def alone(machine: Machine) -> list[Row]:
    """Rates of each GPU by itself, in the same moment."""
    width = 8192 if machine.cuda else 64
    x = torch.randn(width, width, device=machine.device).bfloat16()
    large = torch.empty(1 << (30 if machine.cuda else 12), dtype=torch.uint8, device=machine.device)
    other = torch.empty_like(large)
    rates = {
        "product of bfloat16 matrices, TFLOP/s": (lambda: x @ x, 2 * width**3 / 1e12),
        "copy in memory, GB/s": (lambda: other.copy_(large), 2 * large.numel() / 1e9),
    }
    rows: list[Row] = []
    for name, (run, amount) in rates.items():
        dist.barrier()
        found = machine.gathered(amount / machine.kind.seconds(run))
        rows.append({"kind": "alone", "name": name, "rates": found, "slowest": min(found) / statistics.median(found)})
    return rows


def collectives(machine: Machine) -> list[Row]:
    """Bus bandwidth of each collective and size."""
    ranks, gpu = machine.ranks, machine.kind.gpu
    communicator = gpu and Communicator(ranks, 1, gpu.link_bandwidth * Efficiency().link, gpu.capability[0])
    rows: list[Row] = []
    for nbytes in SIZES if machine.cuda else (1 << 12,):
        whole = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=machine.device)
        part, out = whole[: whole.numel() // ranks].clone(), torch.empty_like(whole)
        share = (ranks - 1) / ranks
        peer = machine.rank ^ 1

        def exchange(whole: Tensor = whole, out: Tensor = out, peer: int = peer) -> None:
            messages = [dist.P2POp(dist.isend, whole, peer), dist.P2POp(dist.irecv, out, peer)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        runs: dict[str, tuple[Callable[[], Any], float, str]] = {
            "all-reduce": (partial(dist.all_reduce, whole), 2 * share, "all_reduce"),
            "all-gather": (partial(dist.all_gather_into_tensor, whole, part), share, "all_gather"),
            "message": (exchange, 1.0, "message"),
        }
        if machine.cuda:  # gloo has none of these
            runs["reduce-scatter"] = partial(dist.reduce_scatter_tensor, part, whole), share, "all_gather"
            runs["all-to-all"] = partial(dist.all_to_all_single, out, whole), share, "all_gather"
        for name, (run, factor, method) in runs.items():
            seconds = machine.seconds(run)
            row: Row = {"kind": "collective", "name": name, "bytes": nbytes, "seconds": seconds}
            row["bus_gb_per_second"] = factor * nbytes / seconds / 1e9
            if gpu and communicator:
                row["fraction_of_data_sheet"] = factor * nbytes / seconds / gpu.link_bandwidth
                row["planned_seconds"] = getattr(communicator, method)(nbytes)
            rows.append(row)
    return rows


def exact(machine: Machine) -> Row:
    """Count the wrong elements of all-reduces of whole numbers, whose sums no order of summands changes."""
    wrong, count = 0, 1 << (24 if machine.cuda else 10)
    for seed in range(ROUNDS if machine.cuda else 3):
        # The same generator on all ranks, so that each knows the summands of all.
        generator = torch.Generator(machine.device).manual_seed(seed)
        expected, own = torch.zeros(count, device=machine.device), torch.empty(0)
        for rank in range(machine.ranks):
            summand = torch.randint(-1000, 1000, (count,), generator=generator, device=machine.device).float()
            expected += summand
            own = summand if rank == machine.rank else own
        dist.all_reduce(own)
        wrong += int((own != expected).sum())
    return {"kind": "exact", "elements": count * (ROUNDS if machine.cuda else 3), "wrong": machine.gathered(wrong)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes with gloo, on CPUs")
    parser.add_argument("--output", default="collectives.json", help="file for the results")
    arguments = parser.parse_args()
    machine = Machine(arguments.tiny)
    rows = [*alone(machine), *collectives(machine), exact(machine)]
    if machine.rank == 0:
        link = machine.kind.gpu.link_bandwidth if machine.kind.gpu else None
        results = {"device": machine.kind.name, "ranks": machine.ranks, "link_bandwidth": link, "rows": rows}
        Path(arguments.output).write_text(json.dumps(results), encoding="utf-8")
        for row in rows:
            print(json.dumps(row))
    dist.destroy_process_group()
    return 1 if sum(rows[-1]["wrong"]) else 0


if __name__ == "__main__":
    sys.exit(main())
