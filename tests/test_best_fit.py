"""Packing by best fit: documents that fit into a window are whole, and each token is predicted at most once."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, write_jsonl, write_prepared
from forked_run import different_tensors, finish, logged_losses, saved_tensors

from torchtrain.config.schema import DataConfig, SourceConfig
from torchtrain.datasets.best_fit import pack
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.exclusions import text_hash
from torchtrain.datasets.packing import GROUP_WINDOWS
from torchtrain.errors import DataError
from torchtrain.labels import IGNORE_INDEX

ENCODED = [TOKENIZER.encode(text, bos=True, eos=True) for text in DOCUMENTS]


@pytest.mark.parametrize("seed", range(20))
def test_parts_cover_each_token_once(seed: int) -> None:
    generator = random.Random(seed)
    seq_len = generator.choice([1, 7, 32, 100])
    lengths = [max(1, int(generator.lognormvariate(3, 1))) for _ in range(generator.randrange(1, 60))]
    windows = pack(lengths, seq_len)
    parts = sorted((part for window in windows for part in window), key=lambda part: (part.document, part.offset))
    for window in windows:
        assert sum(part.tokens for part in window) <= seq_len + 1
        assert [part for part in window[1:] if part.offset != 0] == []
    for document, length in enumerate(lengths):
        own = [part for part in parts if part.document == document]
        assert (own[0].offset, own[-1].offset + own[-1].tokens) == (0, length)
        assert [
            (before, after) for before, after in pairwise(own) if after.offset != before.offset + before.tokens - 1
        ] == []
        assert len(own) == 1 or length > seq_len + 1
    # No two windows could be one, unless both begin with what is left of a document.
    sizes = sorted(sum(part.tokens for part in window) for window in windows if window[0].offset == 0)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > seq_len + 1


def source(folder: Path, kind: str) -> SourceConfig:
    folder.mkdir()
    for number in (0, 1):
        write_jsonl(folder / f"{number}.jsonl", DOCUMENTS[number::2])
    return SourceConfig(path=f"{'' if kind == 'local' else 'file://'}{folder}")


def documents_in(loader: DataLoader, steps: int) -> tuple[Counter[int], float]:
    """How often each document was read in whole, and the share of labels without a loss."""
    found: Counter[int] = Counter()
    ignored = []
    for _ in range(steps):
        located, batch = loader.locate(), next(loader)
        ignored.append((batch.labels == IGNORE_INDEX).double().mean().item())
        for row, pieces in enumerate(located):
            assert pieces is not None
            tokens = [*batch.tokens[row].tolist(), int(batch.labels[row, -1])]
            begin = 0
            for piece in pieces:
                (number,) = (n for n, text in enumerate(DOCUMENTS) if text_hash(text) == piece.text_hash)
                part = ENCODED[number][piece.offset : piece.offset + piece.tokens]
                assert tokens[begin : begin + piece.tokens][:-1] == part[:-1]
                begin += piece.tokens
                found[number] += piece.offset + piece.tokens == len(ENCODED[number])
            rest = batch.labels[row, max(begin - 1, 0) :]
            assert (rest == IGNORE_INDEX).all()
            assert (batch.labels[row, : begin - 1] != IGNORE_INDEX).all()
    return found, sum(ignored) / steps


@pytest.mark.parametrize("kind", ["local", "streamed"])
def test_documents_are_whole_and_a_position_resumes(kind: str, tmp_path: Path) -> None:
    config = DataConfig(
        sources=(source(tmp_path / kind, kind),), prefetch=0, streams=4, document_mask=True, packing="best_fit"
    )
    longest = max(map(len, ENCODED))
    loader = make_loader(config, range(4), batch=4, seq_len=longest)
    found, ignored = documents_in(loader, GROUP_WINDOWS)  # more than one epoch
    assert set(found) == set(range(len(DOCUMENTS)))
    assert ignored < 0.1
    short, parts = (
        make_loader(config, range(4), batch=4),
        [make_loader(config, rows, batch=4) for rows in (range(2), range(2, 4))],
    )
    resumed = make_loader(config, range(4), batch=4)
    for _ in range(2 * GROUP_WINDOWS):
        resumed.load_state_dict(short.state_dict())
        batch = next(short)
        assert torch.equal(batch.labels, torch.cat([next(part).labels for part in parts]))
        again = next(resumed)
        assert torch.equal(batch.tokens, again.tokens)
        assert torch.equal(batch.labels, again.labels)
    for each in (loader, short, resumed, *parts):
        each.close()


@pytest.mark.parametrize(("batch", "seq_len"), [(8, 32), (2, 32), (4, 64)])
def test_a_change_of_batch_or_length_leaves_out_open_groups_at_most(batch: int, seq_len: int, tmp_path: Path) -> None:
    texts = [f"number {number} " + "word " * (number % 9) for number in range(4000)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    config = DataConfig(path=str(tmp_path / "texts.jsonl"), prefetch=0, packing="best_fit")
    before, after = (
        make_loader(config, range(4), batch=4),
        make_loader(config, range(batch), batch=batch, seq_len=seq_len),
    )
    read: Counter[str] = Counter()

    def count(loader: DataLoader, steps: int) -> int:
        tokens = 0
        for _ in range(steps):
            for pieces in loader.locate():
                read.update(piece.place.position for piece in pieces or () if piece.offset == 0)
                tokens += sum(piece.tokens for piece in pieces or ())
            next(loader)
        return tokens

    count(before, 40)
    rows = before.state_dict()["rows"].numpy()
    after.resume(rows, before.layout, [True])
    total = sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in texts)
    left = total - 40 * 4 * 32
    count(after, left * 3 // 4 // (batch * seq_len))
    assert max(read.values()) == 1  # in the same epoch
    for loader in (before, after):
        loader.close()


@pytest.mark.parametrize("seed", range(4))
def test_data_that_are_read_once_are_read_to_their_end(seed: int, tmp_path: Path) -> None:
    """By any ranks, and after changes of the batch; a change of the length leaves out the open group."""
    texts = [f"number {number} " + "word " * (number % 9) for number in range(700)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    config = DataConfig(path=str(tmp_path / "texts.jsonl"), prefetch=0, packing="best_fit", when_exhausted="stop")
    random_numbers = random.Random(seed)
    saved, layout, changes, read = None, None, 0, Counter[str]()
    while True:
        batch, seq_len = random_numbers.choice([1, 3, 4, 12]), random_numbers.choice([32, 32, 48] if seed % 2 else [32])
        ranks = random_numbers.choice([n for n in (1, 2, 3) if batch % n == 0])
        loaders = [
            make_loader(
                config,
                range(batch * rank // ranks, batch * (rank + 1) // ranks),
                batch=batch,
                seq_len=seq_len,
                drop_last=False,
            )
            for rank in range(ranks)
        ]
        if saved is not None and layout is not None:
            changes += seq_len != layout.seq_len
            for loader in loaders:
                loader.resume(saved, layout, [True])
        for _ in range(random_numbers.randrange(1, 9)):
            pieces = [piece for loader in loaders for row in loader.locate() for piece in row or ()]
            for loader in loaders:
                next(loader, None)
            read.update(piece.place.position for piece in pieces if piece.offset == 0)
            if not pieces:
                break
        if not pieces:
            break
        saved = np.concatenate([loader.state_dict()["rows"].numpy() for loader in loaders])
        layout = loaders[0].layout
    lengths = [len(TOKENIZER.encode(text, bos=True, eos=True)) for text in texts]
    assert max(read.values()) == 1
    if changes:
        assert sum(lengths) - sum(lengths[int(of.split()[-1]) - 1] for of in read) <= changes * (32 + 1) * 49
    else:
        assert len(read) == len(texts)


def test_runs_resume_with_the_same_bits(tmp_path: Path) -> None:
    data = [f"--data.path={source(tmp_path / 'data', 'local').path}", "--data.packing=best_fit", "--data.document_mask"]
    finish(tmp_path / "whole", *data, "--training.steps=6", ranks=2)
    finish(tmp_path / "parts", *data, "--training.steps=3", "--lr_scheduler.total_steps=6", ranks=2)
    finish(tmp_path / "parts", *data, "--training.steps=6", "--lr_scheduler.total_steps=6", ranks=2)
    assert different_tensors(saved_tensors(tmp_path / "whole", 6), saved_tensors(tmp_path / "parts", 6)) == []
    finish(tmp_path / "one", *data, "--training.steps=6", ranks=1)
    assert logged_losses(tmp_path / "one") == pytest.approx(logged_losses(tmp_path / "whole"), rel=1e-6)


def test_what_cannot_be_packed_is_rejected(tmp_path: Path) -> None:
    streamed = source(tmp_path / "streamed", "streamed").path
    with pytest.raises(DataError, match=r"data.packing = 'best_fit' with data.when_exhausted = 'stop' needs text on a"):
        make_loader(DataConfig(path=streamed, packing="best_fit", when_exhausted="stop"))
    prepared = write_prepared(tmp_path / "prepared", source(tmp_path / "data", "local").path)
    with pytest.raises(DataError, match="packing = 'best_fit' needs text, and data is TokenizedDataset"):
        make_loader(DataConfig(path=prepared, packing="best_fit"))
