"""Layout-independent initialization of parameters.

The contract: the values of a parameter depend only on (seed, its full name, its full shape). They do not depend on the
number of ranks, the sharding of the parameter, the order in which parameters are initialized, or the device.

Implementation: each parameter has its own stream of random bits, Philox4x64 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3") with a key hashed from seed, name and shape. Philox is counter-based, so that element i of
the flattened parameter can be generated without the elements before it: a rank only generates the blocks that contain
its rows. Values are computed on the CPU in whole blocks of one fixed size, because vectorized functions may round the
remaining elements at the end of an array differently.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from torchtrain.models.parameters import full_name, local_block

BLOCK = 1 << 15  # elements; the fewest that torch gives to a thread
BLOCKS_IN_FLIGHT = 256  # at most 32 MiB of float32, for parameters of any size
BLOCKS_OF_A_TASK = 8

# Transforms float32 blocks of uniform values in (0, 1) to another distribution, in place.
Transform = Callable[[Tensor], Tensor]


@contextmanager
def layout_independent_init(model_parts: Sequence[nn.Module], seed: int) -> Iterator[None]:
    """Context manager in which ``torch.nn.init`` initializes ``model_parts`` independently of the layout.

    So ``init_weights`` can be written as for a single rank. Within the context, functions of ``torch.nn.init`` are
    patched in the entire process; they look up a parameter's name by its identity, and a tensor that is not a parameter
    of ``model_parts`` raises AssertionError.

    ``normal_``, ``trunc_normal_`` and ``uniform_`` follow the contract of this module. Functions that draw no random
    numbers are unchanged; other random ones raise NotImplementedError. ``model_parts``: a model, or the pipeline stages
    of this rank.
    """
    names = {id(parameter): full_name(name) for part in model_parts for name, parameter in part.named_parameters()}

    def fill(tensor: Tensor, transform: Transform) -> Tensor:
        assert id(tensor) in names, "only parameters of the model can be initialized by name"
        fill_parameter(tensor, transform, seed, names[id(tensor)])
        return tensor

    def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return fill(tensor, lambda u: normal_quantile(u).mul_(std).add_(mean))

    def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
        return fill(tensor, lambda u: u.mul_(b - a).add_(a))

    def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
        low, high = (normal_cdf((bound - mean) / std) for bound in (a, b))
        return fill(tensor, lambda u: normal_quantile(u.mul_(high - low).add_(low)).mul_(std).add_(mean).clamp_(a, b))

    def reject(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("use normal_, trunc_normal_ or uniform_ in init_weights: others depend on the layout")

    others = ("kaiming_normal_", "kaiming_uniform_", "orthogonal_", "sparse_", "xavier_normal_", "xavier_uniform_")
    replacements: dict[str, Any] = dict.fromkeys(others, reject)
    replacements |= {"normal_": normal_, "uniform_": uniform_, "trunc_normal_": trunc_normal_}
    with patch.multiple(nn.init, **replacements):
        yield


def normal_cdf(x: float) -> float:
    """Cumulative distribution function of the standard normal distribution."""
    return (1.0 + math.erf(x / math.sqrt(2.0))) / 2.0


def normal_quantile(u: Tensor) -> Tensor:
    """Quantile function (inverse CDF) of the standard normal distribution, for ``u`` in (0, 1); overwrites ``u``."""
    return u.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2.0))


@torch.no_grad()
def fill_parameter(parameter: Tensor, transform: Transform, seed: int, name: str) -> None:
    """Initialize this rank's part of ``parameter`` (a tensor or DTensor) from the random stream of ``name``."""
    if parameter.is_meta:
        return
    shape = tuple(parameter.shape)
    local, (own_rows, *columns) = local_block(parameter)
    if local.numel() == 0:
        return
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{shape}".encode(), digest_size=16).digest(), "little")
    row_size = math.prod(shape[1:])
    rows_at_once = max(1, BLOCK * BLOCKS_IN_FLIGHT // row_size)
    # torch's number of threads is that of all cores for a single process, and OMP_NUM_THREADS under torchrun.
    threads = min(torch.get_num_threads(), os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        for row in range(0, len(local), rows_at_once):
            rows = min(rows_at_once, len(local) - row)
            first = (own_rows.start + row) * row_size
            values = stream(key, first, first + rows * row_size, transform, pool).view(rows, *shape[1:])
            local[row : row + rows].copy_(values[(slice(None), *columns)])


def stream(key: int, start: int, stop: int, transform: Transform, pool: ThreadPoolExecutor) -> Tensor:
    """Elements ``start`` to ``stop`` of the random stream of ``key``, as float32; generated in full blocks."""
    first, end = start // BLOCK, (stop - 1) // BLOCK + 1
    values = torch.empty(end - first, BLOCK, dtype=torch.float32)  # whatever the default dtype is

    def draw(blocks: Tensor, number: int) -> None:
        # A counter yields four 64-bit words, that is, 8 values. Unlike ``random_raw``, ``random`` lets other threads of
        # Python run.
        bit_generator = np.random.Philox(key=key, counter=number * (BLOCK // 8))
        np.random.Generator(bit_generator).random(dtype=np.float32, out=blocks.view(-1).numpy())

    parts = torch.split(values, BLOCKS_OF_A_TASK)
    list(pool.map(draw, parts, range(first, end, BLOCKS_OF_A_TASK)))
    # torch divides the elements evenly among its threads, but gives none of them less than a block. So each of these
    # parts is divided at the borders of blocks.
    threads = torch.get_num_threads()
    for part in torch.split(values, [len(values) // threads * threads, len(values) % threads]):
        # ``random`` divides the upper 24 bits of 32 by 2^24; of these, each value uses 23 bits n: (n + 0.5) / 2^23 is
        # exact, and never 0 or 1.
        transform(part.mul_(2.0**23).floor_().add_(0.5).mul_(2.0**-23))
    return values.view(-1)[start - first * BLOCK : stop - first * BLOCK]
