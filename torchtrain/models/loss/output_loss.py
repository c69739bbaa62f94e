"""Cross-entropy loss, and a chunked version fused with the output layer that never materializes all logits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.labels import IGNORE_INDEX
from torchtrain.models.loss.z_loss import cross_entropy_with_z

MIN_CHUNK_TOKENS = 256  # with fewer, accumulating the gradient of the output matrix dominates


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy of all unmasked tokens, in nats, as a float32 scalar.

    ``logits`` have the shape (bs, seq, vocab) and any float dtype, ``labels`` (bs, seq) and int64. It is the sum, not
    the mean: the caller divides it by the number of unmasked tokens in the global batch.

    ``logits`` may be a DTensor sharded along vocab: then forward and backward must run inside torch's
    ``loss_parallel()``, which communicates three numbers per token instead of the logits. Each rank gets the same sum.
    """
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX
    )
    # clone, because FSDP does not allow a model to return a view.
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss


def token_losses(logits: Tensor, labels: Tensor, z_weight: float = 0.0) -> Tensor:
    """Sums of cross-entropy and of z-loss (``z_loss.py``): float32, shape (2,). The training loss is their total."""
    if z_weight:
        return cross_entropy_with_z(logits, labels, z_weight).sum(dim=1)
    loss = cross_entropy_sum(logits, labels)
    return torch.stack((loss, torch.zeros_like(loss)))


def token_losses_by_row(logits: Tensor, labels: Tensor, z_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """Like ``token_losses``, and the cross-entropy of each row: float64, shapes (2,) and (bs,).

    Each row's loss is rounded by ``exact_nats``, so that the first element is exactly the sum of the rows. It differs
    from that of ``token_losses`` by the rounding of a float32 sum. The gradients are the same.
    """
    if z_weight:
        loss, z_loss = cross_entropy_with_z(logits, labels, z_weight)
    else:
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
        )
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        z_loss = torch.zeros_like(loss)
    by_row = loss.double().view(labels.shape).sum(dim=1)
    rounded = exact_nats(by_row.detach())
    # The value of the rounded rows, and the gradient of the others.
    total = by_row.sum() + (rounded.sum() - by_row.detach().sum())
    return torch.stack((total, z_loss.double().sum())), rounded


def exact_nats(loss: Tensor) -> Tensor:
    """Round ``loss`` to a multiple of 2^-20 nats, as float64. Sums of such values are exact up to 2^33 nats."""
    return (loss.double() * 2**20).round() / 2**20


class TokenLoss(NamedTuple):
    """Summed token losses of this rank's rows, as scalar tensors that can be added over microbatches and ranks."""

    total: Tensor  # float64: the sum of the token losses, in nats, without z-loss
    tokens: Tensor  # int64: the number of unmasked tokens
    z: Tensor | None = None  # float64: the sum of the z-losses; None: z-loss is off


