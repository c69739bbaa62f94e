"""The loss of a model that computes in grains (``grains.py``), chunk by chunk and over grains of the vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.distributed.mesh import local
from torchtrain.labels import IGNORE_INDEX
from torchtrain.models.loss import OutputLoss, exact_nats
from torchtrain.plugins.exact_sums.grain_layers import GrainOutput
from torchtrain.plugins.exact_sums.grains import Grains
from torchtrain.plugins.exact_sums.tree import all_tree_sum, tree_sum


class GrainLoss(OutputLoss):
    """``OutputLoss`` in grains. Losses of each row are rounded by ``exact_nats``, so that any sum of them is exact."""

    def __init__(self, grains: Grains, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.grains = grains

    def losses(self, hidden: Tensor, output: nn.Module, labels: Tensor) -> Tensor:
        """See ``OutputLoss``; ``hidden`` has the full sequences of this rank, the result is float64."""
        weight = output.get_parameter("weight")
        hidden, has_gradient = local(hidden), torch.is_grad_enabled()
        pieces = self.pieces(weight, labels)
        losses: Tensor = _Loss.apply(hidden, local(weight), labels, self, pieces, has_gradient, output)  # type: ignore[no-untyped-call]
        return losses

    def pieces(self, weight: Tensor, labels: Tensor) -> int:
        """Number of parts of a chunk whose logits exist at once; it must not depend on the layout."""
        bs, seq = labels.shape
        return self.chunks(torch.Size((bs, seq // len(self.grains.chunks))), weight.shape[0])

    def of_piece(self, logits: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The losses of some tokens, and their gradients.

        Args:
            logits: float32 (bs, n, vocab / V) of each tensor grain of this rank; overwritten.
            labels: int64 (bs, n).

        Returns:
            Cross-entropy and z-loss of each token, float32 (2, bs, n), 0 where it is masked; and the gradients of their
            sum, in place of the logits.
        """
        grains, size, known = self.grains, logits[0].shape[-1], labels != IGNORE_INDEX
        largest = torch.stack([part.amax(dim=-1) for part in logits]).amax(dim=0)
        if grains.tensor_group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=grains.tensor_group)
        columns = [(labels - number * size)[..., None] for number in range(grains.first, grains.first + grains.own)]
        owns = [(column >= 0) & (column < size) for column in columns]
        columns = [column.clamp(0, size - 1) for column in columns]
        parts = zip(logits, columns, owns, strict=True)
        chosen = tree_sum([torch.where(own, part.gather(-1, column), 0.0)[..., 0] for part, column, own in parts])
        exponentials = [part.sub_(largest[..., None]).exp_() for part in logits]
        sums = torch.stack((tree_sum([part.sum(dim=-1) for part in exponentials]), chosen))
        total, chosen = (sums if grains.tensor_group is None else all_tree_sum(sums, grains.tensor_group)).unbind()
        log_z = total.log() + largest
        losses = torch.stack((log_z - chosen, self.z_weight * log_z.square()))
        # Of log_z: the probabilities.
        scale = torch.where(known, (1 + 2 * self.z_weight * log_z) / total, 0.0)[..., None]
        for part, column, own in zip(exponentials, columns, owns, strict=True):
            part.mul_(scale).scatter_add_(-1, column, -(own & known[..., None]).float())
        return torch.where(known, losses, 0.0), exponentials


class _Loss(torch.autograd.Function):
    """Computes the gradients in its forward, as that of ``OutputLoss`` does, so that few logits exist at once.

    The gradients of the weight are kept by chunk until backward: they must be multiplied by that of the loss before
    they are added, because other context ranks have other chunks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss: GrainLoss,
        pieces: int,
        has_gradient: bool,
        output: nn.Module,
    ) -> Tensor:
        grains = loss.grains
        weights = weight.chunk(grains.own)  # contiguous
        by_row = torch.zeros(2, len(labels), dtype=torch.float64, device=labels.device)
        hidden_grads: list[Tensor] = []
        weight_grads: list[Tensor] = []  # (vocab / T, dim) of each chunk
        for hidden_of_chunk, labels_of_chunk in zip(grains.split(hidden), grains.split(labels), strict=True):
            products: list[Tensor] = []  # of each tensor grain
            both = (hidden_of_chunk.chunk(pieces, dim=1), labels_of_chunk.chunk(pieces, dim=1))
            for h, y in zip(*both, strict=True):
                h = h.contiguous()
                losses, grads = loss.of_piece([F.linear(h, w).float() for w in weights], y)
                by_row += exact_nats(losses.double().sum(dim=-1))
                if not has_gradient:
                    continue
                low = [grad.to(h.dtype).flatten(0, 1) for grad in grads]
                root = tree_sum(grad @ w for grad, w in zip(low, weights, strict=True))
                hidden_grads.append(root.view_as(h))
                of_piece = [grad.T @ h.flatten(0, 1) for grad in low]
                # Pieces are added in float32, because there may be many.
                products = [a.float() + b for a, b in zip(products, of_piece, strict=True)] if products else of_piece
            if has_gradient:
                weight_grads.append(torch.cat(products).to(weight.dtype))
        if has_gradient:
            hidden_grad = torch.cat(hidden_grads, dim=1)
            if grains.tensor_group is not None:
                hidden_grad = all_tree_sum(hidden_grad, grains.tensor_group)
            ctx.grains, ctx.output = grains, output
            ctx.save_for_backward(hidden_grad, *weight_grads)
            if loss.by_row is not None:
                tokens = (labels != IGNORE_INDEX).sum(dim=1).double()
                loss.by_row[-1] += torch.stack((by_row[0], tokens))
        return by_row.sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0][0]  # that of the z-loss is the same: the training loss is the sum of both
        hidden_grad, *weight_grads = ctx.saved_tensors
        weight_grad = None
        if isinstance(ctx.output, GrainOutput):
            ctx.output.weight_grads.update({i: grad * scale for i, grad in enumerate(weight_grads)})
        else:
            weight_grad = tree_sum(weight_grads[i] * scale for i in ctx.grains.leaves)
        return hidden_grad * scale, weight_grad, None, None, None, None, None
