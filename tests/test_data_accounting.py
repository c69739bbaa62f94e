"""Any chain of changes of ranks, batch, sequence length, sources and weights, with kills between them: each token of an
epoch is trained on at most once, and exactly once unless the log says that it is left out."""

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from captured_log import captured_log

from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.data_source import is_held_out, text_hash
from torchtrain.datasets.dataloader import Batch, DataLoader, LoaderLayout
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.text_input import TextsInMemory
from torchtrain.datasets.token_dataset import TokenStream
from torchtrain.datasets.token_folder import LocalFolder
from torchtrain.datasets.tokenize_text import tokenize
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.datasets.window_order import block_size
from torchtrain.labels import IGNORE_INDEX

# Documents that are cut and packed, read once and repeated, held out and excluded, in one to three sources.
QUICK = (0, 3, 5, 7)
SEEDS = [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.slow) for seed in range(110)]
FILLER = 0
AGREED = DataLoader._agreed
LEFT_OUT = re.compile(r"/(\d+)': with another training.seq_len, ([\d,]+) windows of a group of")


KINDS = {"tiny": (30, [1, 3, 9]), "small": (100, [1, 2, 7, 20, 90]), "large": (120, [1, 5, 30, 200, 900])}
"""Number of documents, and the lengths that they may have."""