class OutputLoss:
    """Output layer and loss in chunks: maps hidden states to ``token_losses``.

    Logits are the largest tensor of a small model, and their gradient has the same size. Here they are materialized for
    only ``chunk_tokens`` tokens at a time: the gradient of each chunk is computed directly after its loss. Value and
    gradient are those of the loss without chunks.
    """

    max_logits_bytes: int = 1 << 30
    """Default size of the float32 logits of a chunk: large enough for matrix products at full speed on a GPU."""

    def __init__(
        self, chunk_tokens: int = -1, *, z_weight: float = 0.0, compile: bool = False, split_backward: bool = False
    ):
        """``chunk_tokens`` (``training.loss_chunk_tokens``): -1: limited by ``max_logits_bytes``; 0: no chunks.

        ``split_backward``: whether backward runs twice, for the gradients of activations and then of parameters.
        """
        self.chunk_tokens = chunk_tokens
        self.z_weight = z_weight
        self.split_backward = split_backward
        self.compiled = torch.compile(token_losses, fullgraph=True) if compile else token_losses
        self.compiled_by_row = torch.compile(token_losses_by_row, fullgraph=True) if compile else token_losses_by_row
        self.by_row: list[Tensor] | None = None
        """If it is a list, each call with gradients appends the sums of losses and the numbers of unmasked tokens of
        its rows, float64 (2, bs). The sum of the losses is then exactly what ``exact_nats`` makes of the result."""

    def __call__(self, hidden: Tensor, output: nn.Module, labels: Tensor) -> Tensor:
        """Return ``token_losses`` for ``hidden`` (bs, seq, dim), ``labels`` (bs, seq) and the linear layer ``output``.

        Call it while FSDP has ``output.weight`` unsharded: within the forward of the model, after the final norm.
        """
        if self.by_row is not None and torch.is_grad_enabled():
            self.by_row.append(torch.zeros(2, len(labels), dtype=torch.float64, device=labels.device))
        return self.losses(hidden, output, labels)

    def losses(self, hidden: Tensor, output: nn.Module, labels: Tensor) -> Tensor:
        """The result of a call. A subclass overrides this, not ``__call__``, which tools replace to observe losses."""
        weight = output.get_parameter("weight")
        ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1  # that shard the vocabulary
        chunks = self.chunks(labels.shape, math.ceil(weight.shape[0] / ranks))
        if chunks == 1:
            return self.chunk_losses(output(hidden), labels)
        if isinstance(hidden, DTensor):
            # Sequence parallelism shards seq, along which chunks are split: gather the hidden states, not the logits.
            hidden = hidden.redistribute(placements=[Replicate()])
        if not torch.is_grad_enabled():
            parts = zip(hidden.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
            return torch.stack([self.chunk_losses(output(h), some) for h, some in parts]).sum(dim=0)
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, output.weight, output, labels, chunks, self.chunk_losses, self.keeps_logits_grad(output, labels)
        )
        return loss

    def keeps_logits_grad(self, output: nn.Module, labels: Tensor) -> bool:
        """Whether to keep the gradients of the logits until backward, instead of adding gradients of the weight.

        They take at most as much memory as a float32 gradient of the weight.
        """
        weight = output.get_parameter("weight")
        is_linear = type(output) is nn.Linear and output.bias is None
        fits = labels.numel() * weight.itemsize <= 4 * weight.shape[1]
        return is_linear and fits and not self.split_backward  # it would compute the gradient of the weight twice

    def chunk_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        # The collectives of loss_parallel cannot be compiled.
        is_sharded = isinstance(logits, DTensor)
        if self.by_row is None or not torch.is_grad_enabled():
            return (token_losses if is_sharded else self.compiled)(logits, labels, self.z_weight)
        losses, rows = (token_losses_by_row if is_sharded else self.compiled_by_row)(logits, labels, self.z_weight)
        self.by_row[-1] += torch.stack((rows, (labels != IGNORE_INDEX).sum(dim=1).double()))
        return losses

    def chunks(self, shape: torch.Size, vocab: int) -> int:
        """Number of chunks for labels of ``shape`` (bs, seq): the smallest that divides seq and respects the limit.

        ``vocab`` is the number of logits per token that one rank computes.
        """
        if self.chunk_tokens == 0:
            return 1
        bs, seq = shape
        by_default = max(MIN_CHUNK_TOKENS, self.max_logits_bytes // (4 * vocab))
        tokens = self.chunk_tokens if self.chunk_tokens > 0 else by_default
        fewest = min(seq, math.ceil(bs * seq / tokens))
        return next(n for n in range(fewest, seq + 1) if seq % n == 0)


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function that computes loss and gradients chunk by chunk in its forward:

        for each chunk:  h -> logits -> loss -> gradients of h and of logits or weight; then its logits are freed
        forward returns  the sum of the losses, and saves  [gradients of h], and [gradients of logits] or the sum of the
                         gradients of weight
        backward         multiplies both by the gradient of that sum

    With ``keeps_logits_grad``, backward computes the gradient of weight as one product, instead of adding a matrix of
    this size for each chunk. ``h`` is detached from the model, so that ``torch.autograd.grad`` in forward
    differentiates only the chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        output: nn.Module,
        labels: Tensor,
        chunks: int,
        token_losses: Callable[[Tensor, Tensor], Tensor],
        keeps_logits_grad: bool,
    ) -> Tensor:
        total: Tensor | None = None
        weight_grad: Tensor | None = None
        logits_grad: Tensor | None = None  # (bs, seq, vocab), of this rank's shard of the vocabulary
        hidden_grads = []
        for i, (h, some_labels) in enumerate(
            zip(hidden.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
        ):
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                logits = output(h)
                loss = token_losses(logits, some_labels)
                hidden_grad, grad = torch.autograd.grad(loss.sum(), (h, logits if keeps_logits_grad else weight))
            hidden_grads.append(hidden_grad)
            if keeps_logits_grad:
                grad = _local(grad)
                if logits_grad is None:
                    logits_grad = grad.new_empty(*labels.shape, grad.shape[-1])
                logits_grad.chunk(chunks, dim=1)[i].copy_(grad)
            else:
                # Accumulated in float32, because there may be many chunks.
                weight_grad = grad.float() if weight_grad is None else weight_grad.add_(grad)
            total = loss.detach() if total is None else total + loss.detach()
            del logits, grad  # before those of the next chunk are allocated
        assert total is not None
        kept_hidden = hidden if keeps_logits_grad else None
        ctx.save_for_backward(torch.cat(hidden_grads, dim=1), weight, kept_hidden, logits_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0][0]  # that of the z-loss is the same: the training loss is the sum of both
        hidden_grad, weight, hidden, logits_grad, weight_grad = ctx.saved_tensors
        if logits_grad is None:
            weight_grad = (weight_grad * scale).to(weight.dtype)
        else:
            # The hidden states are scaled instead of the product, because they are much smaller.
            product = logits_grad.flatten(0, 1).T @ (_local(hidden) * scale).flatten(0, 1)
            weight_grad = _like(weight, product)
        return hidden_grad * scale, weight_grad, None, None, None, None, None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """The tensor with the layout of ``parameter`` whose part of this rank is ``shard``."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
