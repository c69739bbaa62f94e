"""Measure the cost of exact gradient sums and of grains: these ways take turns on the same ranks.

    python scripts/benchmarks/benchmark_sums.py [--ranks 2] [--width 1024] [--tokens 1024] [--ways WAY ...]

Each rank is a process with one thread. A line has the median seconds of a step and, as medians over the turns, the
ratios of its time, and of the CPU time of all ranks, to those of the first of ``--ways``: by default fast sums with
each microbatch reduced. The ratio of CPU times is more reliable on a busy machine.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from benchmark import LAUNCHER_ENVIRONMENT, cpu_name

from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.connections import gloo_backend
from torchtrain.distributed.mesh import Mesh, resolve_parallel_dims
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.models.llama import TransformerConfig
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import LRSchedulerConfig
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.plugins.exact_sums.options import ExactSumsConfig, GrainsConfig
from torchtrain.trainer import TrainStep, initialize

SEQ_LEN = 256
EXACT = {"sums": "exact"}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], ExactSumsConfig, GrainsConfig]] = {
    "fast": ({}, {}, ExactSumsConfig(), GrainsConfig()),
    "fast, unsharded": ({}, {"fsdp_gradient_accumulation": "unsharded"}, ExactSumsConfig(), GrainsConfig()),
    "exact, all-to-all": (EXACT, {}, ExactSumsConfig("all_to_all"), GrainsConfig()),
    "exact, ring": (EXACT, {}, ExactSumsConfig("ring"), GrainsConfig()),
    "2 tensor grains": (EXACT, {}, ExactSumsConfig("all_to_all"), GrainsConfig(tensor=2)),
    "4 tensor grains": (EXACT, {}, ExactSumsConfig("all_to_all"), GrainsConfig(tensor=4)),
    "4 chunks": (EXACT, {}, ExactSumsConfig("all_to_all"), GrainsConfig(context=4)),
    "4 of both": (EXACT, {}, ExactSumsConfig("all_to_all"), GrainsConfig(tensor=4, context=4)),
}
DEFAULT_WAYS = ["fast", "fast, unsharded", "exact, all-to-all", "exact, ring"]


class NoStop:
    """In place of a StopRequest: nobody asks to stop."""

    pending = agreed = False


def make_step(way: str, args: argparse.Namespace) -> TrainStep:
    training, parallelism, exact_sums, grains = WAYS[way]
    config = JobConfig(
        training=TrainingConfig(
            local_batch_size=args.tokens // SEQ_LEN, seq_len=SEQ_LEN, mixed_precision_param=args.dtype, **training
        ),
        parallelism=ParallelismConfig(**parallelism),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0),
        plugins={"exact_sums": exact_sums, "grains": grains},
    )
    device = torch.device("cpu")
    heads = max(1, args.width // args.head_dim)
    shape = TransformerConfig(
        args.width, args.layers, heads, max(1, heads // 4), args.width * 4, args.vocab, max_seq_len=SEQ_LEN
    )
    model = build_cpu_model(
        shape,
        Mesh(device, resolve_parallel_dims(config.parallelism, dist.get_world_size())),
        device,
        config,
    )
    initialize(model.model_parts, 0, device)
    optimizer = build_optimizer(model.model_parts, config.optimizer)
    use_cpu_kernels(optimizer)
    return TrainStep(
        model,
        Microbatches(model.mesh, device, config.training.local_batch_size, None),
        optimizer,
        LRSchedule(config.lr_scheduler, 1e-4, 10000),
        StepCheck(
            NonFiniteGuard(config.faults, lambda *_: None),
            SpikeDetector(config.faults, device),
            cast(StopRequest, NoStop()),
        ),
        max_norm=1.0,
        wait_for_copies=lambda: None,
    )


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(gloo_backend(), init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    steps = {way: make_step(way, args) for way in args.ways}
    sequences = args.tokens // SEQ_LEN
    for microbatches in args.microbatches:
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
        for turn in range(args.turns + 1):  # the first warms up
            tokens = torch.randint(0, args.vocab, (microbatches * sequences, SEQ_LEN + 1))
            for way, step in steps.items():
                dist.barrier()
                start, cpu_start = time.perf_counter(), time.process_time()
                step(turn + 1, Batch(tokens[:, :-1], tokens[:, 1:]))
                cpu = torch.tensor(time.process_time() - cpu_start)
                dist.all_reduce(cpu)
                seconds[way].append((time.perf_counter() - start, cpu.item()))
        if rank == 0:
            for way, own in seconds.items():
                words = [f"{args.ranks} ranks, {microbatches} microbatches, {way:18}"]
                words.append(f"{statistics.median(wall for wall, _ in own[1:]):7.3f} s")
                for kind, name in enumerate(("time", "CPU time")):
                    ratios = [a[kind] / b[kind] for a, b in zip(own[1:], seconds[args.ways[0]][1:], strict=True)]
                    words.append(f"{name} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
                print("  ".join(words), flush=True)
    dist.destroy_process_group()


def in_processes(measure: Callable[[int, str, argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Say what machine this is, and call ``measure(rank, file of the store, args)`` in ``args.ranks`` processes."""
    print(f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}; {vars(args)}", flush=True)
    with TemporaryDirectory() as folder:
        os.environ.update(LAUNCHER_ENVIRONMENT)
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(r, f"{folder}/store", args)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    with suppress(StopIteration):
        raise SystemExit(next(process.exitcode for process in ranks if process.exitcode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024, help="in a microbatch of one rank")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4], help="of one rank in a step")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=DEFAULT_WAYS)
    args = parser.parse_args()
    in_processes(measure, args)


if __name__ == "__main__":
    main()
