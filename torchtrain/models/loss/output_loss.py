"""The loss that is trained on, and a way to have it without the logits of all tokens at once."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.devices import device_kind
from torchtrain.models.loss.z_loss import cross_entropy_with_z

IGNORE_INDEX = -100  # label of a position that has no loss
# Float32 logits of a chunk, by default: on a CPU what fits its cache, which makes the loss up to twice as fast;
# elsewhere enough for matrix products at full speed.
MAX_LOGITS_BYTES_CPU = 1 << 23
MAX_LOGITS_BYTES = 1 << 30
MIN_CHUNK_TOKENS = 256  # with fewer, adding up the gradient of the output matrix takes most of the time


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the token losses in nats, a float32 scalar.

    ``logits`` (bs, seq, vocab) of any float dtype, ``labels`` (bs, seq) of int64. The sum, not the mean: the caller
    divides it by the number of unmasked tokens in the whole global batch.

    ``logits`` may be a DTensor sharded along vocab: then forward and backward must run inside torch's
    ``loss_parallel()``, which sends three numbers a token in place of the logits. Each rank gets the same sum.
    """
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX
    )
    # Not a view: FSDP does not let a model return one.
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss


def token_losses(logits: Tensor, labels: Tensor, z_weight: float = 0.0) -> Tensor:
    """``cross_entropy_sum`` and the sum of the z-losses (``z_loss.py``): float32 (2,). Their sum is trained on."""
    if z_weight:
        return cross_entropy_with_z(logits, labels, z_weight)
    loss = cross_entropy_sum(logits, labels)
    return torch.stack((loss, torch.zeros_like(loss)))


def exact_nats(loss: Tensor) -> Tensor:
    """``loss`` rounded to a multiple of 2^-20 nats, float64: sums of these are exact up to 2^33 nats, in any order."""
    return (loss.double() * 2**20).round() / 2**20


class TokenLoss(NamedTuple):
    """Scalar tensors that can be added over microbatches and ranks; of a step, those of this rank's rows."""

    total: Tensor  # float64: the sum of the token losses, in nats
    tokens: Tensor  # int64: their number
    z: Tensor | None = None  # float64: the sum of the z-losses, which are not in ``total``; None: there is no z-loss


class OutputLoss:
    """Output layer and loss in one: hidden states in, ``token_losses`` out.

    Logits are the largest tensor of a small model, and their gradient is as large. Here they exist for ``chunk_tokens``
    tokens at a time: each chunk's gradient is computed right after its loss. Value and gradient are those of the plain
    loss.
    """

    def __init__(self, chunk_tokens: int = -1, *, z_weight: float = 0.0, compile: bool = False):
        """``chunk_tokens`` (``training.loss_chunk_tokens``): -1 for what ``MAX_LOGITS_BYTES`` allows, 0 for all."""
        self.chunk_tokens = chunk_tokens
        self.z_weight = z_weight
        self.compiled = torch.compile(token_losses, fullgraph=True) if compile else token_losses

    def __call__(self, hidden: Tensor, output: nn.Module, labels: Tensor) -> Tensor:
        """``hidden`` (bs, seq, dim) and ``labels`` (bs, seq) to ``token_losses``. ``output``: a linear layer over dim.

        Call it where FSDP has gathered ``output.weight``: within the forward of the module that holds it.
        """
        weight = output.get_parameter("weight")
        ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1  # that share the vocabulary
        chunks = self.chunks(labels.shape, math.ceil(weight.shape[0] / ranks), device_kind(hidden.device.type))
        if chunks == 1:
            return self.chunk_losses(output(hidden), labels)
        if isinstance(hidden, DTensor):
            # Sequence parallelism splits along seq, as the chunks do: gather the hidden states, but never the logits.
            hidden = hidden.redistribute(placements=[Replicate()])
        if not torch.is_grad_enabled():
            parts = zip(hidden.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True)
            return torch.stack([self.chunk_losses(output(h), some) for h, some in parts]).sum(dim=0)
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, output.weight, output, labels, chunks, self.chunk_losses
        )
        return loss

    def chunk_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        # The collectives of loss_parallel cannot be compiled.
        function = token_losses if isinstance(logits, DTensor) else self.compiled
        return function(logits, labels, self.z_weight)

    def chunks(self, shape: torch.Size, vocab: int, device_type: str) -> int:
        """Number of chunks for labels of ``shape`` (bs, seq): the fewest of equal size that are small enough.

        ``vocab``: tokens of the vocabulary that one rank computes logits for.
        """
        if self.chunk_tokens == 0:
            return 1
        bs, seq = shape
        limit = MAX_LOGITS_BYTES_CPU if device_type == "cpu" else MAX_LOGITS_BYTES
        tokens = self.chunk_tokens if self.chunk_tokens > 0 else max(MIN_CHUNK_TOKENS, limit // (4 * vocab))
        fewest = min(seq, math.ceil(bs * seq / tokens))
        return next(n for n in range(fewest, seq + 1) if seq % n == 0)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients of one chunk after the other, all in forward:

        for each chunk:  h -> logits -> loss -> gradients of h and weight; then its logits are freed
        forward returns  the sum of the losses, and keeps  [gradients of h], sum of those of weight
        backward         multiplies these two by the gradient of that sum

    ``h`` is detached from the model, so that ``torch.autograd.grad`` in forward goes through the chunk alone.
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
    ) -> Tensor:
        total: Tensor | None = None
        weight_grad: Tensor | None = None
        hidden_grads = []
        for h, some_labels in zip(hidden.chunk(chunks, dim=1), labels.chunk(chunks, dim=1), strict=True):
            with torch.enable_grad():
                h = h.detach().requires_grad_()
                loss = token_losses(output(h), some_labels)
                hidden_grad, grad = torch.autograd.grad(loss.sum(), (h, weight))
            hidden_grads.append(hidden_grad)
            # In float32: many chunks add up.
            weight_grad = grad.float() if weight_grad is None else weight_grad.add_(grad)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        ctx.save_for_backward(torch.cat(hidden_grads, dim=1), weight_grad)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0][0]  # that of the z-loss is the same: their sum is trained on
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * scale, (weight_grad * scale).to(ctx.weight_dtype), None, None, None, None
