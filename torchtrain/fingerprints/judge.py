"""Fingerprints of two runs, each put together from its ranks: the first tensor that rounding does not explain."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from torchtrain.reading import names_in

Numbers = npt.NDArray[Any]
# Rounding explains GAIN times the sum of the dtype's eps and the distance of earlier tensors, and always LEAST.
GAIN, LEAST = 4, 1e-5


@dataclass
class Fingerprint:
    """Of a tensor, or of a rank's part of it. ``note``: what is wrong with how the parts fit together."""

    dtype: str
    shape: list[int]  # of the whole
    figures: Numbers  # sum, sum of absolutes, largest absolute
    places: Numbers  # in the flattened whole
    values: Numbers  # at these places
    note: str = ""
    complete: bool = True

    def __post_init__(self) -> None:
        order = np.argsort(self.places, kind="stable")
        self.places, self.values = self.places[order], self.values[order]

    @property
    def eps(self) -> float:
        return torch.finfo(getattr(torch, self.dtype)).eps


@dataclass
class Step:
    """``tensors`` in the order of execution; ``rows`` of the batch by number, (tokens, labels) of each.

    ``problems``: of the files. ``faults``: ranks that do not agree on the batch.
    """

    tensors: dict[str, Fingerprint] = field(default_factory=dict)
    rows: dict[int, Numbers] = field(default_factory=dict)
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
    note: str = ""
    also: tuple[str, ...] = ()
    """Keys of further tensors that differ, in order."""

    def __str__(self) -> str:
        apart = self.note or f"{self.distance:.1e} apart"
        text = f"step {self.step}, {self.key}: {apart} where all before it agrees to {self.before:.1e}"
        if not self.note or math.isfinite(self.distance):
            text += f" ({self.dtype} allows {self.allowed:.1e})"
        if self.also:
            some = ", ".join(self.also[:3])
            text += f"; then {len(self.also)} more: {some}{', ...' if len(self.also) > 3 else ''}"
        return text


class Part(NamedTuple):
    """What a rank holds: along each dimension of the whole the ranges in ``box``, each a start and a stop."""

    rank: int
    box: list[list[list[int]]]
    fingerprint: Fingerprint


