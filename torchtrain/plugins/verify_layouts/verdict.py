"""The first tensor in which a layout differs from one rank, on which ranks, and by which factor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtrain.plugins.comparison.fingerprint_recorder import BATCH, LOSS, sample_indices
from torchtrain.plugins.comparison.fingerprints import Box, Fingerprint, RankPart, assemble, distance
from torchtrain.plugins.verify_layouts.layouts import Layout
from torchtrain.plugins.verify_layouts.rank import RankRecord

TOLERANCE = 1e-10
"""Largest relative distance that rounding explains in float64, where it is about 1e-15."""
TOLERANCES = {"update": 1e-7, "loss": 1e-7}
"""Adam divides gradients, also those that are almost 0, by their size; the loss is rounded to 2^-20 nats."""
FLOORS = {"gradient": 1e-4, "gradient of an activation": 1e-4, "update": 1e-2}
"""Smaller tensors than this share of the largest one of their kind are compared relative to that: a gradient that is 0
in mathematics, such as that of a bias of keys without RoPE, has only rounding errors. Adam makes these larger."""
GRAD_NORM = "gradient norm"
RESULTS = ("batch", "weight", "loss", "gradient", GRAD_NORM, "update")
"""Kinds of tensors that must be the same. Others, the activations and their gradients, say where a difference begins:
how a model stores them on its ranks is its own matter."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """The first tensor of a step in the order of execution that differs."""

    step: int
    key: str
    kind: str
    distance: float
    ranks: tuple[int, ...]
    """The ranks whose part differs."""
    factor: float | None
    """By which these parts are multiplied; None if there is no such number."""
    note: str
    """What else is known of it."""


@dataclass(frozen=True)
class Comparison:
    """What was compared of a layout."""

    difference: Difference | None
    steps: int
    tensors: int
    largest: float
    """The largest distance of a tensor that does not differ, loss and updates aside."""
    is_bitwise: bool = False
    """Whether all bits were compared."""


def kind_of(key: str, parameters: Mapping[str, Any]) -> str:
    """The kind of the tensor ``key`` of a fingerprint."""
    if key in (BATCH, LOSS):
        return key
    if key in parameters:
        return "weight"
    if key.endswith(" update"):
        return "update"
    if key.endswith(" gradient"):
        return "gradient" if key.removesuffix(" gradient") in parameters else "gradient of an activation"
    return "activation"


def compare_records(
    reference: RankRecord, records: Sequence[RankRecord], order: Sequence[str], parameters: Mapping[str, Any]
) -> Comparison:
    """Compare what the ranks of a layout have recorded with ``reference``, of one rank.

    Args:
        order: the keys of all tensors in the order of execution.
        parameters: of the model, by full name.
    """
    tensors, largest, wrong = 0, 0.0, None
    for step in range(1, len(reference.steps) + 1):
        found = list(_compare_step(step, reference, records, order, parameters))
        differences = [difference for difference, _ in found if difference is not None]
        tensors += len(found)
        largest = max([largest, *(distance for difference, distance in found if difference is None)])
        if any(difference.kind in RESULTS for difference in differences):
            wrong = differences[0]
            break
    return Comparison(wrong, step, tensors, largest)


def _compare_step(
    step: int,
    reference: RankRecord,
    records: Sequence[RankRecord],
    order: Sequence[str],
    parameters: Mapping[str, Any],
) -> Iterator[tuple[Difference | None, float]]:
    """For each tensor that was compared its difference, if there is one, and its distance."""
    theirs = reference.steps[step - 1]
    ours = [record.steps[step - 1] for record in records]
    floors = _floors(theirs, parameters)
    norm_is_due = True
    for key in order:
        kind = kind_of(key, parameters)
        if kind == "update" and norm_is_due and reference.grad_norms:
            norm_is_due = False
            yield _compare_norms(step, reference, records)
        parts = {rank: recorded[key] for rank, recorded in enumerate(ours) if key in recorded}
        if key not in theirs or assemble({0: theirs[key]}).note:  # as of a module that is called twice
            continue
        if not parts:
            if kind in RESULTS:
                yield Difference(step, key, kind, math.inf, tuple(range(len(ours))), None, "no rank has it"), math.inf
            continue
        tolerance, floor = TOLERANCES.get(kind, TOLERANCE), floors.get(kind, 0.0)
        assembled = assemble(parts, tolerance, floor)
        apart = distance(theirs[key][1], assembled, floor=floor)
        if kind not in RESULTS and "parts are missing" in assembled.note:
            continue  # the model divides it otherwise
        if not assembled.note and apart <= tolerance:
            yield None, 0.0 if kind in TOLERANCES else apart  # those have another tolerance
        else:
            yield _difference(step, key, kind, theirs[key][1], parts, assembled, apart, tolerance, floor), apart


def _floors(tensors: Mapping[str, RankPart], parameters: Mapping[str, Any]) -> dict[str, float]:
    """The size of an element below which differences are relative to it, by the kind of the tensor."""
    floors: dict[str, float] = {}
    for key, (_, fingerprint) in tensors.items():
        kind = kind_of(key, parameters)
        mean = float(fingerprint.numbers[1]) / max(1, math.prod(fingerprint.shape))
        if kind in FLOORS and math.isfinite(mean):
            floors[kind] = max(floors.get(kind, 0.0), FLOORS[kind] * mean)
    return floors


def _compare_norms(step: int, reference: RankRecord, records: Sequence[RankRecord]) -> tuple[Difference | None, float]:
    theirs, ours = reference.grad_norms[step - 1], [record.grad_norms[step - 1] for record in records]
    distances = [0.0 if norm == theirs else abs(norm - theirs) / max(abs(theirs), 1e-150) for norm in ours]
    distances = [math.inf if math.isnan(apart) else apart for apart in distances]
    ranks = tuple(rank for rank, apart in enumerate(distances) if apart > TOLERANCE)
    if not ranks:
        return None, max(distances)
    ratios = np.array([ours[rank] / theirs for rank in ranks]) if theirs else np.array([])
    return Difference(step, GRAD_NORM, GRAD_NORM, max(distances), ranks, factor_of(ratios), ""), max(distances)


def _difference(
    step: int,
    key: str,
    kind: str,
    theirs: Fingerprint,
    parts: Mapping[int, RankPart],
    assembled: Fingerprint,
    apart: float,
    tolerance: float,
    floor: float,
) -> Difference:
    if kind == LOSS:  # one number, of which each rank has a summand
        ratio = assembled.numbers[:1] / theirs.numbers[:1]
        return Difference(step, key, kind, apart, tuple(parts), factor_of(ratio), "")
    name = key.removesuffix(" gradient").removesuffix(" update")
    indices = [index.numpy() for index in sample_indices(name, tuple(theirs.shape))]
    expected = theirs.numbers[3:]
    present = {rank: _in_box(box, indices) for rank, (box, _) in parts.items()}
    ranks: list[int] = []
    ratios: list[Numbers] = []
    for rank, (_, part) in parts.items():
        here = present[rank]
        if _distance(part.numbers[3:][here], expected[here], floor) > tolerance:
            ranks.append(rank)
            large = here & (np.abs(expected) > 0.1 * np.abs(expected[here]).max())
            ratios.append(part.numbers[3:][large] / expected[large])
    note = ""
    if "replicas" in assembled.note:
        note = _note_of_replicas(parts, present, expected, tolerance, floor)
    elif assembled.note:
        note = assembled.note
    elif _is_permuted(theirs, assembled, tolerance):
        note = "it has the same numbers in another order"
    factor = factor_of(np.concatenate(ratios)) if ratios else None
    if assembled.note and math.isfinite(apart) and apart <= tolerance:
        apart = math.inf if "missing" in assembled.note else apart
    return Difference(step, key, kind, apart, tuple(ranks or parts), factor, note)


def _in_box(box: Box, indices: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.bool_]:
    """Which of the samples with these ``indices`` along each dimension are in ``box``."""
    inside = np.ones(len(indices[0]) if indices else 1, dtype=bool)
    for ranges, index in zip(box, indices, strict=True):
        inside &= np.any([(index >= start) & (index < stop) for start, stop in ranges], axis=0)
    return inside


def _distance(x: Numbers, y: Numbers, floor: float) -> float:
    """Root mean square of the difference of samples, relative to their size."""
    if not len(x) or np.array_equal(x, y, equal_nan=True):
        return 0.0
    with np.errstate(all="ignore"):
        apart = np.sqrt(np.mean((x - y) ** 2)) / max(np.sqrt(np.mean(np.maximum(x**2, y**2))), floor, 1e-150)
    return math.inf if math.isnan(apart) else float(apart)


def _note_of_replicas(
    parts: Mapping[int, RankPart],
    present: Mapping[int, npt.NDArray[np.bool_]],
    expected: Numbers,
    tolerance: float,
    floor: float,
) -> str:
    """How the replicas of a part differ."""
    groups: dict[str, list[int]] = {}
    for rank, (box, _) in parts.items():
        groups.setdefault(str(box), []).append(rank)
    of_group = [ranks for ranks in groups.values() if len(ranks) > 1]
    if not of_group:
        return ""

    def sum_is_right(ranks: list[int]) -> bool:
        here = present[ranks[0]]
        total = np.sum([parts[rank][1].numbers[3:] for rank in ranks], axis=0)
        return _distance(total[here], expected[here], floor) <= tolerance

    shown = " and ".join(map(str, of_group[0]))
    if all(map(sum_is_right, of_group)):
        return f"ranks {shown} have summands of it, whose sum is right: a sum over ranks is missing"
    return f"ranks {shown} should have the same, and differ"


def _is_permuted(theirs: Fingerprint, ours: Fingerprint, tolerance: float) -> bool:
    """Whether sum, sum of absolute values and maximum are the same."""
    x, y = theirs.numbers[:3], ours.numbers[:3]
    return bool(np.all(np.abs(x - y) <= tolerance * np.array([x[1], x[1], x[2]])))


def factor_of(ratios: Numbers) -> float | None:
    """The number that all ``ratios`` are, if they are one number other than 1."""
    if not len(ratios) or not np.isfinite(ratios).all():
        return None
    factor = float(np.median(ratios))
    spread = float(np.ptp(ratios))
    return factor if spread <= 1e-6 * abs(factor) and spread <= 0.1 * abs(factor - 1) and factor != 1 else None


def meaning_of_factor(factor: float, layout: Layout, kind: str) -> str:
    """What it usually means that a tensor is ``factor`` times what it should be on ``layout``; "" if nothing."""
    if abs(factor) < 1e-9:
        return "nothing arrives: it is 0"
    if abs(factor - 1) < 0.03:
        return "almost the same: a constant, such as an epsilon or a scale, or a dtype, on some of the ranks"
    if kind == GRAD_NORM:  # a sum of squares
        factor, of = factor**2, "of its square "
    else:
        of = ""
    products: dict[int, list[str]] = {}
    degrees = layout.degrees
    for count in range(1, len(degrees) + 1):
        for axes in combinations(degrees, count):
            product = math.prod(degrees[axis] for axis in axes)
            products.setdefault(product, []).append(" x ".join(axes))
    meanings = []
    for product, names in products.items():
        which = " or ".join(names)
        if math.isclose(factor, product, rel_tol=1e-6):
            meanings.append(
                f"{of}the {which} degree: summed over these ranks once too often, or where it is not divided"
            )
        if math.isclose(factor, 1 / product, rel_tol=1e-6):
            meanings.append(f"{of}1 / the {which} degree: a mean in place of a sum, or the share of one rank")
    if math.isclose(factor, -1, rel_tol=1e-6):
        meanings.append("the sign is wrong")
    return "; ".join(meanings)
