"""Fused AdamW on CPUs, with a result that does not depend on how parameters are sharded."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.adamw import adamw


def padded_adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *args: Any,
    **options: Any,
) -> None:
    """Like ``torch.optim.adamw.adamw`` with ``fused``, for float32 tensors whose sizes are padded to multiples of 64.

    The fused CPU kernel rounds the last elements, which do not fill a SIMD vector, differently: without padding the
    result would depend on how a parameter is sharded.
    """
    tensors = [*params, *exp_avgs, *exp_avg_sqs]
    padded = [pad(tensor) for tensor in tensors]
    count = len(params)
    adamw(
        padded[:count],
        [pad(grad) for grad in grads],
        padded[count : 2 * count],
        padded[2 * count :],
        *args,
        **options,
    )
    for tensor, updated in zip(tensors, padded, strict=True):
        if updated is not tensor:
            tensor.copy_(updated[: tensor.numel()].view_as(tensor))


def pad(tensor: Tensor) -> Tensor:
    """``tensor`` itself if its size is a multiple of 64, otherwise a flat copy that is padded with zeros to one."""
    missing = -tensor.numel() % 64
    return nn.functional.pad(tensor.flatten(), (0, missing)) if missing else tensor