def read(folder: Path) -> Step:
    """Put together what the ranks have written into ``folder``; what of it is missing or damaged is a problem."""
    step, expected, ranks = Step(), 0, set()
    parts: dict[tuple[int, str], list[Part]] = {}
    for name in names_in(folder):
        if not name.endswith(".safetensors"):
            continue
        try:
            rank = int(name.removeprefix("rank-").removesuffix(".safetensors"))
            with safe_open(folder / name, "np") as file:
                about = json.loads(file.metadata()["about"])
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            rows = dict(enumerate(np.stack((arrays["tokens"], arrays["labels"]), axis=1), about["first_row"]))
            held = {}
            for entry in about["entries"]:
                number, key = entry["number"], entry["key"]
                numbers = [arrays[f"{number} {kind}"] for kind in ("figures", "places", "values")]
                held[number, key] = Part(rank, entry["box"], Fingerprint(entry["dtype"], entry["shape"], *numbers))
            of_run = int(about["ranks"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            step.problems.append(f"{folder / name} is damaged ({error})")
            continue
        expected = expected or of_run
        if rank >= expected:
            continue  # of an earlier start, on more ranks
        ranks.add(rank)
        for number, row in rows.items():
            if not np.array_equal(step.rows.setdefault(number, row), row):
                step.faults.append(f"rank {rank} has another row {number} of the batch than a rank before it")
        for where, part in held.items():
            parts.setdefault(where, []).append(part)
    if missing := sorted(set(range(expected)) - ranks):
        step.problems.append(f"{folder} lacks what rank(s) {', '.join(map(str, missing))} of {expected} wrote")
    tensors = {key: whole(parts[number, key]) for number, key in sorted(parts)}
    step.tensors = {key: tensor for key, tensor in tensors.items() if tensor.complete or not missing}
    return step


def whole(parts: list[Part]) -> Fingerprint:
    """The tensor that ``parts`` make. What several ranks hold alike counts once."""
    by_box: dict[str, Part] = {}
    note = ""
    for part in parts:
        first = by_box.setdefault(json.dumps(part.box), part)
        apart = distance(first.fingerprint, part.fingerprint)
        if apart > LEAST:
            note = f"ranks {first.rank} and {part.rank} should hold the same of it, and are {apart:.1e} apart"
    boxes = [part.box for part in by_box.values()]
    kept = [part.fingerprint for part in by_box.values()]
    dtype, shape = kept[0].dtype, kept[0].shape
    size = math.prod(shape)
    held = sum(math.prod(sum(stop - start for start, stop in along) for along in box) for box in boxes)
    if held != size:
        there = {row for box in boxes for start, stop in box[0] for row in range(start, stop)}
        gone = sorted(set(range(shape[0])) - there)
        what = f"rows {gone[0]} to {gone[-1]} of {shape[0]} are missing" if gone else "parts are missing or come twice"
        note = f"{held / size:.0%} of it is there: {what}"
    figures = np.array([part.figures for part in kept])
    together = np.array([*figures[:, :2].sum(axis=0), figures[:, 2].max()])
    places, values = np.concatenate([p.places for p in kept]), np.concatenate([p.values for p in kept])
    return Fingerprint(dtype, shape, together, places, values, note, held == size)


def distance(a: Fingerprint, b: Fingerprint, update: bool = False) -> float:
    """How far apart two tensors are, relative to their size: the most that any of the figures and the samples say.

    Of an ``update`` by Adam, where a gradient next to zero may change its sign, what most of the samples say.
    """
    if a.shape != b.shape or not np.array_equal(a.places, b.places):
        return math.inf
    same = a.values.tobytes() == b.values.tobytes() and a.figures.tobytes() == b.figures.tobytes()
    if same or not (a.figures[1] or b.figures[1]):  # NaN in both is alike, and so are zeros
        return 0.0
    with np.errstate(all="ignore"):
        apart, size = np.abs(a.values - b.values), np.maximum(np.abs(a.values), np.abs(b.values))
        summed, absolute, largest = np.abs(a.figures - b.figures) / np.maximum(a.figures, b.figures)[[1, 1, 2]]
        if update:
            found = [np.median(apart) / np.sqrt(np.mean(size**2)), absolute]
        else:
            found = [np.sqrt(np.sum(apart**2) / np.sum(size**2)), summed, absolute, largest]
    return max(math.inf if math.isnan(x) else float(x) for x in (found if len(a.places) else found[1:]))


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
            apart, allowed, dtype = math.inf, 0.0, ""
            note = f"only {'A' if theirs is None else 'B'} has it,"
        else:
            apart = distance(ours, theirs, key.endswith(" update"))
            dtype = max(ours, theirs, key=lambda f: f.eps).dtype
            allowed = max(LEAST, GAIN * (max(ours.eps, theirs.eps) + before))
            update = a.tensors.get(f"{key} update")
            if update is not None and ours.figures[1]:
                # Parameters drift apart: Adam may turn an update around where the gradient is next to zero.
                allowed += math.sqrt(update.eps) * (number - 1) * update.figures[1] / ours.figures[1]
            note = "; ".join(f"{name}: {f.note}" for name, f in (("A", ours), ("B", theirs)) if f.note)
            if apart <= allowed and not note:
                before = max(before, apart) if first is None else before
                continue
            note = note or ratio(ours, theirs)
        if first is None:
            first = Finding(number, key, apart, before, allowed, dtype, note)
        else:
            first = first._replace(also=(*first.also, key))
    return first, before


def ratio(a: Fingerprint, b: Fingerprint) -> str:
    """A note where one tensor is a multiple of the other, else nothing."""
    known = np.abs(a.values) > 0.1 * np.abs(a.values).max(initial=0)
    ratios = b.values[known] / a.values[known] if a.places.shape == b.places.shape else np.array([])
    if len(ratios) > 1 and np.ptp(ratios) < max(1e-3, GAIN * a.eps) * abs(float(np.median(ratios))):
        return f"in B {np.median(ratios):.4g} times what it is in A,"
    return ""


def differing_rows(a: Step, b: Step) -> Iterator[int]:
    """Rows of the batch that differ, or that one lacks although none of its files is missing."""
    damaged = a.problems or b.problems
    for row in sorted(a.rows.keys() & b.rows.keys() if damaged else a.rows.keys() | b.rows.keys()):
        if row not in a.rows or row not in b.rows or not np.array_equal(a.rows[row], b.rows[row]):
            yield row
