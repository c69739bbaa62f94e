"""Any chain of changes of batch, sequence length and ranks: each token of an epoch is trained on once."""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchtrain.datasets.data_source import Place, Stream, StreamRequest
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.order import Mixture
from torchtrain.datasets.packing import DocumentSource, TextSource
from torchtrain.labels import IGNORE_INDEX
from torchtrain.plugins.prepared_data.tokenized import TokenWindowStream
from torchtrain.plugins.prepared_data.window_order import WindowOrder, block_size

SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 100))]


class Numbers:
    """A tokenizer of texts that are numbers: a text is a sequence of ids, of which each occurs once in all texts."""

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes = [1] * vocab_size

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return [0] * bos + [int(word) for word in text.split()] + [1] * eos


class Documents(DocumentSource):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(len(lengths), "numbers")
        ends = np.cumsum([2, *lengths]).tolist()
        self.texts = [" ".join(map(str, range(start, end))) for start, end in itertools.pairwise(ends)]
        self.tokens = range(2, ends[-1])
        self.tokenizer = Numbers(ends[-1])

    def identity(self) -> str:
        return "numbers"

    def document(self, number: int) -> str | None:
        return self.texts[number]


class DividedDocuments(Documents):
    """Read once, but divided among the rows as data that are repeated."""

    def streams(self, request: StreamRequest) -> list[Stream]:
        return TextSource.streams(self, request)


class Tokens:
    """Stands for a folder of prepared data, whose tokens are 0, 1, 2, ..."""

    name = "tokens"
    folder = SimpleNamespace(reads_ahead=False)
    byte_scale = 1.0

    def __init__(self, size: int) -> None:
        self.tokens = range(1, size)  # the first one is never a label
        self.tokenizer = Numbers(size)

    def __len__(self) -> int:
        return len(self.tokens) + 1

    def places_in(self, places: Collection[Place]) -> set[Place]:
        return set(places)  # none is excluded

    def read(self, starts: Sequence[int], outs: Sequence[npt.NDArray[np.int64]]) -> None:
        for start, out in zip(starts, outs, strict=True):
            assert start + len(out) <= len(self)
            out[:] = np.arange(start, start + len(out))

    def streams(self, request: StreamRequest) -> list[TokenWindowStream]:
        return [TokenWindowStream(self, request)] * len(request.rows)  # type: ignore[arg-type]


def loader_of(
    source: Documents | Tokens, batch: int, seq_len: int, ranks: int, rank: int, longest: int, *, repeat: bool = False
) -> DataLoader:
    rows = range(batch * rank // ranks, batch * (rank + 1) // ranks)
    request = StreamRequest(source.tokenizer, seq_len, batch, rows, 1, 5, repeat, longest_seq_len=longest)  # type: ignore[arg-type]
    return DataLoader(
        [source.streams(request)],
        Mixture([1]),
        rows,
        seq_len=seq_len,
        global_batch_size=batch,
        prefetch=0,
        drop_last=False,
        device=torch.device("cpu"),
    )


def labels_of_chain(
    source: Documents | Tokens, random_numbers: random.Random, lengths: Sequence[int]
) -> tuple[dict[int, int], int]:
    """How often each token is a label in runs with other batches, lengths and ranks, each after the one before, until
    the data end; and the number of changes of the length."""
    labels: Counter[int] = Counter()
    saved, layout, changes = None, None, 0
    while True:
        batch, seq_len = random_numbers.choice([1, 2, 3, 4, 6, 7, 12]), random_numbers.choice(lengths)
        ranks = random_numbers.choice([n for n in (1, 2, 3) if batch % n == 0])
        loaders = [loader_of(source, batch, seq_len, ranks, rank, max(lengths)) for rank in range(ranks)]
        if saved is not None and layout is not None:
            changes += seq_len != layout.seq_len
            for loader in loaders:
                loader.resume(saved, layout, [True])
        for _ in range(random_numbers.randrange(1, 9)):
            batches = [next(loader, None) for loader in loaders]
            if not any(batches):
                del labels[IGNORE_INDEX]
                return labels, changes
            for found in filter(None, batches):  # the loaders of a run end together; these do not communicate
                labels.update(found.labels.flatten().tolist())
        saved = np.concatenate([loader.state_dict()["rows"].numpy() for loader in loaders])
        layout = loaders[0].layout


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [Documents, DividedDocuments])
def test_every_token_of_text_is_trained_on_once(kind: type[Documents], seed: int) -> None:
    random_numbers = random.Random(seed)
    source = kind([random_numbers.choice([1, 2, 7, 20, 90]) for _ in range(random_numbers.randrange(20, 80))])
    counts, _ = labels_of_chain(source, random_numbers, [5, 8, 16, 33])
    del counts[0], counts[1]  # bos and eos
    assert set(counts.values()) == {1}
    assert counts.keys() == set(source.tokens)


@pytest.mark.parametrize("batch", [1, 5, 8])
def test_stop_trains_on_every_whole_batch(batch: int) -> None:
    source = Documents(random.Random(1).choices([1, 40, 900], k=60))
    tokens = len(source.tokens) + 2 * 60
    batches = list(loader_of(source, batch, 10, 1, 0, 10))
    assert sum(bool((found.labels != IGNORE_INDEX).all()) for found in batches) == (tokens - 1) // (batch * 10)


@pytest.mark.parametrize("documents", [1, 2, 3])
def test_rest_of_each_document_is_not_all_the_text(documents: int) -> None:
    """The one row of the smaller batch begins with what eight rows have left of a few documents."""
    source = Documents([1000] * documents)
    old, new = (loader_of(source, batch, 10, 1, 0, 10, repeat=True) for batch in (8, 1))
    for _ in range(100):
        next(old)
    new.resume(old.state_dict()["rows"].numpy(), old.layout, [True])
    for _ in range(200):
        next(new)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lengths", [(4, 8, 32), (3, 7, 10)])
def test_only_open_groups_of_prepared_data_are_left_out(lengths: tuple[int, ...], seed: int) -> None:
    random_numbers = random.Random(seed)
    source = Tokens(random_numbers.randrange(3000, 30000))
    counts, changes = labels_of_chain(source, random_numbers, lengths)
    block = block_size(len(source), max(lengths))
    group = max(1, len(source) // block // 64) * block
    border = 0 if max(lengths) in (4, 8, 32) else max(lengths) * (len(source) // block)
    assert sum(counts[token] > 1 for token in source.tokens) <= border
    assert sum(counts[token] == 0 for token in source.tokens) <= changes * group + border + max(lengths)


def test_order_of_prepared_data_mixes_places_and_differs_by_epoch() -> None:
    """Neighbours in the order are from anywhere; a group has each of its blocks; epochs have other orders."""
    order = WindowOrder(2**20, 16, block_size(2**20, 16), 7)
    epochs = [np.array([order.start(epoch, number) for number in range(order.windows)]) for epoch in (0, 1)]
    for starts in epochs:
        assert set(starts.tolist()) == set(range(0, 2**20, 16))
        assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.1
        assert (np.diff(starts) == 16).mean() < 0.01
    assert abs(np.corrcoef(*epochs)[0, 1]) < 0.01
