"""Measure saves and loads of checkpoints in S3: ``python scripts/benchmarks/benchmark_s3.py``.

Starts a local server (moto), and compares our verified storage with PyTorch's FsspecWriter and FsspecReader, which hash
nothing, with their defaults. Both save and load the same state on the same server, in turns, forward in one round and
backward in the next. The server is a process of its own; objects are deleted between turns. Ratios above 1: ours is
faster. A ratio is the median of the rounds' ratios. CPU seconds are those of the client.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

sys.path.append(str(Path(__file__).parent.parent / "faults"))
from crash_test_s3 import BUCKET, KEYS, Server

from torchtrain.checkpoint.format import VerifiedReader, VerifiedWriter
from torchtrain.checkpoint.states import load_tensors, save_tensors
from torchtrain.checkpoint.storage import WriterLease
from torchtrain.distributed.connections import gloo_backend
from torchtrain.plugins.object_storage.storage import ObjectStorage


class Benchmark:
    def __init__(self, server: Server, width: int, layers: int) -> None:
        self.server = server
        generator = torch.Generator().manual_seed(0)
        self.tensors = {f"layer.{n}": torch.randn(width, width, generator=generator) for n in range(layers)}
        self.storage = ObjectStorage(f"s3://{BUCKET}/ours")
        self.lease = WriterLease(1, "0" * 32)
        self.folder = ""

    def save_ours(self) -> None:
        staged = self.storage.new_checkpoint(1, self.lease)
        self.folder = staged.location.rpartition("/")[2]
        save_tensors(self.tensors, self.tensors.__getitem__, VerifiedWriter(staged, ""), staged.location)

    def load_ours(self, into: dict[str, Tensor]) -> None:
        load_tensors(into, VerifiedReader(self.storage.open(1)))

    def save_torch(self) -> None:
        dcp.save(self.tensors, storage_writer=FsspecWriter(f"s3://{BUCKET}/torch/step-1"))

    def load_torch(self, into: dict[str, Tensor]) -> None:
        dcp.load(into, storage_reader=FsspecReader(f"s3://{BUCKET}/torch/step-1"))

    def measure(self, save: Callable[[], None], load: Callable[[dict[str, Tensor]], None]) -> dict[str, float]:
        """Seconds of ``save``, and of ``load`` after it."""
        into = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        seconds = {}
        for what, call in (("save", save), ("load", partial(load, into))):
            start, cpu = time.perf_counter(), time.process_time()
            call()
            seconds[what] = time.perf_counter() - start
            seconds[f"{what}, CPU"] = time.process_time() - cpu
        assert all(torch.equal(tensor, into[name]) for name, tensor in self.tensors.items())
        for name in self.server.names():
            self.server.client.delete_object(Bucket=BUCKET, Key=name)
        return seconds


def described_ratio(theirs: list[float], ours: list[float]) -> str:
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    medians = f"{statistics.median(theirs):.2f} s and {statistics.median(ours):.2f} s"
    return (
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds; {medians})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    server = Server()
    try:
        os.environ.update(KEYS, AWS_ENDPOINT_URL=server.url)
        dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
        benchmark = Benchmark(server, options.width, options.layers)
        pairs = {
            "ours": (benchmark.save_ours, benchmark.load_ours),
            "torch": (benchmark.save_torch, benchmark.load_torch),
        }
        for pair in pairs.values():
            benchmark.measure(*pair)  # connects
        times: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
        for number in range(options.rounds):
            for name in list(pairs)[:: -1 if number % 2 else 1]:
                times[name].append(benchmark.measure(*pairs[name]))
        size_gib = 4 * options.width**2 * options.layers / 2**30
        print(f"torch {torch.__version__}, xxhash {xxhash.VERSION}, {size_gib:.2f} GiB in {options.layers} tensors")
        for what in times["ours"][0]:
            theirs, ours = ([seconds[what] for seconds in times[name]] for name in ("torch", "ours"))
            print(f"{what}: torch / ours {described_ratio(theirs, ours)}")
        dist.destroy_process_group()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
