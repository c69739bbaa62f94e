"""Gradient clipping by the global L2 norm."""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.devices import device_kind
from torchtrain.distributed.process_group import all_reduce

FLOAT64_ELEMENTS = 1 << 24  # of a gradient that exist at once


@torch.no_grad()
def clip_grad_norm(
    parts: Sequence[nn.Module], max_norm: float, copies: Sequence[nn.Parameter] = (), *, exact: bool = False
) -> Tensor:
    """Clip the gradient of all parameters to the L2 norm ``max_norm``; returns the norm before clipping.

    The parameters are DTensors. ``copies``: replicas whose gradient another pipeline stage counts. The norm, a float32
    scalar, is the same on every rank; with ``exact`` it is bitwise-identical for any number of data-parallel ranks.
    """
    gradients = {p: cast(DTensor, p.grad) for part in parts for p in part.parameters() if p.grad is not None}
    first = next(iter(gradients.values()))
    # Each element of the gradient enters once, from one rank: so one sum over all ranks serves every layout.
    own = [g for p, g in gradients.items() if _is_first_copy(g) and not any(p is copy for copy in copies)]
    # A float32 sum over a large matrix is off by 1e-5 on a CPU, by another amount for each layout. So float32 only
    # within a row, and float64 over rows: a quarter of the time of float64 throughout.
    norms = [torch.zeros(1, device=first.device), *(row_norms(gradient.to_local(), exact) for gradient in own)]
    # Where the ranks talk to each other, which under CPU offload is not where the gradients lie.
    squares = torch.cat(norms).double().square().to(first.device_mesh.device_type)
    if exact:
        total = exact_sum(squares)
    else:
        all_reduce(total := squares.sum())
    norm = total.sqrt().float().to(first.device)
    # As torch.nn.utils.clip_grads_with_norm_, but on local tensors: DTensor takes seconds to plan this product.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([gradient.to_local() for gradient in gradients.values()], factor)
    return norm


def row_norms(gradient: Tensor, exact: bool) -> Tensor:
    """Row-wise norms of a matrix; absolute values of a vector."""
    if gradient.ndim == 1:
        return gradient.abs()
    if not exact or device_kind(gradient.device.type) == "cpu":
        norms: Tensor = torch.linalg.vector_norm(gradient, dim=-1)
        return norms.flatten()
    # CUDA's kernel adds in an order that depends on the number of rows. So halve the rows by elementwise additions.
    norms_of_some = []
    for rows in torch.split(gradient, max(1, FLOAT64_ELEMENTS // gradient.shape[-1])):
        squares = rows.double().square()
        while (width := squares.shape[1]) > 1:
            halves = squares[:, : width // 2] + squares[:, -(width // 2) :]
            squares = torch.cat((halves, squares[:, width // 2 : -(width // 2)]), dim=1)
        norms_of_some.append(squares.sqrt().flatten())
    return torch.cat(norms_of_some)


def exact_sum(values: Tensor) -> Tensor:
    """Sum over all ranks of ``values`` (float64, not negative, at most 2^30 in number), bitwise identical in any order.

    Each is added as two 64-bit integers, down to 2^-64 of the largest. Infinite if one is infinite or NaN. Collective.
    """
    largest = values.nan_to_num(math.inf, posinf=math.inf).max()
    all_reduce(largest, op=dist.ReduceOp.MAX)
    scale = ((1055 - torch.frexp(largest)[1].long()) << 52).view(torch.float64)  # 2^(32 - exponent), from its bits
    coarse = (values * scale).floor()  # under 2^32
    fine = ((values * scale - coarse) * 2.0**32).round()
    sums = torch.stack((coarse.long().sum(), fine.long().sum()))
    all_reduce(sums)
    sums = sums.double()
    return torch.where(largest.isfinite(), (sums[0] + sums[1] * 2.0**-32) / scale, largest)


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same part of ``tensor``."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(
        coordinate == 0 or not placement.is_replicate()
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
