"""Packing by best fit: documents that fit into a window are whole, and each token is predicted at most once."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from captured_log import captured_log
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_tokens
from forked_run import different_tensors, finish, logged_losses, saved_tensors

from torchtrain.datasets.best_fit import BLOCKS_OF_A_SET, pack, pack_sets
from torchtrain.datasets.cache_folder import windows_root
from torchtrain.datasets.data_source import text_hash
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.options import DataConfig
from torchtrain.labels import IGNORE_INDEX

ENCODED = [TOKENIZER.encode(text, bos=True, eos=True) for text in DOCUMENTS]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    path = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    return DataConfig(path=path, prefetch=0, document_mask=True, packing="best_fit")


def random_documents(seed: int) -> tuple[random.Random, np.ndarray, np.ndarray]:
    """Starts and lengths of documents, of which some have no tokens."""
    generator = random.Random(seed)
    lengths = [int(generator.lognormvariate(3, 1)) for _ in range(generator.randrange(1, 60))]
    ends = np.cumsum(lengths)
    return generator, ends - lengths, np.array(lengths)


@pytest.mark.parametrize("seed", range(20))
def test_parts_cover_each_token_once(seed: int) -> None:
    generator, starts, lengths = random_documents(seed)
    seq_len = generator.choice([1, 7, 32, 100])
    part_starts, part_tokens, counts = pack(starts, lengths, seq_len)
    assert len(part_starts) == len(part_tokens) == counts.sum()
    parts = list(zip(part_starts.tolist(), part_tokens.tolist(), strict=True))
    ends = np.cumsum(counts).tolist()
    windows = [parts[begin:end] for begin, end in pairwise([0, *ends])]
    begins = {start for start, length in zip(starts.tolist(), lengths.tolist(), strict=True) if length}
    for window in windows:
        assert 0 < sum(tokens for _, tokens in window) <= seq_len + 1
        assert [part for part in window[1:] if part[0] not in begins] == []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        own = sorted(part for part in parts if start <= part[0] < start + length)
        if length <= seq_len + 1:
            assert own == [(start, length)] * (length > 0)
            continue
        assert (own[0][0], sum(own[-1])) == (start, start + length)
        for before, after in pairwise(own):  # the first token of a window has no loss
            assert after[0] == sum(before) - 1
    # No two windows could be one, unless both begin with what is left of a document.
    sizes = sorted(sum(tokens for _, tokens in window) for window in windows if window[0][0] in begins)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > seq_len + 1


@pytest.mark.parametrize("seed", range(5))
def test_each_document_goes_where_it_leaves_the_least_room(seed: int) -> None:
    """As by a search of all windows, for documents that fit."""
    _, starts, lengths = random_documents(seed)
    size = int(lengths.max()) + seed * 7
    rooms: list[int] = []
    for length in sorted(lengths[lengths > 0].tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else size) - length)
    part_tokens, counts = pack(starts, lengths, size - 1)[1:]
    filled = [int(own.sum()) for own in np.split(part_tokens, np.cumsum(counts)[:-1])]
    assert sorted(filled) == sorted(size - room for room in rooms)


def test_sets_are_from_all_over_the_data_and_independent_of_the_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 5000)
    starts = np.concatenate(([0], lengths.cumsum()))
    block = 256
    found = []
    for seq_len in (16, 100):
        packed = pack_sets(starts, seq_len, block)
        sets = []
        for begin, end in pairwise(packed.sets.tolist()):
            parts = [part for window in range(begin, end) for part in packed.intervals(window)]
            sets.append(np.unique(np.concatenate([np.arange(start, start + count) for start, count in parts])))
        found.append(sets)
    assert len(found[0]) == -(-int(starts[-1]) // block) // BLOCKS_OF_A_SET > 10
    for own, other in zip(*found, strict=True):
        assert np.array_equal(own, other)
        assert len(np.unique(own * 10 // starts[-1])) == 10
    assert sorted(np.concatenate(found[0]).tolist()) == list(range(starts[-1]))


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


@pytest.mark.parametrize("stop", [False, True])
def test_documents_are_whole_and_each_is_read_once_in_an_epoch(config: DataConfig, stop: bool) -> None:
    config = replace(config, when_exhausted="stop" if stop else "repeat")
    longest = max(map(len, ENCODED))
    loader = make_loader(config, range(1), batch=1, seq_len=longest, drop_last=False)
    epoch = len(loader.streams[0]._windows)  # type: ignore[attr-defined]
    for _ in range(1 if stop else 3):
        found, ignored = documents_in(loader, epoch)
        assert found == dict.fromkeys(range(len(DOCUMENTS)), 1)
        assert ignored < 0.1
    assert (next(loader, None) is None) == stop


def test_bytes_are_those_of_the_documents_and_none_of_padding(config: DataConfig) -> None:
    config = replace(config, when_exhausted="stop")
    loader = make_loader(config, range(3), batch=3, seq_len=512, drop_last=False, count_bytes=True)
    total = 0.0
    for batch in loader:
        assert batch.label_bytes is not None
        assert not batch.label_bytes[batch.labels == IGNORE_INDEX].any()
        total += batch.label_bytes.sum().item()
    assert max(map(len, ENCODED)) <= 513  # all are whole: only tokens that begin them, without bytes, have no loss
    assert total == pytest.approx(sum(map(len, DOCUMENTS)))


def test_position_resumes_on_any_ranks_and_tokenized_data_have_the_same_windows(
    config: DataConfig, tmp_path: Path
) -> None:
    tokens = replace(config, path=write_tokens(tmp_path / "tokens", str(config.path)))
    whole, parts = make_loader(config, range(4), batch=4), [make_loader(config, rows, batch=4) for rows in HALVES]
    resumed, of_tokens = (make_loader(tokens, range(4), batch=4) for _ in range(2))
    for _ in range(60):
        resumed.load_state_dict(whole.state_dict())
        batch = next(whole)
        assert torch.equal(batch.labels, torch.cat([next(part).labels for part in parts]))
        for other in (resumed, of_tokens):
            again = next(other)
            assert torch.equal(batch.tokens, again.tokens)
            assert torch.equal(batch.labels, again.labels)


HALVES = range(2), range(2, 4)


def test_windows_are_computed_once_and_again_where_they_are_damaged(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTRAIN_CACHE", str(tmp_path / "cache"))

    def batches(config: DataConfig, **options: bool) -> tuple[torch.Tensor, int]:
        """Some batches, and how often documents were packed."""
        with captured_log() as log:
            found = take(make_loader(config, range(4), batch=4, **options), 5)
        return found, sum("packing its documents into windows of 32 tokens" in line for line in log)

    first, count = batches(config)
    assert count == 1
    again, count = batches(config)
    assert count == 0
    assert torch.equal(first, again)
    (file,) = windows_root().glob("*.npz")
    for content in (file.read_bytes()[:-200], b"", b"\0" * 1000):
        file.write_bytes(content)
        again, count = batches(config)
        assert count == 1
        assert torch.equal(first, again)
    held_out = replace(config, held_out=0.3)
    for options in ({}, {"held_out": True}):
        other, count = batches(held_out, **options)
        assert count == 1
        assert not torch.equal(first, other)
    (tmp_path / "file").touch()
    monkeypatch.setattr("torchtrain.datasets.best_fit.windows_root", lambda: tmp_path / "file" / "windows")
    again, count = batches(config)  # the cache cannot be written
    assert count == 1
    assert torch.equal(first, again)


def test_runs_resume_with_the_same_bits(config: DataConfig, tmp_path: Path) -> None:
    data = [f"--data.path={config.path}", "--data.packing=best_fit", "--data.document_mask"]
    finish(tmp_path / "whole", *data, "--training.steps=4", ranks=2)
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "parts/checkpoint/step-2")
    assert "resumed from" in finish(tmp_path / "parts", *data, "--training.steps=4", ranks=2)
    assert different_tensors(saved_tensors(tmp_path / "whole", 4), saved_tensors(tmp_path / "parts", 4)) == []
    finish(tmp_path / "one", *data, "--training.steps=4", ranks=1)
    assert logged_losses(tmp_path / "one") == pytest.approx(logged_losses(tmp_path / "whole"), rel=1e-6)
