import numpy as np
import pytest

from torchtrain.datasets.order import Mixture, permute, stream_seed


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permute_is_a_bijection(count):
    images = permute(np.arange(count), count, seed=7)
    assert sorted(images) == list(range(count))


def test_permute_of_single_indices_gives_the_same():
    images = permute(np.arange(1000), 1000, seed=7)
    assert [permute(np.array([i]), 1000, seed=7)[0] for i in range(0, 1000, 37)] == list(images[::37])


def test_permutations_of_different_seeds_are_uncorrelated():
    count = 10_000
    orders = [permute(np.arange(count), count, seed) for seed in range(3)]
    for order in orders:
        assert (order == np.arange(count)).sum() < 10
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 0.04
        # Neighbors are scattered: the mean distance of two random positions is a third of the length.
        assert abs(np.abs(np.diff(order)).mean() / count - 1 / 3) < 0.02
    assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.04


def test_permute_works_for_huge_counts():
    count = 10**15 + 37
    positions = np.arange(count - 1000, count)
    images = permute(positions, count, seed=1)
    assert len(set(images)) == 1000
    assert images.min() >= 0
    assert images.max() < count


def test_order_is_that_of_earlier_versions():
    """Otherwise a run that resumes after an update would read some data twice and some never."""
    assert stream_seed("data", 0, 0) == 12012452065450895447
    assert permute(np.arange(10), 10, 7).tolist() == [7, 3, 0, 4, 2, 6, 8, 1, 5, 9]
    assert permute(np.array([0, 1, 999_999]), 1_000_000, 7).tolist() == [435550, 73221, 647871]
    assert Mixture([2, 1]).choose(np.arange(9)).tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 1]
