"""Any chain of changes of batch, sequence length, ranks and sources: each token of an epoch is trained on once."""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from torchtrain.datasets.data_identity import Identity
from torchtrain.datasets.data_source import Place, Stream, StreamRequest
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.file_formats import OnMalformed
from torchtrain.datasets.order import Mixture, number_of_readers
from torchtrain.datasets.packing import DocumentSource, TextSource
from torchtrain.labels import IGNORE_INDEX
from torchtrain.plugins.prepared_data.tokenized import TokenWindowStream
from torchtrain.plugins.prepared_data.window_order import WindowOrder, block_size
from torchtrain.plugins.remote_data.streamed_text import StreamedFile, StreamedText

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 75))]
READERS = 4  # of streamed data, which a run keeps


class Numbers:
    """A tokenizer of texts that are numbers: a text is a sequence of ids, of which each occurs once in all texts."""

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes = [1] * vocab_size

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return [0] * bos + [int(word) for word in text.split()] + [1] * eos


def texts_of(lengths: list[int], first: int) -> tuple[list[str], range]:
    """A text for each of ``lengths``, and the ids in all of them, from ``first`` on."""
    ends = np.cumsum([first, *lengths]).tolist()
    texts = [" ".join(map(str, range(start, end))) for start, end in itertools.pairwise(ends)]
    return texts, range(first, ends[-1])


class Documents(DocumentSource):
    def __init__(self, lengths: list[int], first: int = 2) -> None:
        super().__init__(len(lengths), "numbers")
        self.texts, self.tokens = texts_of(lengths, first)
        self.tokenizer = Numbers(self.tokens.stop)

    def identity(self) -> str:
        return "numbers"

    def document(self, number: int) -> str | None:
        return self.texts[number]


class DividedDocuments(Documents):
    """Read once, but divided among the rows as data that are repeated."""

    def streams(self, request: StreamRequest) -> list[Stream]:
        return TextSource.streams(self, request)


