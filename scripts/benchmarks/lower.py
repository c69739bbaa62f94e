"""Compile the training step of configs for a GPU, without a GPU, and print a table of the kernels as markdown.

    python scripts/benchmarks/lower.py                                        # the configs in train_configs/
    python scripts/benchmarks/lower.py train_configs/llama3_8b.toml --kernels # every kernel of one config
    python scripts/benchmarks/lower.py --matrix --match documents  # options with the 8B config, about 10 minutes in all
    python scripts/benchmarks/lower.py --bytes                                # bytes through memory by compiled graph

It needs Triton, which is in the extra dev, and g++. Two layers per pipeline stage are compiled. The exit code is 1
if a check of tests/plugins/test_lowering.py fails.
"""

import argparse
import contextlib
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

FOLDER = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(FOLDER), *(str(FOLDER / "tests" / name) for name in ("harness", "plugins/harness"))]

if TYPE_CHECKING:
    from lowered_step import Lowered

HEADER = ("config", "GPUs", "kernels", "binaries", "most registers", "spills", "most shared memory", "library calls")
BYTES_HEADER = ("config", "graph", "kernels", "MB", "planner", "library calls", "inputs and outputs")


def table_row(name: str, world_size: int, lowered: "Lowered") -> str:
    code = lowered.code
    values = (
        name,
        world_size,
        len({kernel.name for kernel in code.kernels}),
        len(code.kernels),
        max(kernel.registers for kernel in code.kernels),
        ", ".join(f"{kernel.name}: {kernel.spilled} B" for kernel in code.spills) or "none",
        f"{max(kernel.shared for kernel in code.kernels) / 1024:.0f} KiB",
        sum(len(graph.libraries) for graph in code.graphs),
    )
    return "| " + " | ".join(map(str, values)) + " |"


def byte_rows(name: str, lowered: "Lowered") -> Iterator[str]:
    """Rows of the table with ``BYTES_HEADER``, in MB."""
    for graph in lowered.code.graphs:
        generated = sum(launch.generated for launch in graph.launches)
        libraries = sum(launch.bytes for launch in graph.launches if not launch.generated)
        sizes = (graph.generated_bytes, graph.assumed_bytes, libraries, graph.least_bytes)
        yield "| " + " | ".join((name, graph.name, str(generated), *(f"{size / 1e6:,.1f}" for size in sizes))) + " |"


def kernel_lines(lowered: "Lowered") -> Iterator[str]:
    yield "| graph | kernel | configuration | registers | spilled bytes | shared memory bytes |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for graph in lowered.code.graphs:
        for kernel in graph.kernels:
            numbers = f"{kernel.registers} | {kernel.spilled} | {kernel.shared}"
            yield f"| {graph.name} | {kernel.name} | {kernel.config} | {numbers} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = sorted((FOLDER / "train_configs").glob("llama*[!s].toml"))  # without configs of stages
    parser.add_argument("configs", nargs="*", type=Path, default=shipped)
    parser.add_argument("--gpu", choices=("a100-80", "h100-80", "b200"), default="h100-80")
    parser.add_argument(
        "--matrix", action="store_true", help="instead of configs, the cases of tests/plugins/test_lowering.py"
    )
    parser.add_argument("--match", default="", help="with --matrix: only cases whose name contains this text")
    parser.add_argument("--kernels", action="store_true", help="also print every kernel")
    parser.add_argument("--bytes", action="store_true", help="print the bytes that each graph reads and writes instead")
    arguments = parser.parse_args()

    # The worker imports this file before it loads the fake GPU, so that it must not import torch at its top.
    import fake_cuda
    import fake_gpu_compiler

    if problem := fake_gpu_compiler.triton_version_problem():
        parser.error(problem)
    failed = False
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:

        @functools.cache
        def worker(gpu: str) -> fake_cuda.Worker:
            (Path(folder) / gpu).mkdir()
            process = fake_cuda.Worker(Path(folder) / gpu, fake_gpu_compiler.install, gpu)
            stack.callback(process.close)
            return process

        import lowering_matrix
        import simulated_step

        header = BYTES_HEADER if arguments.bytes else HEADER
        print("| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |", sep="\n", flush=True)

        def report(name: str, world_size: int, lowered: "Lowered", problems: list[str]) -> None:
            nonlocal failed
            rows = byte_rows(name, lowered) if arguments.bytes else [table_row(name, world_size, lowered)]
            print(*rows, sep="\n", flush=True)
            if arguments.kernels:
                print(*kernel_lines(lowered), sep="\n", flush=True)
            for problem in problems:
                failed = True
                print(f"{name}: {problem}", file=sys.stderr, flush=True)

        for path in [] if arguments.matrix else arguments.configs:
            world_size = simulated_step.shipped_config(path)[1]
            report(path.stem, world_size, *lowering_matrix.lower_config(worker(arguments.gpu), path, arguments.gpu))
        for case in lowering_matrix.MATRIX if arguments.matrix else []:
            if arguments.match in str(case):
                lowered = lowering_matrix.lower_case(worker(case.gpu), case)
                world_size = lowering_matrix.OPTIONS[case.option][0]
                report(str(case), world_size, lowered, lowering_matrix.problems_of(case, lowered))
    return failed


if __name__ == "__main__":
    sys.exit(main())
