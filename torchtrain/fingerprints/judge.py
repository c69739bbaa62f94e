"""Fingerprints of two runs, each put together from its ranks: the first tensor that rounding does not explain."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from torchtrain.fingerprints.record import Fingerprint, together
from torchtrain.reading import names_in

# Rounding explains GAIN times the sum of the dtype's eps and the distance of earlier tensors, and always LEAST.
GAIN, LEAST = 4, 1e-5


@dataclass
class Step:
    """``tensors`` in the order of execution; ``rows`` of the batch by number, (tokens, labels) of each.

    ``problems``: of the files. ``faults``: ranks that do not agree on the batch.
    """

    tensors: dict[str, Fingerprint] = field(default_factory=dict)
    rows: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Finding(NamedTuple):
    """A tensor that differs: its distance, the largest one before it, and how much of it rounding explains."""

    step: int
    key: str
    distance: float
    before: float
    allowed: float
    dtype: str
    note: str
    also: list[str]
    """Keys of further tensors that differ, in order."""

    def __str__(self) -> str:
        apart = self.note or f"{self.distance:.1e} apart"
        text = f"step {self.step}, {self.key}: {apart} where all before it agrees to {self.before:.1e}"
        if math.isfinite(self.distance):
            text += f" ({self.dtype} allows {self.allowed:.1e})"
        if self.also:
            text += f"; then {len(self.also)} more: {', '.join(self.also[:3])}{', ...' if len(self.also) > 3 else ''}"
        return text


def read(folder: Path) -> Step:
    """Put together what the ranks have written into ``folder``; what of it is missing or damaged is a problem."""
    step, expected, ranks = Step(), 0, set()
    parts: dict[str, list[Fingerprint]] = defaultdict(list)
    for name in names_in(folder):
        if not name.endswith(".safetensors"):
            continue
        try:
            rank = int(name.removeprefix("rank-").removesuffix(".safetensors"))
            with safe_open(folder / name, "np") as file:
                about = json.loads(file.metadata()["about"])
                rows = np.stack((file.get_tensor("tokens"), file.get_tensor("labels")), axis=1)
                entries = about["entries"].items()
                held = {key: Fingerprint(*entry, file.get_tensor(key), rank) for key, entry in entries}
            first_row, of_run = int(about["first_row"]), int(about["ranks"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            step.problems.append(f"{folder / name} is damaged ({error})")
            continue
        expected = expected or of_run
        if rank >= expected:
            continue  # of an earlier start, on more ranks
        ranks.add(rank)
        for number, row in enumerate(rows, first_row):
            if not np.array_equal(step.rows.setdefault(number, row), row):
                step.faults.append(f"rank {rank} has another row {number} of the batch than a rank before it")
        for key, part in held.items():
            parts[key].append(part)
    if missing := sorted(set(range(expected)) - ranks):
        step.problems.append(f"{folder} lacks what rank(s) {', '.join(map(str, missing))} of {expected} wrote")
    tensors = {key.partition(" ")[2]: whole(parts[key]) for key in sorted(parts)}
    step.tensors = {key: tensor for key, tensor in tensors.items() if tensor.complete or not missing}
    return step


def whole(parts: list[Fingerprint]) -> Fingerprint:
    """The tensor that ``parts`` make. What several ranks hold alike counts once."""
    by_box: dict[str, Fingerprint] = {}
    note = ""
    for part in parts:
        first = by_box.setdefault(str(part.box), part)
        if (apart := distance(first, part)) > LEAST:
            note = f"ranks {first.rank} and {part.rank} should hold the same of it, and are {apart:.1e} apart"
    kept = list(by_box.values())
    shape = kept[0].shape
    held = sum(math.prod(sum(stop - start for start, stop in along) for along in part.box) for part in kept)
    complete = held == math.prod(shape)
    if not complete:
        there = {row for part in kept for start, stop in part.box[0] for row in range(start, stop)}
        gone = sorted(set(range(shape[0])) - there)
        what = f"rows {gone[0]} to {gone[-1]} of {shape[0]} are missing" if gone else "parts are missing or come twice"
        note = f"{held / math.prod(shape):.0%} of it is there: {what}"
    return replace(kept[0], numbers=together([part.numbers for part in kept]), note=note, complete=complete)


def distance(a: Fingerprint, b: Fingerprint, update: bool = False) -> float:
    """How far apart two tensors are, relative to their size: the most that any of the figures and the samples say.

    Of an ``update`` by Adam, where a gradient next to zero may change its sign, what most of the samples say.
    """
    x, y = a.numbers, b.numbers
    if a.shape != b.shape:
        return math.inf
    if np.array_equal(x, y, equal_nan=True) or not (x[1] or y[1]):  # NaN in both is alike, and so are zeros
        return 0.0
    with np.errstate(all="ignore"):
        apart, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
        summed, absolute, largest = apart[:3] / size[[1, 1, 2]]
        samples = np.maximum(np.sqrt(np.mean(size[3:] ** 2)), 1e-150)  # all may be 0, as in the gradient of embeddings
        if update:
            found = [np.median(apart[3:]) / samples, absolute]
        else:
            found = [np.sqrt(np.mean(apart[3:] ** 2)) / samples, summed, absolute, largest]
    return max(math.inf if math.isnan(ratio) else float(ratio) for ratio in found)


def walk(a: Step, b: Step, number: int, before: float = 0.0) -> tuple[Finding | None, float]:
    """The first tensor of step ``number`` that differs by more than rounding allows, and the distance of the others.

    ``before``: distance of what was compared before this step.
    """
    first: Finding | None = None
    for key in {**a.tensors, **b.tensors}:
        ours, theirs = a.tensors.get(key), b.tensors.get(key)
        if ours is None or theirs is None:
            if a.problems or b.problems:
                continue
            apart, allowed, dtype, note = math.inf, 0.0, "", f"only {'A' if theirs is None else 'B'} has it,"
        else:
            apart = distance(ours, theirs, key.endswith(" update"))
            eps, dtype = max((f.eps, f.dtype) for f in (ours, theirs))
            allowed = max(LEAST, GAIN * (eps + before))
            update = a.tensors.get(f"{key} update")
            if update is not None and ours.numbers[1]:
                # Parameters drift apart: Adam may turn an update around where the gradient is next to zero.
                allowed += math.sqrt(update.eps) * (number - 1) * update.numbers[1] / ours.numbers[1]
            note = "; ".join(f"{name}: {f.note}" for name, f in (("A", ours), ("B", theirs)) if f.note)
            if apart <= allowed and not note:
                before = max(before, apart) if first is None else before
                continue
            note = note or multiple(ours, theirs)
        if first is None:
            first = Finding(number, key, apart, before, allowed, dtype, note, [])
        else:
            first.also.append(key)
    return first, before


def multiple(a: Fingerprint, b: Fingerprint) -> str:
    """A note where one tensor is a multiple of the other, else nothing."""
    if a.shape == b.shape:
        x, y = a.numbers[3:], b.numbers[3:]
        known = np.abs(x) > 0.1 * np.abs(x).max()
        ratios = y[known] / x[known]
        if len(ratios) > 1 and np.ptp(ratios) < max(1e-3, GAIN * a.eps) * abs(float(np.median(ratios))):
            return f"in B {np.median(ratios):.4g} times what it is in A,"
    return ""


def differing_rows(a: Step, b: Step) -> list[int]:
    """Rows of the batch that differ, or that one lacks although none of its files is missing."""
    rows = a.rows.keys() & b.rows.keys() if a.problems or b.problems else a.rows.keys() | b.rows.keys()
    return [row for row in sorted(rows) if not np.array_equal(a.rows.get(row, ()), b.rows.get(row, ()))]
