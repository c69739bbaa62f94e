"""The log after a validation: a row for each source, with its best loss so far."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torchtrain.config.tokens import format_tokens

KINDS = ("loss", "perplexity", "bits_per_byte", "tokens")
RESULT = re.compile(rf"validation_(ema_)?({'|'.join(KINDS)})(?:_(.+))?")
SCORE = re.compile(r"validation_(ema_)?task_(.+)")


def format_validation(results: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Labels and texts of the results of a validation: of each source and kind of weights, of tasks, and other numbers.

    Args:
        results: by name, as in ``metrics.jsonl``.
        lines: what ``metrics.jsonl`` has of other steps.
    """
    of_source: dict[tuple[str, str], dict[str, float]] = {}
    scores, others = [], []
    for name, value in results.items():
        if (match := RESULT.fullmatch(name)) and _has_all_kinds(match, results):
            of_source.setdefault((match[1] or "", match[3] or ""), {})[match[2]] = value
        elif match := SCORE.fullmatch(name):
            scores.append(f"{match[1] or ''}{match[2]}".replace("_", " ") + f" {value:.4g}")
        elif isinstance(value, int | float):  # of a hook
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            others.append(f"{name.removeprefix('validation_').replace('_', ' ')} {number}")
    earlier: dict[str, list[tuple[float, int]]] = {}
    for line in lines:
        for name in line.keys() & results.keys():
            value = line[name]  # in the file, None if it was not finite
            if RESULT.fullmatch(name) and isinstance(value, int | float) and math.isfinite(value):
                earlier.setdefault(name, []).append((value, line["step"]))
    has_sources = any(source for _, source in of_source)
    has_averages = any(ema for ema, _ in of_source)
    rows = []
    for (ema, source), values in of_source.items():
        words = [source or "all sources"] if has_sources else []
        if has_averages:
            words.append("averaged weights" if ema else "trained weights")
        name = f"validation_{ema}loss" + (f"_{source}" if source else "")
        rows.append((", ".join(words), _loss_text(values, earlier.get(name, []))))
    if scores:
        rows.append(("tasks", ", ".join(scores)))
    if others:
        rows.append(("others", ", ".join(others)))
    return rows


def _has_all_kinds(match: re.Match[str], results: Mapping[str, Any]) -> bool:
    """Whether ``match`` is a result of a source; a hook may return one such as validation_tokens_left."""
    suffix = f"_{match[3]}" if match[3] else ""
    return all(f"validation_{match[1] or ''}{kind}{suffix}" in results for kind in KINDS)


def _loss_text(values: Mapping[str, float], earlier: list[tuple[float, int]]) -> str:
    loss = values["loss"]
    text = f"loss {loss:.4f}, perplexity {values['perplexity']:,.4g}, bits per byte {values['bits_per_byte']:.4f}"
    text += f", {format_tokens(values['tokens'])} tokens"
    if not earlier:
        return text
    best, step = min(earlier)
    if math.isfinite(loss) and loss < best:
        return f"{text}; the best so far"
    return f"{text}; the best was {best:.4f} after step {step:,}"
