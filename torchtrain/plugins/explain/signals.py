"""What is unusual about documents of a batch, compared with other documents of their source.

Each of ``SIGNALS`` is a mean over the tokens of a piece of a document. A mean of few tokens is noisy, and the first
tokens of a document have higher losses than others. So each token is compared with those that have about as many tokens
of their piece before them, and the standard error of the mean follows from the variances of such tokens. The standard
deviation between documents beyond these errors is estimated as by Paule and Mandel
(https://doi.org/10.6028/jres.087.022), but by medians, so that an unusual document does not widen it.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# The least standard deviation between documents: a smaller difference is not unusual, however equal the others are.
SIGNALS: Mapping[str, float] = {
    "loss": 0.1,  # in nats
    "rarity": 0.1,  # surprise of a token, in nats, if tokens are drawn as often as other documents have them
    "repetition": 0.2,  # log2(1 + how often the piece had the last REPEATED_TOKENS tokens before)
    "copies": 0.2,  # log2(1 + the number of other documents with the same COPIED_TOKENS tokens around this one)
}
REPEATED_TOKENS = 3
COPIED_TOKENS = 8
MIN_PIECES = 8  # of a source; if fewer are known, its pieces are compared with those of all sources
NORMAL_MEDIAN = 0.6745  # of the absolute value of a standard normal variable


@dataclass(frozen=True)
class PieceTokens:
    """Consecutive tokens of a document, of which the last ones are predicted."""

    source: str
    document: Hashable
    """Equal for the pieces of a document."""
    tokens: Integers
    losses: Floats
    """Of the last tokens. One that is not finite does not count."""


@dataclass(frozen=True)
class Signal:
    """A mean over the predicted tokens of a piece."""

    value: float
    expected: float
    """For tokens in these places of pieces of the same source."""
    score: float
    """The difference in standard deviations."""


def combine(signals: Mapping[str, Signal], pull: float, tokens: int) -> float:
    """A piece's score: how many standard deviations it is from an ordinary one of its source.

    High losses, rare tokens and the pull on the weights add up as independent ones do. A loss is low where tokens are
    repeated or copied, so that only the highest of these three scores counts.

    Args:
        signals: of the piece.
        pull: how many times its share of the gradient is what its size explains; NaN if unknown. The logarithms to
            base 2 of pieces of ``tokens`` tokens have a standard deviation of about sqrt(1 + 5 / tokens): measured, of
            two to six tokens 1.2 to 1.9, of 60 and more 1.0.
        tokens: number of predicted tokens of the piece.
    """
    score = {name: signal.score for name, signal in signals.items()}
    familiar = max(-score["loss"], score["repetition"], score["copies"], 0.0)
    moved = math.log2(pull) / math.sqrt(1 + 5 / tokens) if pull > 1 else 0.0
    return math.hypot(max(score["loss"], 0.0), max(score["rarity"], 0.0), familiar, moved)


def find_signals(pieces: Sequence[PieceTokens]) -> list[dict[str, Signal]]:
    """Of each piece its signals, by name. Each piece must have a predicted token."""
    found: list[dict[str, Signal]] = [{} for _ in pieces]
    for source in dict.fromkeys(piece.source for piece in pieces):
        own = [number for number, piece in enumerate(pieces) if piece.source == source]
        compared = own if len(own) >= MIN_PIECES else range(len(pieces))
        signals = dict(zip(compared, _compare([pieces[number] for number in compared]), strict=True))
        for number in own:
            found[number] = signals[number]
    return found


def _compare(pieces: Sequence[PieceTokens]) -> list[dict[str, Signal]]:
    sizes = np.array([len(piece.tokens) for piece in pieces])
    piece_of = np.repeat(np.arange(len(pieces)), sizes)
    index = np.arange(len(piece_of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a token in its piece
    numbers = {document: number for number, document in enumerate(dict.fromkeys(of.document for of in pieces))}
    document_of_piece = np.array([numbers[piece.document] for piece in pieces])
    document_of = document_of_piece[piece_of]
    weights = 1 / np.bincount(document_of_piece)[document_of_piece]  # a document counts once, in however many pieces
    tokens = np.unique(np.concatenate([piece.tokens for piece in pieces]), return_inverse=True)[1]
    is_predicted = index >= np.repeat(sizes - [len(piece.losses) for piece in pieces], sizes)
    of_tokens = {
        "loss": np.concatenate([np.pad(of.losses, (len(of.tokens) - len(of.losses), 0)) for of in pieces]),
        "rarity": _rarity(tokens, document_of),
        "repetition": _repetition(tokens, piece_of, index),
        "copies": _copies(tokens, document_of, index, sizes[piece_of]),
    }
    context = np.log2(index + 1).astype(np.int64)
    found: list[dict[str, Signal]] = [{} for _ in pieces]
    for name, least_spread in SIGNALS.items():
        counted = is_predicted & np.isfinite(of_tokens[name])
        values, group, piece = of_tokens[name][counted], context[counted], piece_of[counted]
        count = np.maximum(np.bincount(piece, minlength=len(pieces)), 1)
        in_group = np.maximum(np.bincount(group), 1)
        expected = (np.bincount(group, values) / in_group)[group]
        variance = (np.bincount(group, (values - expected) ** 2) / in_group)[group]
        mean = np.bincount(piece, values, len(pieces)) / count
        distance = mean - np.bincount(piece, expected, len(pieces)) / count
        error = np.sqrt(np.bincount(piece, variance, len(pieces))) / count
        distance, scores = standardize(distance, error, weights, least_spread)
        for signals, value, away, score in zip(found, mean.tolist(), distance.tolist(), scores.tolist(), strict=True):
            signals[name] = Signal(value, value - away, score)
    return found


def standardize(values: Floats, errors: Floats, weights: Floats, least_spread: float) -> tuple[Floats, Floats]:
    """The distances of ``values``, whose standard errors are known, from their median: as they are, and in deviations.

    A value counts by its weight and its precision. Values above the median have another standard deviation than those
    below. Apart from errors it is at least ``least_spread``, and makes the median distance in standard deviations that
    of a normal distribution.
    """
    weights = weights / (least_spread**2 + errors**2)
    distances = values - _weighted_median(values, weights)
    scores = np.zeros_like(distances)
    for side in (distances > 0, distances < 0):
        if side.any():
            spread = _spread(np.abs(distances[side]), errors[side], weights[side], least_spread)
            scores[side] = distances[side] / np.hypot(spread, errors[side])
    return distances, scores


def _spread(distances: Floats, errors: Floats, weights: Floats, least: float) -> float:
    def median(spread: float) -> float:
        return _weighted_median(distances / np.hypot(spread, errors), weights)

    if median(least) <= NORMAL_MEDIAN:
        return least
    low, high = least, least + float(distances.max()) / NORMAL_MEDIAN
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if median(middle) > NORMAL_MEDIAN else (low, middle)
    return high


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)])


def _rarity(tokens: Integers, document_of: Integers) -> Floats:
    """The surprise of each token, by the number of times that the other documents have it, plus one."""
    vocab = int(tokens.max()) + 1
    pair, own = np.unique(document_of * vocab + tokens, return_inverse=True, return_counts=True)[1:]
    others = np.bincount(tokens)[tokens] - own[pair]
    of_document = np.bincount(document_of)[document_of]
    surprise: Floats = np.log((len(tokens) - of_document + vocab) / (others + 1))
    return surprise


def _hashes(tokens: Integers, length: int) -> Integers:
    """Of the ``length`` tokens from each token on, a hash; those at the end are not meaningful."""
    found = np.zeros_like(tokens)
    for shift in range(length):
        found = found * 1_000_003 + np.roll(tokens, -shift) + 1
    return found


def _repetition(tokens: Integers, piece_of: Integers, index: Integers) -> Floats:
    keys = np.roll(_hashes(tokens, REPEATED_TOKENS), REPEATED_TOKENS - 1) * 1_000_003 + piece_of
    order = np.argsort(keys, kind="stable")
    is_first = np.append(True, np.diff(keys[order]) != 0)
    places = np.arange(len(keys))
    before = np.empty(len(keys))
    before[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return np.where(index < REPEATED_TOKENS - 1, 0.0, np.log2(1 + before))


def _copies(tokens: Integers, document_of: Integers, index: Integers, size: Integers) -> Floats:
    hashes = np.unique(_hashes(tokens, COPIED_TOKENS), return_inverse=True)[1]
    is_whole = index + COPIED_TOKENS <= size
    documents = int(document_of.max()) + 1
    pairs = np.unique((hashes * documents + document_of)[is_whole])
    documents_with = np.bincount(pairs // documents, minlength=int(hashes.max()) + 1)
    begins = np.where(is_whole, np.log2(np.maximum(documents_with[hashes], 1)), 0.0)
    found = begins.copy()
    for shift in range(1, min(COPIED_TOKENS, len(begins))):
        found[shift:] = np.maximum(found[shift:], begins[:-shift])
    return found
