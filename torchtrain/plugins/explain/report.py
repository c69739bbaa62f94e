"""An explanation as text, as JSON values, and as an HTML page with the loss of each token."""

import json
import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.logging import counted
from torchtrain.plugins.explain.explanation import Document, Explanation, RowGradient, by_score

COLUMNS = 80
MIN_CHARACTERS = 30  # of a text that are shown, also if the line is longer than COLUMNS then
INDENT = " " * 5
REASON_SCORE, REASON_PULL = 2.0, 2.0  # from which on a score or a pull is a reason
FEW_TOKENS = 16
DECODED_TOKENS = 60  # of which the beginning of a text is decoded
CONTEXT_TOKENS = 4  # with which a token is decoded, since it may be part of a character
DARKEST_LOSS = 12.0  # nats

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
p { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
h2 { font-size: 18px; }
span.special { color: #888; }
"""


def as_json(explanation: Explanation, top: int | None) -> dict[str, Any]:
    """JSON values; a number that is not finite is None."""
    run, weights = explanation.run, explanation.weights
    return {
        "run": str(run.folder),
        "step": run.step,
        "rows": list(run.rows),
        "weights": None if weights is None else vars(weights),
        "loss": None if weights is None else finite(mean_loss(explanation.documents)),
        **({"gradients": [_gradient(of) for of in explanation.gradients]} if explanation.gradients else {}),
        "documents": [_values(document, explanation.tokenizer) for document in explanation.listed(top)],
    }


def _gradient(of: RowGradient) -> dict[str, Any]:
    return {"row": of.row, "norm": finite(of.norm), "share": finite(of.share)}


def _values(document: Document, tokenizer: Tokenizer) -> dict[str, Any]:
    values: dict[str, Any] = {
        "row": document.row,
        "source": document.source,
        "file": document.place.file,
        "position": document.place.position,
        "begin": document.begin,
        "tokens": len(document.tokens),
        "offset": document.offset,
        "text": beginning(document, tokenizer),
    }
    if document.text_hash:
        values["text_hash"] = document.text_hash
    if document.losses is not None:
        values |= {"loss": finite(document.loss), "loss_sum": finite(document.loss_sum)}
        values["predicted"] = document.predicted
    if document.signals:
        values |= {"score": finite(document.score), "reasons": reasons(document), "size": document.size}
        values |= {"gradient_share": finite(document.gradient_share), "pull": finite(document.pull)}
        values["signals"] = {name: vars(signal) for name, signal in document.signals.items()}
    return values


def finite(value: float) -> float | None:
    """``value``; None if JSON has no such number."""
    return value if math.isfinite(value) else None


def mean_loss(documents: Sequence[Document]) -> float:
    """Mean loss of all tokens of ``documents``."""
    return sum(of.loss_sum for of in documents) / max(1, sum(of.predicted for of in documents))


def beginning(document: Document, tokenizer: Tokenizer) -> str:
    """The beginning of its text in the row."""
    ids = [token for token in document.tokens[:DECODED_TOKENS].tolist() if token not in tokenizer.special_ids]
    text = tokenizer.decode(ids)
    return ("..." if document.offset else "") + text


def as_text(explanation: Explanation, top: int | None) -> str:
    """Two lines about the step, one for the gradient of each row, and some for each listed document."""
    lines = headline(explanation)
    by_share = sorted(explanation.gradients, key=lambda of: of.share, reverse=True)
    lines += [f"row {of.row}: gradient norm {of.norm:.4g}, {of.share:.1%} of the step's gradient" for of in by_share]
    if explanation.weights is not None:
        lines += textwrap.wrap(disagreement(explanation), COLUMNS)
        lines.append(f"{INDENT}score   loss  expected  of tokens  of gradient  place in the batch")
    for number, document in enumerate(explanation.listed(top), 1):
        if explanation.weights is None:
            lines.append(where(document))
        else:
            end = document.begin + len(document.tokens) - 1
            in_batch = f"row {document.row}, tokens {document.begin} to {end}"
            lines.append(f"{number:3}  {columns(document)}  {in_batch}")
            why = "; ".join(reasons(document))
            lines += textwrap.wrap(why, COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT)
        text = " ".join(beginning(document, explanation.tokenizer).split())
        offset = f", from its token {document.offset} on" * bool(document.offset and document.losses is not None)
        begin = f"{INDENT}{place(document)}{offset}: "
        room = max(MIN_CHARACTERS, COLUMNS - len(begin) - 2)
        lines.append(f"{begin}{text if len(text) <= room else f'{text[: room - 3]}...'!r}")
    return "\n".join(lines)


def columns(document: Document) -> str:
    """The score of a document, and what it comes from."""
    expected = document.signals["loss"].expected
    share = "-" if math.isnan(document.gradient_share) else f"{document.gradient_share:.1%}"
    return f"{document.score:5.1f}{document.loss:7.3f}{expected:10.3f}{document.size:11.1%}{share:>13}"


def reasons(document: Document) -> list[str]:
    """Why a document is unusual, the strongest reason first."""
    if not math.isfinite(document.loss):
        return ["its loss is not finite"]
    loss = document.signals["loss"]
    away = loss.value - loss.expected
    found = [
        (loss.score, f"its loss is {away:.2f} above that of other documents"),
        (-loss.score, f"its loss is {-away:.2f} below that of other documents"),
        (document.signals["rarity"].score, "its tokens are rare in other documents"),
        (document.signals["repetition"].score, "it repeats itself"),
        (document.signals["copies"].score, "other documents have the same passages"),
        (
            REASON_SCORE + math.log2(document.pull / REASON_PULL) if document.pull > 0 else 0.0,
            f"it moves the weights {document.pull:.1f} times as much as its size explains",
        ),
    ]
    found.sort(key=lambda reason: reason[0], reverse=True)
    few = [f"it has only {document.predicted} tokens here"] * (document.predicted < FEW_TOKENS)
    return [text for score, text in found if score >= REASON_SCORE] + few


def disagreement(explanation: Explanation) -> str:
    """Whether mean losses and shares of the gradient name the document that comes first, too."""
    ordered = by_score(explanation.documents)
    names_of: dict[int, list[str]] = {}
    for name, values in {
        "mean loss": [of.loss for of in ordered],
        "share of the gradient": [of.gradient_share for of in ordered],
    }.items():
        known = [(value, -number) for number, value in enumerate(values, 1) if not math.isnan(value)]
        if known and (number := -max(known)[1]) > 1:
            names_of.setdefault(number, []).append(name)
    others = [f"number {number} is first by {' and '.join(names)}" for number, names in names_of.items()]
    return f"listed by score{'; the columns disagree: ' if others else ''}{', '.join(others)}"


def as_exclusions(explanation: Explanation, top: int | None) -> str:
    """The listed documents as lines for ``data.exclude``, each document once."""
    lines = {}
    for document in explanation.listed(top):
        values = _values(document, explanation.tokenizer)
        keys = ("text_hash", "file", "position", "source", "text")
        lines[document.text_hash] = json.dumps({key: values[key] for key in keys if key in values})
    return "".join(f"{line}\n" for line in lines.values())


def headline(explanation: Explanation) -> list[str]:
    """What is listed, and under which weights."""
    run, documents, weights = explanation.run, explanation.documents, explanation.weights
    counts = f"step {run.step}: {len(documents)} pieces of documents in {counted(len(run.rows), 'row')}"
    return [counts] if weights is None else [f"{counts}, mean loss {mean_loss(documents):.4f}", f"weights: {weights}"]


def where(document: Document) -> str:
    """Its place in the batch."""
    count = len(document.tokens)
    of_document = f" (token {document.offset} of the document)" * bool(document.offset)
    return f"row {document.row}, {count} tokens from {document.begin} on{of_document}"


def place(document: Document) -> str:
    """Where it is stored."""
    parts = (document.source, document.place.file, document.place.position)
    return ", ".join(part for part in parts if part)


def as_page(explanation: Explanation, top: int) -> str:
    """A self-contained HTML page: the text of each listed document, its tokens colored by their loss."""
    title = escape(f"{explanation.run.folder.resolve().name}, step {explanation.run.step}")
    about = "; ".join((*headline(explanation), disagreement(explanation)))
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<div>{escape(about)}. ",
        f"The darker a token, the higher its loss, up to {DARKEST_LOSS:.0f} nats.</div>",
    ]
    for number, document in enumerate(explanation.listed(top), 1):
        share = "" if math.isnan(document.gradient_share) else f", {document.gradient_share:.1%} of the gradient"
        head = f"{number}. score {document.score:.1f}, loss {document.loss:.4f}{share}: {where(document)}"
        why = "; ".join(reasons(document))
        parts.append(f"<h2>{escape(head)}</h2>\n<div>{escape(why)}</div>\n<div>{escape(place(document))}</div>")
        parts.append(f"<p>{_colored(document, explanation.tokenizer)}</p>")
    return "\n".join([*parts, "</body></html>\n"])


def _colored(document: Document, tokenizer: Tokenizer) -> str:
    assert document.losses is not None
    ids, spans = document.tokens.tolist(), []
    for number, (token, loss) in enumerate(zip(ids, document.losses.tolist(), strict=True)):
        is_special = token in tokenizer.special_ids
        text = tokenizer.name_of(token) if is_special else text_of(ids, number, tokenizer)
        style = "special" if is_special else "token"
        if number == 0 and document.begin == 0:
            spans.append(f'<span class="{style}" title="not predicted in this row">{escape(text)}</span>')
            continue
        share = min(max(loss / DARKEST_LOSS, 0.0), 1.0) if math.isfinite(loss) else 1.0
        color = f"background: rgba(220, 50, 30, {share:.2f})"
        spans.append(f'<span class="{style}" style="{color}" title="loss {loss:.3f}">{escape(text)}</span>')
    return "".join(spans)


def text_of(ids: Sequence[int], number: int, tokenizer: Tokenizer) -> str:
    """The text that token ``number`` adds to those before it."""
    before = [token for token in ids[max(0, number - CONTEXT_TOKENS) : number] if token not in tokenizer.special_ids]
    return tokenizer.decode([*before, ids[number]])[len(tokenizer.decode(before)) :]