class Numbers(Tokenizer):
    """A tokenizer of texts that are numbers: a text is a sequence of ids, of which each occurs once in all texts."""

    bos_id = eos_id = None
    content_hash = "numbers"
    special_ids = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = self.used_ids = vocab_size
        self.token_bytes = [len(str(token)) + 1 for token in range(vocab_size)]

    def ids_of(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def name_of(self, token: int) -> str:
        return str(token)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Sharded(TextsInMemory):
    """Texts that are divided into ``shards`` shards, of which some are empty."""

    def __init__(self, texts: Sequence[str], shards: int) -> None:
        super().__init__(texts, "numbers")
        self._borders = [0, 0, *(len(texts) * number // shards for number in range(1, shards + 1))]
        self.shard_sizes = np.diff(self._borders).tolist()


@dataclass(repr=False)
class Source:
    """Documents as a folder of tokens."""

    folder: Path
    texts: list[str]
    trained: npt.NDArray[np.int64]
    """The ids of all tokens but those of documents that are held out or excluded."""
    first: int
    """The first token that is not held out, which is no label where documents follow each other."""
    left_out: int = 0
    """Maximum number of tokens that are left out, by the log."""
    changes: int = 0
    """How often some were."""


class Run:
    """A run that is killed again and again, and resumes with other options."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.choose = choose = random.Random(seed)
        self.packs = choose.random() < 0.4
        self.repeats = choose.random() < 0.3
        self.held_out = choose.choice([0.0, 0.0, 0.3])
        kinds = [choose.choice(list(KINDS)) for _ in range(choose.choice([1, 1, 2, 3]))]
        self.is_large = "large" in kinds
        choices = [(4, 8, 16), (8,)]
        if "tiny" not in kinds:
            choices += [(2, 4, 8), (8, 16, 32), (5, 8, 13, 33), (3, 7)]
        self.lengths = choose.choice(choices)
        excluded = choose.choice([0.0, 0.1])
        sizes = [self.choose.choices(KINDS[kind][1], k=KINDS[kind][0]) for kind in kinds]
        self.tokenizer = Numbers(2 + sum(map(sum, sizes)))
        self.sources: list[Source] = []
        self.excluded: list[str] = []
        for number, lengths in enumerate(sizes):
            self.add_source(folder / str(number), 2 + sum(map(sum, sizes[:number])), lengths, excluded)
        self.options: dict[str, Any] = {
            "packing": "best_fit" if self.packs else "cut",
            "prefetch": 0,
            "verify_gib": 0.0,
        }
        self.options["when_exhausted"] = "repeat" if self.repeats else "stop"
        if self.excluded:
            lines = [json.dumps({"text_hash": name}) + "\n" for name in self.excluded]
            (folder / "exclude.jsonl").write_text("".join(lines))
            self.options["exclude"] = str(folder / "exclude.jsonl")
        self.saved: npt.NDArray[np.int64] | None = None
        self.layout: LoaderLayout | None = None
        size = self.tokenizer.vocab_size
        self.labels, self.inputs, self.bytes = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size)
        """By token: how often it was a label and in the input, and the bytes that it stood for."""

    def add_source(self, folder: Path, first: int, lengths: Sequence[int], excluded: float) -> None:
        """Write documents of ``lengths`` tokens, which are the numbers from ``first`` on."""
        ends = np.cumsum([first, *lengths]).tolist()
        documents = [np.arange(start, end) for start, end in itertools.pairwise(ends)]
        texts = [self.tokenizer.decode(ids.tolist()) for ids in documents]
        folder.mkdir()
        tokenize(Sharded(texts, self.choose.choice([1, 2, 5])), self.tokenizer, LocalFolder(folder), processes=1)
        kept = [ids for ids, text in zip(documents, texts, strict=True) if not is_held_out(text, self.held_out)]
        named = [number for number in range(len(texts)) if self.choose.random() < excluded]
        self.excluded += [text_hash(texts[number]) for number in named]
        without = {int(documents[number][0]) for number in named}
        trained = np.concatenate([ids for ids in kept if int(ids[0]) not in without])
        self.sources.append(Source(folder, texts, trained, int(kept[0][0])))

    def resume(self, weights: Sequence[float]) -> list[DataLoader]:
        """Loaders of some ranks, with another batch and sequence length; ``weights``: of the first sources."""
        batch, seq_len = self.choose.choice((48, 96, 128) if self.is_large else (1, 2, 3, 4, 6, 12)), self.seq_len()
        ranks = self.choose.choice([n for n in (1, 1, 2, 2, 3, 4) if batch % n == 0])
        tables = [
            SourceConfig(path=str(source.folder), weight=weight, held_out=self.held_out)
            for source, weight in zip(self.sources, weights, strict=False)
        ]
        with captured_log() as log:
            loaders = [
                build_dataloader(
                    DataConfig(sources=tuple(tables), **self.options),
                    self.tokenizer,
                    seq_len=seq_len,
                    global_batch_size=batch,
                    rows=range(batch * rank // ranks, batch * (rank + 1) // ranks),
                    seed=5,
                    device=torch.device("cpu"),
                    drop_last=False,
                    count_bytes=True,
                    longest_seq_len=max(self.lengths),
                )
                for rank in range(ranks)
            ]
            for loader in loaders if self.saved is not None else ():
                self.load(loader)
        if self.layout is not None and self.layout.seq_len != seq_len:
            # Each rank logs the same.
            for number, windows in {match.groups() for line in log for match in LEFT_OUT.finditer(line)}:
                tokens = self.layout.seq_len + self.packs
                self.sources[int(number)].left_out += int(windows.replace(",", "")) * tokens
                self.sources[int(number)].changes += 1
        else:
            assert "left out" not in "".join(log)
        return loaders

    def seq_len(self) -> int:
        """That of the run before, or another one."""
        before = [] if self.layout is None else [self.layout.seq_len] * 3
        return self.choose.choice([*before, *self.lengths])

    def load(self, loader: DataLoader) -> None:
        assert self.saved is not None
        assert self.layout is not None
        if loader.layout == self.layout:
            rows = self.saved[loader.rows.start : loader.rows.stop]
            loader.load_state_dict({"rows": torch.from_numpy(rows)})
        else:
            known = len(self.layout.state_sizes)
            loader.resume(self.saved, self.layout, [number < known for number in range(len(loader.streams))])

    def train(self, loaders: list[DataLoader]) -> bool:
        """Train some steps, and lose the last of them; return whether the data ended before."""
        steps = self.choose.randrange(1, 40)
        saved_after = max(0, steps - self.choose.choice([0, 0, 1, 5]))
        for step in range(steps + 1):
            if step <= saved_after:
                self.saved = np.concatenate([loader.state_dict()["rows"].numpy() for loader in loaders])
                self.layout = loaders[0].layout
            if step == steps:
                break
            batches, ended = zip(*map(next_of_all_ranks, loaders), strict=True)
            if all(ended) and all((batch.labels == IGNORE_INDEX).all() for batch in batches):
                return step <= saved_after
            if step < saved_after:
                self.count(batches)
        return False

    def count(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            assert batch.label_bytes is not None
            known = batch.labels[batch.labels != IGNORE_INDEX].numpy()
            np.add.at(self.labels, known, 1)
            np.add.at(self.bytes, known, batch.label_bytes[batch.labels != IGNORE_INDEX].numpy())
            np.add.at(self.inputs, batch.tokens.numpy(), 1)

    def train_to_the_end(self) -> None:
        """Train until each source has ended, or for some time if they are repeated."""
        left, known, mixed = list(range(len(self.sources))), 1, True
        for _ in range(12 if self.repeats else 10**9):
            known = self.choose.randrange(known, len(self.sources) + 1)
            if not mixed:
                known = max(known, left[0] + 1)
            weights = [self.choose.choice((0.0, 0.3, 1.0)) if number in left else 0.0 for number in range(known)]
            if not mixed or not any(weights):
                weights = [float(number == left[0]) for number in range(max(known, left[0] + 1))]
            mixed = True
            if self.train(self.resume(weights)):
                # One source has ended; or several have a part in this run, of which one may have more.
                mixed = sum(weight > 0 for weight in weights) == 1
                if mixed:
                    left.remove(next(number for number, weight in enumerate(weights) if weight))
            if not left:
                return


def next_of_all_ranks(loader: DataLoader) -> tuple[Batch, bool]:
    """The next batch of a rank, also if the data of its rows have ended, because other ranks may have more; and whether
    they have ended."""
    ended = False

    def agreed(loader: DataLoader) -> list[int]:
        nonlocal ended
        failed, late, stopping, _, ended = AGREED(loader)
        return [failed, late, stopping, 1, 0]

    with patch.object(DataLoader, "_agreed", agreed):
        return next(loader), ended


def epochs_of(run: Run, number: int) -> int:
    """Number of epochs of a source that have begun."""
    assert run.saved is not None
    assert run.layout is not None
    if number >= len(run.layout.state_sizes):
        return 0
    loader = run.resume([float(n == number) for n in range(len(run.layout.state_sizes))])[0]
    stream = loader.streams[number]
    assert isinstance(stream, TokenStream)
    return -(-int(loader.state_dict()["rows"][0, 1 + number]) // stream._of_epoch)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_is_trained_on_once(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, seed)
    run.train_to_the_end()
    never = np.ones(run.tokenizer.vocab_size, dtype=bool)
    never[FILLER] = False
    for source in run.sources:
        never[source.trained] = False
    assert not run.labels[never].any(), "of documents that are held out or excluded"
    assert not run.inputs[never].any()
    for number, source in enumerate(run.sources):
        labels, inputs = run.labels[source.trained], run.inputs[source.trained]
        most = epochs_of(run, number) if run.repeats else 1
        border = 0  # tokens at the ends of blocks that are no multiple of some length
        if not run.packs and any(length & (length - 1) for length in run.lengths):
            border = max(run.lengths) * (len(source.trained) // block_size(len(source.trained), max(run.lengths)))
        assert (labels - most).clip(0).sum() <= border
        if run.repeats:
            continue
        is_read = labels > 0
        if run.packs:
            is_read |= inputs > 0  # the first token of a window has no loss
        missing = int((~is_read & (source.trained != source.first)).sum())
        assert missing <= source.left_out + border
        if not border and not run.packs and not run.excluded and source.left_out:
            assert missing > source.left_out - source.changes * max(run.lengths)  # the last window is not full
        if not source.left_out and not run.packs:  # the sizes of the documents, in UTF-8
            for text in source.texts:
                ids = run.tokenizer.ids_of(text)
                if run.labels[ids].all():
                    assert run.bytes[ids].sum() == pytest.approx(len(text))


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 5, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("packs", [False, True])
def test_stop_trains_on_every_whole_batch(tmp_path: Path, packs: bool, batch: int) -> None:
    """With ``drop_last``, as training does, rows that do not fill a batch are left out."""
    lengths = random.Random(1).choices([1, 40, 900], k=60)
    texts = [
        " ".join(map(str, range(end - length, end))) for length, end in zip(lengths, np.cumsum(lengths), strict=True)
    ]
    tokenizer = Numbers(sum(lengths))
    tokenize(Sharded(texts, 3), tokenizer, LocalFolder(tmp_path), processes=1)
    config = DataConfig(path=str(tmp_path), prefetch=0, when_exhausted="stop", packing="best_fit" if packs else "cut")
    found = []
    for drop_last in (False, True):
        loader = build_dataloader(
            config,
            tokenizer,
            seq_len=10,
            global_batch_size=batch,
            rows=range(batch),
            seed=5,
            device=torch.device("cpu"),
            drop_last=drop_last,
        )
        found.append([batch.labels for batch in loader])
    whole, last = found
    if not packs:
        assert len(whole) == -(-(sum(lengths) - 1) // (batch * 10))
        assert len(last) == (sum(lengths) - 1) // (batch * 10)
    assert len(whole) - len(last) in (0, 1)
    differ = [number for number, pair in enumerate(zip(whole, last, strict=False)) if not torch.equal(*pair)]
    assert differ == []
    seen = torch.cat(whole).flatten()
    assert seen[seen != IGNORE_INDEX].unique(return_counts=True)[1].max() == 1
