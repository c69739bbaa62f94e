"""Run the kernels that Inductor generates for a GPU on the CPU, and print their errors against eager as markdown.

    python scripts/benchmarks/interpret_kernels.py             # all functions, about 20 minutes
    python scripts/benchmarks/interpret_kernels.py RoPE loss   # functions whose names begin with these

It needs Triton, which is in the extra dev, and g++. The exit code is 1 if an error is above its bound, as in
tests/plugins/test_lowered_numerics.py.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(FOLDER), *(str(FOLDER / "tests" / name) for name in ("harness", "plugins/harness"))]

HEADER = ("function", "kernels", "float32", "bfloat16", "eager bfloat16", "result with the largest error", "seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--gpu", choices=("a100-80", "h100-80", "b200"), default="h100-80")
    arguments = parser.parse_args()

    # The processes import this file before they load the fake GPU, so that it must not import torch at its top.
    import fake_gpu_compiler

    if problem := fake_gpu_compiler.triton_version_problem():
        parser.error(problem)
    import torch
    from lowered_functions import FUNCTIONS, Processes, compare

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder), arguments.gpu)
        print("| " + " | ".join(HEADER) + " |", "| " + " | ".join(["---"] * len(HEADER)) + " |", sep="\n", flush=True)
        for name in FUNCTIONS:
            if not name.startswith(tuple(arguments.names)):
                continue
            begin = time.monotonic()
            single, half = (compare(processes, name, dtype) for dtype in (torch.float32, torch.bfloat16))
            worst = max(half.errors, key=half.errors.__getitem__)
            errors = (max(single.errors.values()), half.errors[worst], half.eager[worst])
            values = (
                name,
                half.kernels,
                *(f"{error:.1e}" for error in errors),
                worst,
                f"{time.monotonic() - begin:.0f}",
            )
            print("| " + " | ".join(map(str, values)) + " |", flush=True)
            for problem in single.problems + half.problems:
                failed = True
                print(f"{name}: {problem}", file=sys.stderr, flush=True)
        processes.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
