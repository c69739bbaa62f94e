"""Fit the speed of attention kernels to the published benchmarks in published_attention.csv.

    python scripts/benchmarks/fit_attention.py    # the values of plugins/planner/attention.py, and their errors

A row has the TFLOP/s of one kernel at one sequence length; masked pairs are not counted as FLOPs, and backward has 2.5
times the FLOPs of forward. The figures of FlashAttention-3's paper are the labels of its bars. Two parameters are
fitted for each GPU generation, kernel, direction and head size (``AttentionSpeed``), by least squares of relative
errors. Only causal rows are used where there are three or more. The last column is the largest error of a row that was
left out of its fit, and the sequence length of that row.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent.parent)]

from torchtrain.plugins.planner.attention import AttentionSpeed, Kernel  # noqa: E402

CSV = FOLDER / "published_attention.csv"
# Peak dense bfloat16 TFLOP/s by the data sheets, and major compute capability.
BENCHMARKED = {"a100": (312, 8), "h100": (989, 9), "h200": (989, 9), "b200": (2250, 10), "gb200": (2500, 10)}
# The kernels that PyTorch 2.13 calls. Of cuDNN, the older version has the head sizes that the newer rows lack.
VERSIONS = ("2", "3", "9.1", "9.27")


class Point(NamedTuple):
    keys: float  # mean number of keys per query
    fraction: float  # of the peak
    seq_len: int
    causal: bool


def read() -> dict[Kernel, list[Point]]:
    """Return the benchmarks by kernel; of several versions of a kernel, the last of ``VERSIONS``."""
    by_version: dict[Kernel, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    with CSV.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["version"] not in VERSIONS:
                continue
            peak, generation = BENCHMARKED[row["gpu"]]
            causal, seq_len = row["mask"] == "causal", int(row["seq_len"])
            key = Kernel(row["kernel"], generation, row["direction"], int(row["head_dim"]))
            keys = seq_len / 2 if causal else seq_len
            by_version[key][row["version"]].append(Point(keys, float(row["tflops"]) / peak, seq_len, causal))
    found = {}
    for key, versions in by_version.items():
        points = versions[max(versions, key=VERSIONS.index)]
        causal_points = [point for point in points if point.causal]
        found[key] = causal_points if len(causal_points) >= 3 else points
    return found


def fit(points: Sequence[Point]) -> AttentionSpeed:
    """Fit 1 / fraction = 1 / efficiency + overhead_keys / efficiency / keys, with equal weights of relative errors."""
    fractions = torch.tensor([point.fraction for point in points], dtype=torch.float64)
    keys = torch.tensor([point.keys for point in points], dtype=torch.float64)
    terms = torch.stack((fractions, fractions / keys), dim=1)
    inverse, slope = torch.linalg.lstsq(terms, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0].tolist()
    return AttentionSpeed(round(1 / inverse, 3), round(slope / inverse))


def main() -> None:
    print("| kernel | generation | head size | direction | efficiency | overhead, keys | error | left out |")
    print("| --- | --: | --: | --- |" + " --: |" * 4)
    for kernel, points in sorted(read().items()):
        speed = fit(points)
        errors = [speed.fraction(point.keys) / point.fraction - 1 for point in points]
        left_out = []
        for i, point in enumerate(points):
            found = fit([*points[:i], *points[i + 1 :]]).fraction(point.keys) / point.fraction - 1
            left_out.append((abs(found), f"{found:+.1%} at {point.seq_len}"))
        print(f"| {kernel.name} | {kernel.generation} | {kernel.head_dim} | {kernel.direction}", end="")
        print(f" | {speed.efficiency:.3f} | {speed.overhead_keys:.0f} | {max(errors, key=abs):+.1%}", end="")
        print(f" | {max(left_out)[1]} |")


if __name__ == "__main__":
    main()
