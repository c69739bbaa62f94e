"""Fingerprints of a step, and the first tensor of two runs that rounding does not explain."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from torchtrain.errors import TorchtrainError
from torchtrain.files import atomic_write

FILE = "tensors.safetensors"
# Rounding explains a distance of GAIN * (eps of the dtype + largest distance of earlier tensors), at least of LEAST.
GAIN, LEAST = 4, 1e-5

Box = list[list[tuple[int, int]]]  # along each dimension the ranges of indices, each a start and a stop


class Fingerprint(NamedTuple):
    """Of a tensor, or of a rank's part of it. ``note``: what is wrong with how the parts fit together."""

    dtype: str
    shape: Sequence[int]  # of the whole
    note: str
    numbers: npt.NDArray[np.float64]
    """Sum, sum of absolutes, largest absolute, then values at sampled places of the whole, 0 where others hold it."""

    @property
    def eps(self) -> float:
        return torch.finfo(getattr(torch, self.dtype)).eps


@dataclass
class Step:
    """What was computed in a step."""

    tensors: dict[str, Fingerprint]  # in the order of execution
    rows: npt.NDArray[np.int32]  # of the whole batch: (rows, 2, seq), tokens and labels

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: tensor.numbers for key, tensor in self.tensors.items()}
        about = {"about": json.dumps({key: tensor[:3] for key, tensor in self.tensors.items()})}
        with atomic_write(folder / FILE) as file:
            file.write(save({**tensors, "rows": self.rows}, about))


def read(folder: Path) -> Step:
    """What ``Step.save`` has written; TorchtrainError: it is missing or damaged."""
    try:
        with safe_open(folder / FILE, "np") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {}
            for key, (dtype, shape, note) in about.items():
                tensors[key] = Fingerprint(dtype, shape, note, file.get_tensor(key))
            return Step(tensors, file.get_tensor("rows"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise TorchtrainError(f"{folder / FILE} is missing or damaged ({error})") from error


def together(parts: Sequence[Fingerprint], note: str = "") -> Fingerprint:
    """The fingerprint of what these parts of one tensor make."""
    numbers = np.stack([part.numbers for part in parts])
    summed = np.concatenate((numbers[:, :2].sum(0), numbers[:, 2:3].max(0), numbers[:, 3:].sum(0)))
    return parts[0]._replace(numbers=summed, note=note)


def whole(parts: Mapping[int, tuple[Box, Fingerprint]]) -> Fingerprint:
    """The tensor that the ``parts`` of these ranks make. Replicas count once."""
    first: dict[str, int] = {}  # rank with this box
    note = ""
    for rank, (box, part) in parts.items():
        other = first.setdefault(str(box), rank)
        if (apart := distance(parts[other][1], part)) > LEAST:
            note = f"ranks {other} and {rank} should hold the same of it, and are {apart:.1e} apart"
    boxes, kept = zip(*(parts[rank] for rank in first.values()), strict=True)
    shape = kept[0].shape
    held = sum(math.prod(sum(stop - start for start, stop in along) for along in box) for box in boxes)
    if held != math.prod(shape):
        there = {row for box in boxes for start, stop in box[0] for row in range(start, stop)}
        gone = sorted(set(range(shape[0])) - there)
        what = f"rows {gone[0]} to {gone[-1]} of {shape[0]} are missing" if gone else "parts are missing or come twice"
        note = f"{held / math.prod(shape):.0%} of it is there: {what}"
    return together(kept, note)


def distance(a: Fingerprint, b: Fingerprint, update: bool = False) -> float:
    """How far apart two tensors are, relative to their size: the most that any of the figures and the samples say.

    Of an ``update`` by Adam, where a gradient next to zero may change its sign, what most of the samples say.
    """
    x, y = a.numbers, b.numbers
    if a.shape != b.shape:
        return math.inf
    same = (x == y) | (np.isnan(x) & np.isnan(y))  # NaN in both is equal
    if same.all() or not (x[1] or y[1]):
        return 0.0
    with np.errstate(all="ignore"):
        apart = np.where(same, 0.0, np.abs(x - y))
        size = np.where(same & ~np.isfinite(x), 0.0, np.maximum(np.abs(x), np.abs(y)))
        figures = apart[:3] / np.maximum(size[[1, 1, 2]], 1e-150)
        samples = np.maximum(np.sqrt(np.mean(size[3:] ** 2)), 1e-150)  # all may be 0, as in the gradient of embeddings
        if update:
            found = np.median(apart[3:]) / samples, figures[1]
        else:
            found = np.sqrt(np.mean(apart[3:] ** 2)) / samples, *figures
    return max(math.inf if math.isnan(ratio) else float(ratio) for ratio in found)


class Finding(NamedTuple):
    """A tensor that differs: its distance, the largest one before it, and how much of it rounding explains."""

    step: int
    key: str
    distance: float
    before: float
    allowed: float
    dtype: str
    note: str

    def __str__(self) -> str:
        apart = self.note or f"{self.distance:.1e} apart"
        allowed = f" ({self.dtype} allows {self.allowed:.1e})" if math.isfinite(self.distance) else ""
        return f"step {self.step}, {self.key}: {apart} where all before it agrees to {self.before:.1e}{allowed}"


def walk(a: Step, b: Step, number: int, before: float = 0.0) -> tuple[Finding | None, float]:
    """The first tensor of step ``number`` that differs by more than rounding allows, and the distance of those before.

    ``before``: distance of what was compared before this step.
    """
    for key in {**a.tensors, **b.tensors}:
        ours, theirs = a.tensors.get(key), b.tensors.get(key)
        if ours is None or theirs is None:
            note = f"only {'A' if theirs is None else 'B'} has it,"
            return Finding(number, key, math.inf, before, 0.0, "", note), before
        apart = distance(ours, theirs, key.endswith(" update"))
        eps, dtype = max((f.eps, f.dtype) for f in (ours, theirs))
        allowed = max(LEAST, GAIN * (eps + before))
        update = a.tensors.get(f"{key} update")
        if update is not None and ours.numbers[1]:
            # Parameters drift apart: Adam may turn an update around where the gradient is next to zero.
            allowed += math.sqrt(update.eps) * (number - 1) * update.numbers[1] / ours.numbers[1]
        note = "; ".join(f"{name}: {f.note}" for name, f in (("A", ours), ("B", theirs)) if f.note)
        if note or apart > allowed:
            return Finding(number, key, apart, before, allowed, dtype, note or multiple(ours, theirs)), before
        before = max(before, apart)
    return None, before


def multiple(a: Fingerprint, b: Fingerprint) -> str:
    """A note where one tensor is a multiple of the other, else nothing."""
    if a.shape == b.shape:
        x, y = a.numbers[3:], b.numbers[3:]
        known = np.abs(x) > 0.1 * np.abs(x).max()
        ratios = y[known] / x[known]
        if len(ratios) > 1 and np.ptp(ratios) < max(1e-3, GAIN * a.eps) * abs(float(np.median(ratios))):
            return f"in B {np.median(ratios):.4g} times what it is in A,"
    return ""
