"""The results of layouts as a table, and as JSON."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchtrain.logging import counted
from torchtrain.plugins.verify_layouts.layouts import Layout
from torchtrain.plugins.verify_layouts.verdict import Comparison, Difference
from torchtrain.plugins.verify_layouts.verification import Result

VERDICT_COLUMN = 10
MOST_WIDTH = 44  # of the names of layouts


def _width(layouts: Sequence[Layout]) -> int:
    return 2 + min(MOST_WIDTH, max(len(str(layout)) for layout in layouts))


def heading(layouts: Sequence[Layout]) -> str:
    """The first line of the table."""
    return f"\n{'layout':{_width(layouts)}}{'verdict':{VERDICT_COLUMN}}against one rank"


def as_text(result: Result, layouts: Sequence[Layout]) -> str:
    """The lines of one layout."""
    start = f"{result.layout!s:{_width(layouts)}}{result.verdict:{VERDICT_COLUMN}}"
    comparison = result.comparison
    if comparison is None:
        return f"{start}{result.error}" + (f"\n  at {result.where}" if result.where else "")
    if comparison.difference is None:
        what = f"{counted(comparison.steps, 'step')}, {counted(comparison.tensors, 'tensor')}"
        return f"{start}{what}, " + ("all bits" if comparison.is_bitwise else f"at most {comparison.largest:.1e} apart")
    lines = [f"{start}{describe(comparison.difference, result.layout)}"]
    if result.meaning:
        lines.append(f"  usually: {result.meaning}")
    if result.in_float64 is not None:
        lines.append(f"  in float64: {in_float64(result.in_float64, result.layout)}")
    if result.line is not None:
        lines.append(f"  {result.line.class_name} {result.line.module}, {result.line}")
    return "\n".join(lines)


def describe(difference: Difference, layout: Layout) -> str:
    """One line about the first tensor that differs."""
    if len(difference.ranks) == layout.ranks:
        ranks = "all ranks"
    else:
        ranks = f"rank{'s' * (len(difference.ranks) > 1)} {', '.join(map(str, difference.ranks))}"
    parts = [f"step {difference.step}, {difference.key} on {ranks}"]
    if difference.factor is not None:
        parts.append(f"{difference.factor:.7g} times that of one rank")
    elif math.isfinite(difference.distance):
        parts.append(f"differs by {difference.distance:.1e}")
    if difference.note:
        parts.append(difference.note)
    elif len(parts) == 1:
        parts.append("it is not finite, or not that of one rank")
    return ": ".join([parts[0], "; ".join(parts[1:])])


def in_float64(comparison: Comparison, layout: Layout) -> str:
    """What a comparison in float64 says of a layout whose bits differ."""
    if comparison.difference is not None:
        return describe(comparison.difference, layout)
    return (
        f"at most {comparison.largest:.1e} apart: other rounding, as of sums in another order, or what only this dtype "
        "or grains do"
    )


def summary(results: Sequence[Result], *, with_rejected: bool) -> str:
    """The last lines: what was rejected, by its reason, if ``with_rejected``; and the number of each verdict."""
    counts = Counter(result.verdict for result in results)
    last = ", ".join(f"{counted(count, 'layout')} {verdict}" for verdict, count in counts.items())
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "rejected":
            reasons.setdefault(result.error, []).append(str(result.layout))
    lines = [f"rejected: {' '.join(layouts)}: {reason}" for reason, layouts in reasons.items()]
    return "\n".join(["", *(lines if with_rejected else []), last])


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """The results as JSON values."""
    layouts = []
    for result in results:
        entry: dict[str, Any] = {"layout": str(result.layout), "ranks": result.layout.ranks, "verdict": result.verdict}
        comparison = result.comparison
        if comparison is not None:
            entry |= {"steps": comparison.steps, "tensors": comparison.tensors, "largest": comparison.largest}
            entry["bitwise"] = comparison.is_bitwise
            if comparison.difference is not None:
                found = asdict(comparison.difference)
                if not math.isfinite(found["distance"]):  # JSON has no infinity
                    found["distance"] = None
                entry |= {"difference": found, "meaning": result.meaning}
                if result.in_float64 is not None:
                    entry["in_float64"] = in_float64(result.in_float64, result.layout)
                entry["line"] = None if result.line is None else asdict(result.line)
        else:
            entry |= {"error": result.error, "where": result.where}
        layouts.append(entry)
    bad = any(result.verdict in ("differs", "fails") for result in results)
    return {"same": not bad, "layouts": layouts}
