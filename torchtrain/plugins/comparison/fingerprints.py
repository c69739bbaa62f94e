"""Fingerprints of a training step, and the first tensor in which two runs differ by more than rounding."""

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
from torchtrain.files import atomic_write, parse_json

FILE = "tensors.safetensors"
# Rounding explains a relative distance of GAIN * (eps of the dtype + largest distance of earlier tensors), and any
# distance up to MIN_TOLERANCE.
GAIN, MIN_TOLERANCE = 4, 1e-5

Box = list[list[tuple[int, int]]]  # for each dimension, ranges of indices (start, stop)


class Fingerprint(NamedTuple):
    """Fingerprint of a tensor, or of the part of it that one rank has."""

    dtype: str
    """dtype in which the values were computed, without "torch."."""
    shape: Sequence[int]
    """Shape of the global tensor."""
    note: str
    """Inconsistency between the parts of different ranks, or ""."""
    numbers: npt.NDArray[np.float64]
    """Sum, sum of absolute values and maximum absolute value, then the values at sampled indices of the global tensor.
    Samples that this rank does not have are 0."""

    @property
    def eps(self) -> float:
        """Machine epsilon of ``dtype``."""
        return torch.finfo(getattr(torch, self.dtype)).eps


RankPart = tuple[Box, Fingerprint]
"""The indices of a tensor that a rank has, and their fingerprint."""


