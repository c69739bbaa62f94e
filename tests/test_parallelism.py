"""One seed, one run: every parallel axis, and their combinations, against a single rank."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY, Curve, assert_same_run, config_of, train

from torchtrain.config.schema import JobConfig
from torchtrain.models.llama import TransformerConfig

# As many key/value heads as the largest tensor degree, and twice as many query heads.
PLAIN = replace(TINY, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=104)
DEEP = replace(PLAIN, n_layers=4)  # for four pipeline stages
MODELS = {
    "plain": PLAIN,
    "odd": replace(PLAIN, vocab_size=101),
    "tied": replace(PLAIN, tied_embeddings=True),
    "tied-odd": replace(PLAIN, tied_embeddings=True, vocab_size=101),
    "deep": DEEP,
    "deep-odd": replace(DEEP, vocab_size=101),
    "deep-tied": replace(DEEP, tied_embeddings=True),
}

AXES = {"R": "data_parallel_replicate", "S": "data_parallel_shard", "C": "context_parallel", "T": "tensor_parallel"}
AXES |= {"P": "pipeline_parallel"}


def layout(text: str) -> tuple[int, dict[str, Any]]:
    """``"S2 T2"`` as a number of ranks and [parallelism] options; a further word is the pipeline's schedule."""
    ranks, options = 1, {}
    for word in text.split():
        if word[0] in AXES and word[1:].isdecimal():
            options[f"{AXES[word[0]]}_degree"] = int(word[1:])
            ranks *= int(word[1:])
        else:
            options["pipeline_parallel_schedule"] = word
    return ranks, options


@pytest.fixture(scope="module")
def references(gloo: GlooPool) -> dict[str, Curve]:
    """One rank, the whole batch at once."""
    config = config_of(training={"local_batch_size": 8})
    return {name: gloo.run(1, train, config, model)[0] for name, model in MODELS.items()}


def run(
    gloo: GlooPool,
    text: str,
    model: TransformerConfig,
    function: Callable[[JobConfig, TransformerConfig], Curve] = train,
    **changes: Any,
) -> list[Curve]:
    ranks, options = layout(text)
    rows = 8 // (options.get("data_parallel_replicate_degree", 1) * options.get("data_parallel_shard_degree", 1))
    training = {"local_batch_size": rows, **changes.pop("training", {})}
    parallelism = {**options, **changes.pop("parallelism", {})}
    config = config_of(training=training, parallelism=parallelism, **changes)
    return gloo.run(ranks, function, config, model)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("S2", "odd"),
        ("S8", "plain"),
        ("R2 S2", "tied"),
        ("T2", "plain"),
        ("T4", "plain"),
        ("T4", "tied-odd"),
        ("C2", "plain"),
        ("C4", "odd"),
        ("P2", "plain"),
        ("P2", "tied"),
        ("P2 GPipe", "plain"),
        ("P2 Interleaved1F1B", "deep-tied"),
        ("P2 InterleavedZeroBubble", "deep-tied"),
        ("P2 ZBVZeroBubble", "deep-odd"),
        ("P4", "deep-tied"),
        ("S2 T2", "plain"),
        ("S2 T2", "tied-odd"),
        ("S2 C2", "plain"),
        ("T2 C2", "plain"),
        ("S2 P2", "plain"),
        ("S2 P2 ZBVZeroBubble", "deep"),
        ("T2 P2", "tied-odd"),
        ("C2 P2 Interleaved1F1B", "deep"),
        ("S2 T2 P2", "tied"),
        ("S2 C2 T2", "odd"),
        ("R2 C2 P2", "plain"),
    ],
)
def test_every_layout_gives_the_run_of_one_rank(
    gloo: GlooPool, references: dict[str, Curve], text: str, model: str
) -> None:
    assert_same_run(run(gloo, text, MODELS[model]), references[model])


