"""What is unusual about documents of a batch: the signals of torchtrain.plugins.explain.signals."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from torchtrain.plugins.explain.signals import SIGNALS, PieceTokens, Signal, combine, find_signals, standardize

VOCAB = 1000


def ordinary(choice: random.Random, count: int, length: int = 100) -> list[PieceTokens]:
    """Documents with frequent and rare tokens, whose first tokens have high losses, as all documents have."""
    weights = [1 / (rank + 5) for rank in range(VOCAB)]
    pieces = []
    for number in range(count):
        tokens = np.array(choice.choices(range(VOCAB), weights, k=length))
        losses = [choice.gauss(5 + 4 / (place + 1) + 0.2 * math.sin(number), 2) for place in range(length)]
        pieces.append(PieceTokens("text", number, tokens, np.array(losses)))
    return pieces


def planted(kind: str, choice: random.Random) -> list[PieceTokens]:
    """Documents that are unusual; their mean loss is that of the others unless the kind says otherwise."""
    (one,) = ordinary(choice, 1)
    tokens, losses = one.tokens, one.losses
    if kind == "one token again and again, with a low loss":
        tokens, losses = np.full(100, 3), losses - 2
    elif kind == "a passage again and again":
        tokens = np.tile(tokens[:12], 9)[:100]
    elif kind == "memorized rare tokens":
        tokens = np.array(choice.choices(range(VOCAB, 2 * VOCAB), k=100))
    elif kind == "a high loss":
        losses = losses + 2
    elif kind == "a low loss":
        losses = losses - 2
    elif kind == "copies in other documents":
        return [PieceTokens("text", f"copy {number}", tokens, losses) for number in range(5)]
    return [PieceTokens("text", "planted", tokens, losses)]


def order(pieces: Sequence[PieceTokens]) -> list[int]:
    scores = [combine(of, math.nan, len(piece.losses)) for of, piece in zip(find_signals(pieces), pieces, strict=True)]
    return sorted(range(len(pieces)), key=scores.__getitem__, reverse=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "signal"),
    [
        ("one token again and again, with a low loss", "repetition"),
        ("a passage again and again", "repetition"),
        ("memorized rare tokens", "rarity"),
        ("a high loss", "loss"),
        ("a low loss", "loss"),
        ("copies in other documents", "copies"),
    ],
)
def test_an_unusual_document_comes_before_ordinary_and_tiny_ones(kind: str, signal: str, seed: int) -> None:
    choice = random.Random(seed)
    unusual = planted(kind, choice)
    # Tiny documents have the highest mean losses: those of first tokens, and a noisy mean.
    tiny = [
        PieceTokens("text", f"tiny {number}", piece.tokens[:length], piece.losses[:length])
        for number, (piece, length) in enumerate(zip(ordinary(choice, 20), [3, 15] * 10, strict=True))
    ]
    pieces = [*ordinary(choice, 40), *tiny, *unusual]
    if kind != "a high loss":
        assert max(pieces, key=lambda of: float(of.losses.mean())).document != "planted"
    first = order(pieces)[: len(unusual)]
    assert {pieces[number].document for number in first} == {piece.document for piece in unusual}
    scores = find_signals(pieces)[first[0]]
    assert max(SIGNALS, key=lambda name: abs(scores[name].score)) == signal


def test_signals_are_those_of_a_plain_computation() -> None:
    choice = random.Random(1)
    pieces = ordinary(choice, 12, length=40)
    for number in (3, 4):  # with repetitions, and a passage in common
        tokens = pieces[number].tokens.copy()
        tokens[10:30] = np.tile(pieces[3].tokens[:10], 2)
        pieces[number] = PieceTokens("text", number, tokens, pieces[number].losses)
    pieces[5] = PieceTokens("text", 5, pieces[5].tokens, pieces[5].losses[1:])  # its first token is not predicted
    pieces[6] = PieceTokens("text", 5, pieces[6].tokens, pieces[6].losses)  # of the same document
    grams = [{tuple(of.tokens[begin : begin + 8].tolist()) for begin in range(33)} for of in pieces]
    for number, signals in enumerate(find_signals(pieces)):
        own = pieces[number]
        tokens, skipped = own.tokens.tolist(), 40 - len(own.losses)
        others = Counter(token for of in pieces if of.document != own.document for token in of.tokens.tolist())
        vocab = len({token for of in pieces for token in of.tokens.tolist()})
        rarity = [math.log((sum(others.values()) + vocab) / (others[token] + 1)) for token in tokens[skipped:]]
        repetition, copies = [], []
        for place in range(skipped, 40):
            last = tokens[place - 2 : place + 1]
            before = sum(tokens[begin : begin + 3] == last for begin in range(place - 2)) if place >= 2 else 0
            repetition.append(math.log2(1 + before))
            around = [tuple(tokens[begin : begin + 8]) for begin in range(max(0, place - 7), min(place, 32) + 1)]
            documents = [
                {of.document for of, have in zip(pieces, grams, strict=True) if gram in have} for gram in around
            ]
            copies.append(math.log2(max(map(len, documents))))
        expected = {"loss": own.losses, "rarity": rarity, "repetition": repetition, "copies": copies}
        assert {name: signal.value for name, signal in signals.items()} == {
            name: pytest.approx(np.mean(values), abs=1e-12) for name, values in expected.items()
        }
    assert find_signals(pieces)[3]["copies"].value > 0.4
    assert find_signals(pieces)[3]["repetition"].value > 0.2


def test_a_piece_is_compared_with_its_source() -> None:
    choice = random.Random(2)
    code = [PieceTokens("code", f"code {n}", of.tokens, of.losses - 3) for n, of in enumerate(ordinary(choice, 12))]
    pieces = [*ordinary(choice, 12), *code]
    signals = find_signals(pieces)
    assert [of for of in signals if not (abs(of["loss"].score) < 4)] == []
    assert signals[-1]["loss"].expected < signals[0]["loss"].expected - 2
    # A source of few pieces is compared with all.
    few = [*ordinary(choice, 24), PieceTokens("code", "code", code[0].tokens, code[0].losses)]
    assert find_signals(few)[-1]["loss"].score < -6


def test_scores_of_ordinary_values_are_standard_deviations_whatever_one_value_is() -> None:
    generator = np.random.default_rng(0)
    errors = generator.uniform(0.1, 1.0, 400)
    values = 7 + generator.normal(0, np.hypot(0.5, errors))
    distances, scores = standardize(values, errors, np.ones(400), 0.1)
    assert distances == pytest.approx(values - 7, abs=0.1)
    assert scores.std() == pytest.approx(1, abs=0.1)
    values[0] = 1e6
    assert standardize(values, errors, np.ones(400), 0.1)[1][1:] == pytest.approx(scores[1:], abs=0.1)
    # Equal values differ by nothing, and a small difference is not unusual.
    equal = np.array([5.0] * 20 + [5.05])
    assert np.abs(standardize(equal, np.zeros(21), np.ones(21), 0.1)[1]).max() == pytest.approx(0.5)


def test_the_score_has_a_pull_and_the_strongest_of_what_makes_a_loss_low() -> None:
    def score(
        loss: float, rarity: float, repetition: float, copies: float, pull: float = math.nan, n: int = 10**9
    ) -> float:
        values = {"loss": loss, "rarity": rarity, "repetition": repetition, "copies": copies}
        return combine({name: Signal(0, 0, value) for name, value in values.items()}, pull, n)

    assert score(3, 4, -1, -1) == pytest.approx(5)
    assert score(-3, -4, 2, 1) == pytest.approx(3)
    assert score(-3, 0, 4, 2) == pytest.approx(4)
    assert score(0, 0, 3, 0, pull=16) == pytest.approx(5)
    # That of a few tokens varies more: the rest of a cut document, of two tokens, and a document of 20 rare ones.
    assert score(-2.62, -3.02, 0, 0, pull=15.6, n=2) < score(3.04, 2.64, 0, 0, pull=4.8, n=20)
    assert score(0, 0, 3, 0, pull=0.1) == score(0, 0, 3, 0, pull=0.0) == pytest.approx(3)
