"""Compare Muon with its work divided over ranks to Muon with replicated work, in turns on the same ranks.

    python scripts/benchmarks/benchmark_muon.py [--ranks 4] [--replicas 1] [--width 512] [--layers 12] [--turns 5]

In the trainer's implementation each matrix has an owner. In the other, every rank gathers every matrix and repeats
the iteration. Each rank is a process with one thread. The script prints median seconds of the whole optimizer step and
of the CPU time of all ranks, their ratios as medians over the turns, and the bytes sent per step, with the formula of
docs/performance.md for comparison.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmark_sums import in_processes
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtrain.config.registry import OPTIMIZERS
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.distributed.connections import gloo_backend
from torchtrain.distributed.mesh import Mesh, local, resolve_parallel_dims
from torchtrain.models.llama import TransformerConfig
from torchtrain.optimizers.container import OptimizerContainer
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.plugins.muon.muon import Muon, orthogonalize, shard_of
from torchtrain.trainer import initialize


class Repeated(Muon):
    """Every rank gathers every matrix, and iterates."""

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        for matrix in self.group_of:
            parameter: Any = matrix
            options = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            momentum = DTensor.from_local(
                self._accumulate(parameter, skip), parameter.device_mesh, parameter.placements, **options
            )
            whole = orthogonalize(momentum.full_tensor(), self.options.iterations)
            self._apply([[parameter]], whole[shard_of(parameter, self.degrees, self.rank)].flatten, skip)


WAYS = {"owners": Muon, "repeated": Repeated}


def make(way: str, args: argparse.Namespace) -> tuple[OptimizerContainer, int]:
    """The optimizer of a model with gradients, and the elements of the matrices."""
    config = JobConfig(
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=args.replicas),
        optimizer=OptimizerConfig(name="muon", lr=1e-3),
    )
    device, heads = torch.device("cpu"), max(1, args.width // 64)
    shape = TransformerConfig(args.width, args.layers, heads, heads, args.width * 4, args.vocab)
    model = build_cpu_model(
        shape,
        Mesh(device, resolve_parallel_dims(config.parallelism, dist.get_world_size())),
        device,
        config,
    )
    initialize(model.model_parts, 0, device)
    with patch.dict(OPTIMIZERS._entries, muon=WAYS[way]):
        optimizer = build_optimizer(model.model_parts, config.optimizer, model.mesh)
    use_cpu_kernels(optimizer)
    torch.manual_seed(0)
    for part in model.model_parts:
        for parameter in part.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).normal_()
    (matrices,) = (group["params"] for group in optimizer.param_groups if group["name"] == "hidden")
    return optimizer, sum(parameter.numel() for parameter in matrices)


def sent_in(step: Callable[[], None]) -> int:
    """Bytes that this rank gives to all-to-alls for others."""
    exchange, sent = dist.all_to_all_single, 0

    def counted(output: Tensor, input: Tensor, receives: Any, sends: Any, *rest: Any, **options: Any) -> Any:
        nonlocal sent
        sent += (sum(sends) - sends[dist.get_rank()]) * input.itemsize
        return exchange(output, input, receives, sends, *rest, **options)

    with patch.object(dist, "all_to_all_single", counted):
        step()
    return sent


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(gloo_backend(), init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    made = {way: make(way, args) for way in WAYS}
    elements = made["owners"][1]
    sent = torch.tensor(sent_in(made["owners"][0].step))
    dist.all_reduce(sent)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in made}
    for _ in range(args.turns + 1):  # the first warms up
        for way, (optimizer, _) in made.items():
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            optimizer.step()
            dist.barrier()
            wall, cpu = time.perf_counter() - start, torch.tensor(time.process_time() - cpu_start)
            dist.all_reduce(cpu)
            seconds[way].append((wall, cpu.item()))
    if rank == 0:
        for way, own in seconds.items():
            wall, cpu_seconds = (statistics.median(turn[kind] for turn in own[1:]) for kind in (0, 1))
            print(f"{way:10} {wall:7.3f} s  {cpu_seconds:7.3f} s of CPU time", flush=True)
        for kind, name in enumerate(("time", "CPU time")):
            ratios = [b[kind] / a[kind] for a, b in zip(seconds["owners"][1:], seconds["repeated"][1:], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"repeated over owners, {name}: {statistics.median(ratios):.2f} ({spread})", flush=True)
        formula = 4 * elements * (1 + args.replicas - 2 * args.replicas / args.ranks)
        print(f"owners: all ranks send {sent.item():,} bytes, by the formula {formula:,.0f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    in_processes(measure, args)


if __name__ == "__main__":
    main()