class StreamedDocuments(StreamedText):
    """Files of which each is read in shares, or as a whole by its readers."""

    has_shares = True

    def __init__(self, lengths: list[int], first: int = 2) -> None:
        texts, self.tokens = texts_of(lengths, first)
        self.tokenizer = Numbers(self.tokens.stop)
        files = [StreamedFile(0, self.has_shares, partial(self.documents, texts[n::3])) for n in range(3)]
        super().__init__(files, READERS, "numbers", lambda: Identity("numbers"))

    @staticmethod
    def documents(texts: list[str], share: int, shares: int, start: int, on_malformed: OnMalformed) -> Iterator[str]:  # noqa: ARG004
        return iter(texts[len(texts) * share // shares : len(texts) * (share + 1) // shares][start:])


class WholeFiles(StreamedDocuments):
    has_shares = False


class Tokens:
    """Stands for a folder of prepared data, whose tokens are ``first``, ``first + 1``, ..."""

    name = "tokens"
    folder = SimpleNamespace(reads_ahead=False)
    byte_scale = 1.0

    def __init__(self, size: int, first: int = 0) -> None:
        self.tokens = range(first + 1, first + size)  # the first one is never a label
        self.tokenizer = Numbers(first + size)

    def __len__(self) -> int:
        return len(self.tokens) + 1

    def places_in(self, places: Collection[Place]) -> set[Place]:
        return set(places)  # none is excluded

    def read(self, starts: Sequence[int], outs: Sequence[npt.NDArray[np.int64]]) -> None:
        for start, out in zip(starts, outs, strict=True):
            assert start + len(out) <= len(self)
            out[:] = self.tokens.start - 1 + np.arange(start, start + len(out))

    def streams(self, request: StreamRequest) -> list[TokenWindowStream]:
        return [TokenWindowStream(self, request)] * len(request.rows)  # type: ignore[arg-type]


Source = Documents | StreamedDocuments | Tokens


def loader_of(
    sources: Source | Mapping[Source, float],
    batch: int,
    seq_len: int,
    ranks: int,
    rank: int,
    longest: int,
    *,
    repeat: bool = False,
) -> DataLoader:
    """``sources``: one, or several with their weights."""
    weights = sources if isinstance(sources, Mapping) else {sources: 1.0}
    rows = range(batch * rank // ranks, batch * (rank + 1) // ranks)
    readers = number_of_readers(READERS, batch)
    requests = [
        StreamRequest(source.tokenizer, seq_len, batch, rows, readers, 5, repeat, longest_seq_len=longest)  # type: ignore[arg-type]
        for source in weights
    ]
    return DataLoader(
        [source.streams(request) for source, request in zip(weights, requests, strict=True)],
        Mixture(list(weights.values())),
        rows,
        seq_len=seq_len,
        global_batch_size=batch,
        prefetch=0,
        drop_last=False,
        device=torch.device("cpu"),
        max_readers=READERS,
    )


def labels_of_chain(
    source: Source, random_numbers: random.Random, lengths: Sequence[int], other: Source | None = None
) -> tuple[dict[int, int], int]:
    """How often each token is a label in runs with other batches, lengths and ranks, each after the one before, until
    ``source`` ends; and the number of changes of the length.

    ``other``: a source that a part of the runs has too, some of them without ``source``, which then keeps its position.
    """
    labels: Counter[int] = Counter()
    saved, layout, changes = None, None, 0
    is_streamed = isinstance(source, StreamedDocuments)
    while True:
        batch = random_numbers.choice([4, 8, 12, 16] if is_streamed else [1, 2, 3, 4, 6, 7, 12])
        seq_len = random_numbers.choice(lengths)
        ranks = random_numbers.choice([n for n in (1, 2, 3, 4) if (READERS if is_streamed else batch) % n == 0])
        weights = random_numbers.choice([{source: 1.0}] if other is None else mixtures(source, other))
        loaders = [loader_of(weights, batch, seq_len, ranks, rank, max(lengths)) for rank in range(ranks)]
        if saved is not None and layout is not None:
            changes += seq_len != layout.seq_len
            for loader in loaders:
                loader.resume(saved, layout, [number < len(layout.state_sizes) for number in range(len(weights))])
        for _ in range(random_numbers.randrange(1, 9)):
            batches = [next(loader, None) for loader in loaders]
            if not any(batches):
                if len(weights) > 1:  # a step had rows of a source that has ended alone
                    other = None
                    break
                del labels[IGNORE_INDEX]
                return labels, changes
            for found in filter(None, batches):  # the loaders of a run end together; these do not communicate
                labels.update(found.labels.flatten().tolist())
        saved = np.concatenate([loader.state_dict()["rows"].numpy() for loader in loaders])
        layout = loaders[0].layout


def mixtures(source: Source, other: Source) -> list[dict[Source, float]]:
    return [{source: 1.0}, {source: 1.0, other: 0.5}, {source: 0.0, other: 1.0}]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", [Documents, DividedDocuments, StreamedDocuments, WholeFiles])
def test_every_token_of_text_is_trained_on_once(
    kind: type[Documents] | type[StreamedDocuments], mixed: bool, seed: int
) -> None:
    random_numbers = random.Random(seed)
    source = kind([random_numbers.choice([1, 2, 7, 20, 90]) for _ in range(random_numbers.randrange(20, 80))])
    other = kind([random_numbers.choice([3, 30]) for _ in range(20)], source.tokens.stop) if mixed else None
    counts, _ = labels_of_chain(source, random_numbers, [5, 8, 16, 33], other)
    assert {counts[token] for token in source.tokens} == {1}


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
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("lengths", [(4, 8, 32), (3, 7, 10)])
def test_only_open_groups_of_prepared_data_are_left_out(lengths: tuple[int, ...], mixed: bool, seed: int) -> None:
    random_numbers = random.Random(seed)
    source = Tokens(random_numbers.randrange(3000, 30000))
    other = Tokens(random_numbers.randrange(300, 3000), len(source)) if mixed else None
    counts, changes = labels_of_chain(source, random_numbers, lengths, other)
    block = block_size(len(source), max(lengths))
    groups = WindowOrder(len(source) - 1, max(lengths), block, 0).groups
    group = -(-len(source) // block // groups) * block
    border = 0 if max(lengths) in (4, 8, 32) else max(lengths) * (len(source) // block)
    assert sum(counts[token] > 1 for token in source.tokens) <= border
    assert sum(counts[token] == 0 for token in source.tokens) <= changes * group + border + max(lengths)


def test_order_of_prepared_data_mixes_places_and_differs_by_epoch() -> None:
    """Neighbors in the order are from anywhere; an epoch has each window; epochs have other orders."""
    order = WindowOrder(2**20, 16, block_size(2**20, 16), 7)
    epochs = [np.array([order.start(epoch, number) for number in range(order.windows)]) for epoch in (0, 1)]
    for starts in epochs:
        assert set(starts.tolist()) == set(range(0, 2**20, 16))
        assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.1
        assert (np.diff(starts) == 16).mean() < 0.01
    assert abs(np.corrcoef(*epochs)[0, 1]) < 0.01


@pytest.mark.parametrize("targets", [200_000, 2_000_000, 20_000_000, 100_000_000, 1_000_000_000, 10_000_000_000])
@pytest.mark.parametrize(("seq_len", "batch", "longest"), [(128, 32, 128), (1024, 64, 8192), (2048, 256, 2048)])
def test_batches_of_sorted_prepared_data_are_as_even_as_independent_rows(
    targets: int, seq_len: int, batch: int, longest: int
) -> None:
    """Of data sorted by ten topics, the share of a topic in a batch deviates as that of independent rows does.

    Neighbors are negatively correlated where few batches make a group: then together they are more even than that.
    """
    order = WindowOrder(targets, seq_len, block_size(targets, longest), 7)
    batches = min(300, order.windows // batch)
    if batches < 20:
        pytest.skip("too few batches")
    starts = np.array([order.start(0, number) for number in range(batches * batch)])
    topics = (starts * 10 // targets).reshape(batches, batch)
    shares = np.array([np.bincount(row, minlength=10) / batch for row in topics])
    deviation = np.sqrt(np.mean((shares - 0.1) ** 2)) / np.sqrt(0.1 * 0.9 / batch)
    neighbors = np.mean([np.corrcoef(shares[:-1, topic], shares[1:, topic])[0, 1] for topic in range(10)])
    assert 0.8 < deviation < 1.1
    assert neighbors < 0.1
