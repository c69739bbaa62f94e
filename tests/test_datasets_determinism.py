"""Row r of step s is a function of (seed, data config, seq_len, global batch size, s, r) alone, for every source."""

from pathlib import Path

import numpy as np
import pytest
from data_samples import (
    DOCUMENTS,
    TOKENIZER,
    check_any_ranks,
    check_resumes,
    make_loader,
    take,
    write_jsonl,
    write_tokens,
)

from torchtrain.datasets.options import DataConfig, SourceConfig

SOURCES = ["jsonl", "txt", "standard library", "tokens", "packed", "mix", "mix read once"]
# The mixes have all other sources; test_best_fit.py has the packed one.
QUICK = ["mix", "mix read once"]
PARAMETERS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SOURCES]
STEPS = 50


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DataConfig]:
    folder = tmp_path_factory.mktemp("sources")
    jsonl = write_jsonl(folder / "a.jsonl", DOCUMENTS)
    (folder / "b.txt").write_text("".join(f"line {n * n % 9973}\n" for n in range(120_000)))
    tokens = write_tokens(folder / "tokens", jsonl)
    return {
        "jsonl": DataConfig(path=jsonl),
        "txt": DataConfig(path=str(folder / "b.txt")),
        "standard library": DataConfig(),
        "tokens": DataConfig(path=tokens),
        "packed": DataConfig(path=jsonl, packing="best_fit"),
        "mix": DataConfig(
            sources=(SourceConfig(path=jsonl, weight=2, held_out=0.1), SourceConfig(path=tokens, weight=0.5))
        ),
        "mix read once": DataConfig(
            sources=(SourceConfig(type="standard_library"), SourceConfig(path=str(folder / "b.txt"), weight=0.5)),
            when_exhausted="stop",
        ),
    }


@pytest.mark.parametrize("source", PARAMETERS)
def test_rows_do_not_depend_on_ranks_or_prefetching(configs: dict[str, DataConfig], source: str) -> None:
    check_any_ranks(configs[source], STEPS)


@pytest.mark.parametrize("source", PARAMETERS)
def test_resume_at_random_steps_with_other_degrees_gives_the_same_rows(
    configs: dict[str, DataConfig], source: str
) -> None:
    check_resumes(configs[source], STEPS, source)


def test_each_epoch_has_every_window_once(configs: dict[str, DataConfig]) -> None:
    expected = [TOKENIZER.encode(text, bos=True, eos=True) for text in DOCUMENTS]
    stream = [token for document in expected for token in document]
    windows = (len(stream) - 1) // 32
    assert windows % 9  # epochs end within a batch
    tokens = take(make_loader(configs["jsonl"], range(9), batch=9), 3 * windows // 9 + 1).flatten(0, 1).tolist()
    epochs = [tokens[n * windows : (n + 1) * windows] for n in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(stream[n * 32 : (n + 1) * 32] for n in range(windows))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize(
    "weights", [*(pytest.param(pair, marks=pytest.mark.slow) for pair in ((1, 1), (0.7, 0.3))), (5, 3, 1.5, 0.5)]
)
def test_sources_are_mixed_by_weight(tmp_path: Path, weights: tuple[float, ...]) -> None:
    """Each source has a word of its own, so that the source of a row is known."""
    words = ["j", "k", "q", "z"][: len(weights)]
    paths = [write_jsonl(tmp_path / f"{word}.jsonl", [f"{word} " * 40] * 20) for word in words]
    sources = tuple(SourceConfig(path=path, weight=weight) for path, weight in zip(paths, weights, strict=True))
    tokens = take(make_loader(DataConfig(sources=sources), range(40), batch=40, seq_len=16), 250).flatten(0, 1)
    source_of = {TOKENIZER.encode(f"{word} " * 40)[5]: n for n, word in enumerate(words)}
    counts = [0] * len(words)
    for row in tokens.tolist():
        counts[next(source_of[token] for token in row if token in source_of)] += 1
    assert sum(counts) == 10_000
    for count, weight in zip(counts, weights, strict=True):
        assert count / 10_000 == pytest.approx(weight / sum(weights), abs=1e-3)


def test_data_end_when_the_first_source_is_exhausted(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", DOCUMENTS[:20])
    large = write_jsonl(tmp_path / "large.jsonl", DOCUMENTS * 20)
    sources = (SourceConfig(path=small), SourceConfig(path=large))
    tokens = sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in DOCUMENTS[:20])
    windows = (tokens - 1) // 32
    steps = sum(1 for _ in make_loader(DataConfig(sources=sources, when_exhausted="stop")))
    # Half of each batch is from the small source.
    assert steps == windows // 4


def test_each_source_has_its_own_order(configs: dict[str, DataConfig]) -> None:
    same = SourceConfig(path=configs["jsonl"].path)
    first, second = make_loader(DataConfig(sources=(same, same), prefetch=0)).streams
    windows = np.zeros((2, 200, 33), dtype=np.int64)
    for stream, found in zip((first, second), windows, strict=True):
        stream.fill(range(200), list(found), range(200))
    assert {row.tobytes() for row in windows[0]} & {row.tobytes() for row in windows[1]}  # both read the same text
    assert (windows[0] != windows[1]).any(axis=1).mean() > 0.9
