"""The order of windows: each once an epoch, from all over the data, in groups that do not depend on their length."""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from torchtrain.datasets.best_fit import pack_sets
from torchtrain.datasets.token_dataset import CutWindows
from torchtrain.datasets.window_order import WindowOrder, block_size

Integers = npt.NDArray[np.int64]


def cut_order(targets: int, seq_len: int, longest: int, seed: int = 7) -> WindowOrder:
    return CutWindows(targets + 1, seq_len).order(block_size(targets, longest), seed)


def topics_of_batches(places: Integers, batch: int) -> tuple[float, float]:
    """How even the topics of batches are, if data are sorted by ten topics, and windows are at ``places`` in [0, 1).

    Returns:
        The standard deviation of the share of a topic in a batch, divided by that of independent rows; and the
        correlation of the shares in batches that follow each other.
    """
    batches = min(300, len(places) // batch)
    topics = (places[: batches * batch] * 10).astype(np.int64).reshape(batches, batch)
    shares = np.array([np.bincount(row, minlength=10) / batch for row in topics])
    deviation = np.sqrt(np.mean((shares - 0.1) ** 2)) / np.sqrt(0.1 * 0.9 / batch)
    neighbors = np.mean([np.corrcoef(shares[:-1, topic], shares[1:, topic])[0, 1] for topic in range(10)])
    return float(deviation), float(neighbors)


@pytest.mark.parametrize("targets", [200_000, 2_000_000, 20_000_000, 100_000_000, 1_000_000_000, 10_000_000_000])
@pytest.mark.parametrize(("seq_len", "batch", "longest"), [(128, 32, 128), (1024, 64, 8192), (2048, 256, 2048)])
def test_batches_of_sorted_data_are_as_even_as_independent_rows(
    targets: int, seq_len: int, batch: int, longest: int
) -> None:
    """Neighbors are negatively correlated where few batches make a group: then together they are more even."""
    order = cut_order(targets, seq_len, longest)
    count = min(300 * batch, order.windows // batch * batch)
    if count < 20 * batch:
        pytest.skip("too few batches")
    windows = np.array([order.window(0, number) for number in range(count)])
    assert len(np.unique(windows)) == count
    deviation, neighbors = topics_of_batches(windows * seq_len / targets, batch)
    assert 0.8 < deviation < 1.1
    assert neighbors < 0.1


@pytest.mark.parametrize(("seq_len", "longest"), [(128, 128), (128, 1024), (2048, 2048)])
def test_batches_of_sorted_documents_that_are_packed_are_as_even(seq_len: int, longest: int) -> None:
    batch, lengths = 64, np.random.default_rng(0).lognormal(6, 1, 40_000).astype(np.int64) + 1
    starts = np.concatenate(([0], lengths.cumsum()))
    block = block_size(int(starts[-1]) - 1, longest)
    packed = pack_sets(starts, seq_len, block)
    order = packed.order(block, 7)
    windows = [order.window(0, number) for number in range(min(300 * batch, len(packed) // batch * batch))]
    firsts = np.array([packed.intervals(window)[0][0] for window in windows])
    deviation, neighbors = topics_of_batches(firsts / starts[-1], batch)
    assert 0.8 < deviation < 1.1
    assert neighbors < 0.1


def test_neighbors_are_from_anywhere_and_epochs_differ() -> None:
    order = cut_order(2**20, 16, 16)
    epochs = [np.array([order.window(epoch, number) for number in range(order.windows)]) for epoch in (0, 1)]
    for windows in epochs:
        assert set(windows.tolist()) == set(range(2**16))
        assert abs(np.corrcoef(windows[:-1], windows[1:])[0, 1]) < 0.1
        assert (np.diff(windows) == 1).mean() < 0.01
    assert abs(np.corrcoef(*epochs)[0, 1]) < 0.01


@pytest.mark.parametrize("targets", [1, 15, 16, 17, 100, 1000, 70_001])
@pytest.mark.parametrize("seq_len", [1, 7, 16])
def test_each_epoch_has_each_window_once(targets: int, seq_len: int) -> None:
    """Also if there are fewer tokens than a block, or none of a window."""
    order = cut_order(targets, seq_len, 16)
    assert order.windows == targets // seq_len
    for epoch in (0, 5):
        windows = [order.window(epoch, number) for number in range(order.windows)]
        assert sorted(windows) == list(range(order.windows))
        assert order.ends(epoch)[-1] == order.windows


@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("packs", [False, True])
def test_nothing_is_read_twice_if_the_length_changes_between_groups(before: int, after: int, packs: bool) -> None:
    """Both lengths have the same tokens in each group of an epoch."""
    lengths = np.random.default_rng(1).lognormal(4, 2, 400).astype(np.int64) + 1
    starts = np.concatenate(([0], lengths.cumsum()))
    tokens = int(starts[-1])
    block = block_size(tokens - 1, 32)
    found = []
    for seq_len in (before, after):
        windows = pack_sets(starts, seq_len, block) if packs else CutWindows(tokens, seq_len)
        order = windows.order(block, 3)
        groups = []
        for begin, end in itertools.pairwise([0, *order.ends(1).tolist()]):
            parts = [part for number in range(begin, end) for part in windows.intervals(order.window(1, number))]
            # The tokens that are predicted; those of whole documents with the first one.
            covered = [np.arange(start + (not packs), start + count) for start, count in parts]
            groups.append(np.unique(np.concatenate(covered)))
        found.append(groups)
    assert len(found[0]) == len(found[1]) > 2
    for group, other in zip(found[0][:-1], found[1][:-1], strict=True):
        assert np.array_equal(group, other)
    rest = set(found[0][-1].tolist()) ^ set(found[1][-1].tolist())
    assert len(rest) < (0 if packs else max(before, after)) + 1  # the last window is not full


@pytest.mark.parametrize("targets", [10**6, 10**9, 10**12])
def test_lengths_up_to_the_longest_have_the_same_blocks(targets: int) -> None:
    """A run may become longer than planned on large data; there are at most 2^20 blocks."""
    for longest in (64, 4096, 131_072):
        block = block_size(targets, longest)
        assert block >= longest
        assert block & (block - 1) == 0
        assert targets / block <= 2**20
    assert block_size(10**9, 64) == block_size(10**9, 32_768) == 32_768
    assert block_size(10**12, 64) == 2**20
