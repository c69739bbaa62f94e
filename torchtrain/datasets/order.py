"""Data order: a seeded permutation, and a mixture of sources by weight.

Both are computed and not stored: any rank can compute any element of the order directly.
"""

import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

_ROUNDS = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, odd


def stream_seed(*parts: int | str) -> int:
    """A 64-bit seed that depends on all of ``parts``."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(indices: npt.NDArray[np.int64], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Images of ``indices``, each in ``range(count)``, under the permutation of ``range(count)`` for ``seed``.

    A Feistel network is a bijection of the numbers of an even number of bits. It is applied again to an image outside
    of ``range(count)`` until the image is inside ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002). The domain of the network is at most four times as large as the range, so a few rounds suffice.
    """
    half_bits = np.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    keys = [np.uint64(stream_seed(seed, number)) for number in range(_ROUNDS)]
    images = indices.astype(np.uint64)
    walking = np.ones(len(images), dtype=bool)
    while walking.any():
        left, right = images[walking] >> half_bits, images[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        images[walking] = (left << half_bits) | right
        walking = images >= np.uint64(count)
    return images.astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input reaches the low bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Mixture:
    """Chooses a source for each row of the batch, by weight.

    [0, 1) is divided among the sources in proportion to their weights. The source of row ``k``, counted over all steps,
    is the one whose share contains the fractional part of ``k / golden ratio``. This is the Kronecker (or Weyl)
    sequence of lowest discrepancy: after ``n`` rows the error of a source's count is of the order of log(n).
    """

    def __init__(self, weights: Sequence[float]):
        cumulative = list(itertools.accumulate(Fraction(weight) for weight in weights))
        borders = [min(int(weight / cumulative[-1] * 2**64), 2**64 - 1) for weight in cumulative[:-1]]
        self._borders = np.array(borders, dtype=np.uint64)

    def choose(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Index of the source for each of ``rows``, which are counted over all steps."""
        return np.searchsorted(self._borders, rows.astype(np.uint64) * _GOLDEN, side="right")