@pytest.mark.parametrize(
    ("text", "model"), [("S2", "tied"), ("T2", "odd"), ("C2", "plain"), ("P2", "tied"), ("S2 T2 P2", "plain")]
)
def test_a_loss_in_chunks_gives_the_same_run(
    gloo: GlooPool, references: dict[str, Curve], text: str, model: str
) -> None:
    curves = run(gloo, text, MODELS[model], training={"loss_chunk_tokens": 8})
    assert_same_run(curves, references[model])
    for curve in curves:  # before training has made the least difference larger
        assert curve.losses[0] == pytest.approx(references[model].losses[0], rel=1e-6)
        assert curve.grad_norms[0] == pytest.approx(references[model].grad_norms[0], rel=1e-6)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("T2", {"parallelism": {"enable_sequence_parallel": False}}),
        ("T2 P2", {"parallelism": {"enable_sequence_parallel": False}}),
        ("P2", {"parallelism": {"pipeline_parallel_layers_per_stage": (1, 3)}}),
        ("P2", {"training": {"local_batch_size": 4}, "parallelism": {"pipeline_parallel_microbatches": 2}}),
        ("S2 P2", {"training": {"local_batch_size": 2}}),
        ("C2", {"activation_checkpoint": {"mode": "selective"}}),
        ("T2", {"activation_checkpoint": {"mode": "selective"}}),
        ("P2", {"activation_checkpoint": {"mode": "selective"}}),
        ("P2 ZBVZeroBubble", {"activation_checkpoint": {"mode": "full"}}),
        ("P2 InterleavedZeroBubble", {"activation_checkpoint": {"mode": "selective", "selective_option": "2"}}),
    ],
)
def test_options_change_nothing(
    gloo: GlooPool, references: dict[str, Curve], text: str, changes: dict[str, dict[str, Any]]
) -> None:
    assert_same_run(run(gloo, text, DEEP, **changes), references["deep"])


def _train_compiled(config: JobConfig, model: TransformerConfig) -> Curve:
    torch._dynamo.reset()  # what other tests compiled in this process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        return train(config, model)


@pytest.mark.parametrize("text", ["T2", "C2"])
def test_compiled_blocks_give_the_same_run(gloo: GlooPool, references: dict[str, Curve], text: str) -> None:
    changes = {"compile": {"enable": True}}
    assert_same_run(run(gloo, text, PLAIN, function=_train_compiled, **changes), references["plain"])


def _distance(a: list[float], b: list[float]) -> float:
    """Root mean square of the relative differences."""
    return math.sqrt(sum((x / y - 1) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


@pytest.fixture(scope="module")
def bfloat16_splits(gloo: GlooPool) -> list[Curve]:
    """One rank in bfloat16, accumulating over 1, 2, 4 and 8 splits of the batch."""
    configs = [
        config_of(training={"local_batch_size": size, "mixed_precision_param": "bfloat16"}) for size in (8, 4, 2, 1)
    ]
    return [gloo.run(1, train, config, MODELS["deep-odd"])[0] for config in configs]


# Shards and stages are another split of the batch. Tensor and context ranks also round to bfloat16 what they send to
# one another (partial products, gradients of keys and values), which one rank sums in float32: noise of the same kind
# on top, together up to 2.2 times that of the splits over three seeds.
@pytest.mark.parametrize(("text", "factor"), [("S2", 1.1), ("P2", 1.1), ("T2", 2.5), ("C2", 2.5), ("T2 C2", 2.5)])
def test_bfloat16_stays_within_the_noise_of_one_rank(
    gloo: GlooPool, bfloat16_splits: list[Curve], text: str, factor: float
) -> None:
    curve = run(gloo, text, MODELS["deep-odd"], training={"mixed_precision_param": "bfloat16"})[0]
    for values in ("losses", "grad_norms"):
        splits = [getattr(split, values) for split in bfloat16_splits]
        noise = max(_distance(a, b) for a, b in combinations(splits, 2))
        assert 1e-5 < noise < 1e-2
        assert max(_distance(getattr(curve, values), split) for split in splits) <= factor * noise
