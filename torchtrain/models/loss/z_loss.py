"""Cross-entropy with z-loss (PaLM, https://arxiv.org/abs/2204.02311, section 5; its weight there is 1e-4).

The z-loss keeps Z, the sum of the exponentials of a token's logits, near 1. No log-probabilities are saved for
backward, which recomputes the softmax from the logits.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def cross_entropy_with_z(logits: Tensor, labels: Tensor, z_weight: float) -> Tensor:
    """Cross-entropy and ``z_weight`` log(Z)^2 of each token, 0 where it is masked: float32, shape (2, bs * seq).

    ``logits`` (bs, seq, vocab) may be a DTensor sharded along vocab; ``labels`` (bs, seq) are negative where masked.
    """
    mesh, first = None, 0
    if isinstance(logits, DTensor):
        mesh = logits.device_mesh
        first = mesh.get_local_rank() * math.ceil(logits.shape[-1] / mesh.size())  # as DTensor shards
        logits = logits.to_local()
    function: Any = _CrossEntropyWithZ.apply
    losses: Tensor = function(logits.flatten(0, 1), labels.flatten(), z_weight, first, mesh)
    return losses


class _CrossEntropyWithZ(torch.autograd.Function):
    """``logits`` (tokens, vocab) are the shard over ``mesh`` that begins with the id ``first``; None: not sharded."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, z_weight: float, first: int, mesh: DeviceMesh | None
    ) -> Tensor:
        def over_ranks(values: Tensor, op: str) -> Tensor:
            return values if mesh is None else DTensor.from_local(values, mesh, [Partial(op)]).full_tensor()

        known, own = labels >= 0, (labels >= first) & (labels < first + logits.shape[1])
        column = torch.where(own, labels - first, 0)[:, None]
        largest = over_ranks(logits.amax(dim=1).float(), "max")
        chosen = torch.where(own, logits.gather(1, column)[:, 0].float(), 0)
        sums = torch.stack(((logits - largest[:, None]).exp_().sum(dim=1), chosen))  # float32
        total, chosen = over_ranks(sums, "sum").unbind()
        log_z = largest + total.log()
        ctx.save_for_backward(logits, log_z, known, own, column)
        ctx.z_weight = z_weight
        losses = torch.stack((log_z - chosen, z_weight * log_z.square()))
        return torch.where(known, losses, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_z, known, own, column = ctx.saved_tensors
        of_loss, of_z = grads[0].unbind()
        gradient = (logits - log_z[:, None]).exp_()  # float32
        gradient *= torch.where(known, of_loss + 2 * ctx.z_weight * of_z * log_z, 0)[:, None]
        of_label = torch.where(own, of_loss, 0)[:, None]
        if torch.compiler.is_compiling():
            # In one kernel with the rest; a scatter would write and read the float32 gradient once more.
            gradient -= torch.where(torch.arange(logits.shape[1], device=logits.device) == column, of_label, 0)
        else:
            gradient.scatter_add_(1, column, -of_label)
        return gradient.to(logits.dtype), None, None, None, None