@dataclass
class StepFingerprints:
    """Fingerprints of one training step, and its global batch."""

    tensors: dict[str, Fingerprint]
    """Fingerprints by name, in the order of execution."""
    rows: npt.NDArray[np.int32]
    """Tokens and labels of the global batch, of shape (rows, 2, seq)."""

    def save(self, folder: Path) -> None:
        """Write the fingerprints to ``folder``, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: tensor.numbers for key, tensor in self.tensors.items()}
        about = {"about": json.dumps({key: tensor[:3] for key, tensor in self.tensors.items()})}
        with atomic_write(folder / FILE) as file:
            file.write(save({**tensors, "rows": self.rows}, about))


def read(folder: Path) -> StepFingerprints:
    """Read the fingerprints that ``StepFingerprints.save`` has written to ``folder``.

    Raises:
        TorchtrainError: the file is missing or damaged.
    """
    try:
        with safe_open(folder / FILE, "np") as file:
            about = parse_json(file.metadata()["about"], folder / FILE, TorchtrainError)
            tensors = {}
            for key, (dtype, shape, note) in about.items():
                tensors[key] = Fingerprint(dtype, shape, note, file.get_tensor(key))
            return StepFingerprints(tensors, file.get_tensor("rows"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise TorchtrainError(f"{folder / FILE} is missing or damaged ({error})") from error


def merge(parts: Sequence[Fingerprint], note: str = "") -> Fingerprint:
    """Merge the fingerprints of disjoint parts of one tensor."""
    numbers = np.stack([part.numbers for part in parts])
    summed = np.concatenate((numbers[:, :2].sum(0), numbers[:, 2:3].max(0), numbers[:, 3:].sum(0)))
    return parts[0]._replace(numbers=summed, note=note)


def assemble(parts: Mapping[int, RankPart], tolerance: float = MIN_TOLERANCE, floor: float = 0.0) -> Fingerprint:
    """Assemble the fingerprint of a global tensor from the parts of all ranks.

    Replicas, which have the same box, count once. A note reports replicas that differ and parts that are missing.

    Args:
        parts: by rank.
        tolerance: the largest distance of replicas that rounding explains.
        floor: see ``distance``.
    """
    first: dict[str, int] = {}  # the first rank with each box
    note = ""
    for rank, (box, part) in parts.items():
        replica = first.setdefault(str(box), rank)
        difference = distance(parts[replica][1], part, floor=floor)
        if difference > tolerance:
            note = f"ranks {replica} and {rank} have replicas that differ by {difference:.1e}"
    boxes, fingerprints = zip(*(parts[rank] for rank in first.values()), strict=True)
    shape = fingerprints[0].shape
    elements = 0
    for box in boxes:
        elements += math.prod(sum(stop - start for start, stop in ranges) for ranges in box)
    if elements != math.prod(shape):
        present = {row for box in boxes for start, stop in box[0] for row in range(start, stop)}
        missing = sorted(set(range(shape[0])) - present)
        reason = "parts are missing or duplicated"
        if missing:
            reason = f"rows {missing[0]} to {missing[-1]} of {shape[0]} are missing"
        note = f"{elements / math.prod(shape):.0%} of its elements are present: {reason}"
    return merge(fingerprints, note)


def distance(a: Fingerprint, b: Fingerprint, update: bool = False, floor: float = 0.0) -> float:
    """Relative distance of two tensors: the maximum over their statistics and the root mean square of their samples.

    Args:
        update: whether the tensors are updates of parameters. Adam may reverse an update whose gradient is close to
            zero, so the median of the samples is used, and of the statistics only the sum of absolute values.
        floor: the size of an element below which differences are relative to it: a gradient that is 0 in mathematics
            has only rounding errors.

    Returns:
        0 for identical tensors, where NaN equals NaN; infinity for different shapes or if only one has NaN.
    """
    x, y = a.numbers, b.numbers
    if a.shape != b.shape:
        return math.inf
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    if same.all() or not (x[1] or y[1]):
        return 0.0
    with np.errstate(all="ignore"):
        difference = np.where(same, 0.0, np.abs(x - y))
        size = np.where(same & ~np.isfinite(x), 0.0, np.maximum(np.abs(x), np.abs(y)))
        of_sums = max(floor * math.prod(a.shape), 1e-150)
        statistics = difference[:3] / np.maximum(size[[1, 1, 2]], [of_sums, of_sums, max(floor, 1e-150)])
        # All samples may be 0, as in the gradient of embeddings.
        sample_size = max(float(np.sqrt(np.mean(size[3:] ** 2))), floor, 1e-150)
        if update:
            ratios = [np.median(difference[3:]) / sample_size, statistics[1]]
        else:
            ratios = [np.sqrt(np.mean(difference[3:] ** 2)) / sample_size, *statistics]
    return max(math.inf if math.isnan(ratio) else float(ratio) for ratio in ratios)


class TensorDifference(NamedTuple):
    """A tensor in which two runs differ by more than rounding."""

    step: int
    key: str
    """Name of the tensor."""
    distance: float
    before: float
    """Largest distance of the tensors before it."""
    allowed: float
    """Largest distance that rounding explains."""
    dtype: str
    note: str
    """Description of the difference if more is known than its distance, or ""."""

    def __str__(self) -> str:
        what = self.note or f"differs by {self.distance:.1e}"
        allowed = f" ({self.dtype} allows {self.allowed:.1e})" if math.isfinite(self.distance) else ""
        return f"step {self.step}, {self.key}: {what}, while all tensors before it agree to {self.before:.1e}{allowed}"


def first_difference(
    a: StepFingerprints, b: StepFingerprints, number: int, before: float = 0.0, *, is_first: bool = False
) -> tuple[TensorDifference | None, float]:
    """Find the first tensor of step ``number``, in the order of execution, that differs by more than rounding.

    Args:
        before: largest distance in the steps that were compared before.
        is_first: none was compared before. Steps that were not may be as far apart as those that match.

    Returns:
        The difference, or None, and the largest distance of all tensors before it.
    """
    unseen = MIN_TOLERANCE if is_first and number > 1 else 0.0
    for key in {**a.tensors, **b.tensors}:
        ours, theirs = a.tensors.get(key), b.tensors.get(key)
        if ours is None or theirs is None:
            note = f"only {'A' if theirs is None else 'B'} has it"
            return TensorDifference(number, key, math.inf, before, 0.0, "", note), before
        difference = distance(ours, theirs, key.endswith(" update"))
        eps, dtype = max((f.eps, f.dtype) for f in (ours, theirs))
        allowed = max(MIN_TOLERANCE, GAIN * (eps + max(before, unseen)))
        update = a.tensors.get(f"{key} update")
        if update is not None and ours.numbers[1]:
            # Parameters diverge, because Adam may reverse an update whose gradient is close to zero.
            allowed += math.sqrt(update.eps) * (number - 1) * update.numbers[1] / ours.numbers[1]
        note = "; ".join(f"{name}: {f.note}" for name, f in (("A", ours), ("B", theirs)) if f.note)
        if note or difference > allowed:
            note = note or multiple_note(ours, theirs)
            return TensorDifference(number, key, difference, before, allowed, dtype, note), before
        before = max(before, difference)
    return None, before


def multiple_note(a: Fingerprint, b: Fingerprint) -> str:
    """Return a note if one tensor is a multiple of the other, or ""."""
    x, y = a.numbers, b.numbers
    if a.shape == b.shape and x[2] > 0:
        with np.errstate(all="ignore"):
            factor = float(np.copysign(y[1] / x[1], x[0] * y[0] + x[3:] @ y[3:]))
            # The sums of absolute values determine the factor. Of a gradient of embeddings all samples may be 0.
            expected = np.concatenate(([abs(factor) * x[2]], factor * x[3:]))
            error = np.abs(y[2:] - expected) / np.abs(expected)
            if np.all(error[np.abs(x[2:]) > 0.1 * x[2]] < max(1e-3, GAIN * a.eps)):
                return f"in B {factor:.4g} times its value in A"
    return ""
