"""The race of the worker threads of PyTorch's gloo: python scripts/faults/gloo_threads.py --calls 3000

Each call of the tests' pool of processes (``GlooPool``) starts collectives on two ranks that overlap, as tensor
parallelism does on CPUs. Prints in how many calls a rank died or hung: in groups of PyTorch's gloo, whose two threads
write to the same string, and of torchtrain's backend (``gloo_backend``), for which that is an error (exit code 1).

A rank of PyTorch's dies in one of thousands of calls. Therefore a thread that copies the name of a collective to this
string sleeps for 0.2 ms first (gloo_threads.c); ``--no-pause`` leaves that out. Linux on x86-64, with a C compiler.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(__file__).parents[2]
sys.path[:0] = [str(FOLDER), str(FOLDER / "tests" / "harness"), str(FOLDER / "scripts" / "faults")]

from disk_faults import COMPILER  # noqa: E402
from forkserver import context  # noqa: E402
from gloo_pool import GlooPool  # noqa: E402

from torchtrain.distributed.connections import gloo_backend  # noqa: E402


def overlap_collectives(backend: str, rounds: int) -> None:
    """Start two all-gathers of DTensor and an all-reduce in a new group, and wait for them; ``rounds`` times."""
    gloo_backend()  # registers it
    group = dist.new_group(backend=backend)
    ranks, functional = group.size(), torch.ops._c10d_functional
    for _ in range(rounds):
        gathered = [functional.all_gather_into_tensor(torch.ones(64), ranks, group.group_name) for _ in range(2)]
        reduced = torch.ones(4)
        work = dist.all_reduce(reduced, group=group, async_op=True)
        assert [functional.wait_tensor(tensor).sum().item() for tensor in gathered] == [64 * ranks] * 2
        work.wait()
        assert reduced.sum().item() == 4 * ranks


def failed_calls(backend: str, calls: int, rounds: int) -> list[str]:
    """The errors of those of ``calls`` calls of the pool in which a rank died, or hung after its heap was damaged."""
    pool, errors = GlooPool(timeout_seconds=20), []
    for _ in range(calls):
        try:
            pool.run(2, overlap_collectives, backend, rounds)
        except AssertionError as error:
            errors.append(str(error))
    pool.close()
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20, help="of overlapping collectives in a call")
    parser.add_argument("--no-pause", action="store_true", help="run PyTorch as it is")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert COMPILER or args.no_pause, "no C compiler: use --no-pause"
    with tempfile.TemporaryDirectory() as folder:
        if not args.no_pause:
            library = f"{folder}/gloo_threads.so"
            command = [str(COMPILER), "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", library]
            subprocess.run([*command, str(Path(__file__).with_suffix(".c"))], check=True)
            os.environ["LD_PRELOAD"] = library
        context().set_forkserver_preload(["preload"])
        forkserver.ensure_running()
        os.environ.pop("LD_PRELOAD", None)
        for backend in ("gloo", gloo_backend()):
            errors = failed_calls(backend, args.calls, args.rounds)
            died = sum("exit code -" in error for error in errors)
            print(f"{backend}: {args.calls} calls; a rank died in {died}, and hung in {len(errors) - died}", flush=True)
    sys.exit("\n".join(errors) or 0)


if __name__ == "__main__":
    main()
