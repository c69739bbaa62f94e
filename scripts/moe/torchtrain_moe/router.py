"""The router of a layer, its losses, and what is counted of it.

Every number that is summed over tokens is a sum over all tokens of the global batch: its summands are added over
microbatches and ranks, and divided by the number of all tokens, which is known before. So neither a loss nor a metric
depends on the layout or on microbatches.

Shapes in comments: bs, seq = sequences and tokens of this rank's part of them, E = experts, k = experts per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchtrain_moe.config import MoEConfig
from torchtrain_moe.experts import count_experts


@dataclass(frozen=True)
class Batch:
    """The global batch, as a router must know it.

    ``sequences``: rows of the global batch. ``sequence_parts``: over how many ranks the tokens of a sequence are
    divided, the ranks of ``sequence_groups``.
    """

    sequences: int
    sequence_parts: int = 1
    sequence_groups: Sequence[dist.ProcessGroup] = ()


class Router(nn.Module):
    """Chooses the experts of each token, and the weights of their outputs.

    Probabilities are a softmax over all experts; the ``top_k`` largest ones are the weights, divided by their sum if
    ``normalize_top_k``.

    Attributes:
        batch: the global batch, if losses are to be computed; set by ``parallelize``.
        totals: what was counted in this step, a float64 vector: for each expert the tokens that chose
            it, and the sum of its probabilities; then the sums of the entropies, of the squares of log-sum-exp and of
            the sequences' balance losses; then the rows that this rank's experts have computed.
        last: the ``totals`` of all ranks in the last step.
        load: for each expert its share of the choices in the step before, with ``batch_balance_weight``.
        bias: added to the probabilities only to choose experts, with ``bias_rate``.
    """

    load: Tensor
    bias: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.batch: Batch | None = None
        self.weight_grad: Any = None  # under tensor parallelism, the placement of the weight's gradient on a rank
        self.totals: Tensor | None = None
        self.last: Tensor | None = None
        # Persistent buffers are in checkpoints: the next step depends on them.
        if config.batch_balance_weight:
            self.register_buffer("load", torch.empty(config.n_experts))
        if config.bias_rate:
            self.register_buffer("bias", torch.empty(config.n_experts))

    def init_buffers(self) -> None:
        """As if the loads had been equal."""
        if self.config.batch_balance_weight:
            self.load.fill_(1 / self.config.n_experts)
        if self.config.bias_rate:
            self.bias.zero_()

    def shard(self, mesh: DeviceMesh, *, sharded_input: bool) -> None:
        """Replicate the weight over ``mesh``, on the meta device; ``sharded_input``: each rank routes other tokens."""
        self.weight_grad = Partial() if sharded_input else Replicate()
        self.weight = nn.Parameter(DTensor.from_local(self.weight.detach(), mesh, [Replicate()], run_check=False))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (bs, seq, E) of ``x`` (bs, seq, dim), in float32."""
        weight = self.weight
        if self.weight_grad is not None:
            assert isinstance(weight, DTensor)
            weight = weight.to_local(grad_placements=[self.weight_grad])
        return F.linear(x, weight).float()

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities (bs, seq, E); the chosen experts (bs, seq, k) and their weights."""
        probabilities = logits.softmax(-1)
        ranked = probabilities.detach() + self.bias if self.config.bias_rate else probabilities.detach()
        chosen = ranked.topk(self.config.top_k).indices
        weights = probabilities.gather(-1, chosen)
        if self.config.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        return probabilities, chosen, weights

    def with_losses(self, weights: Tensor, logits: Tensor, probabilities: Tensor, chosen: Tensor, rows: int) -> Tensor:
        """``weights``, whose backward also adds the gradients of the router's losses, and counts this microbatch.

        ``rows``: those that this rank's experts have computed.

        So the losses need no way to the end of the model, which may be on another pipeline stage, and a forward that is
        repeated, or has no backward, is not counted.
        """
        if self.batch is None or not weights.requires_grad:
            return weights
        config, (_, seq, experts) = self.config, logits.shape
        length = seq * self.batch.sequence_parts
        tokens = self.batch.sequences * length
        log_sums = logits.logsumexp(-1)
        by_sequence = probabilities.sum(1)  # (bs, E)
        squares = log_sums.square().sum()
        loss = torch.zeros((), device=logits.device)
        balance = loss
        if config.z_weight:
            loss = loss + config.z_weight * squares / tokens
        if config.batch_balance_weight:
            loss = loss + config.batch_balance_weight * experts * (self.load * by_sequence.sum(0)).sum() / tokens
        if config.sequence_balance_weight:
            counts = torch.stack([count_experts(row, experts) for row in chosen])  # (bs, E)
            for group in self.batch.sequence_groups:
                dist.all_reduce(counts, group=group)
            # The gradient of a mean over ranks is that of its summands: only the counts need the other ranks.
            shares = counts / (length * config.top_k)
            balance = experts * (shares * by_sequence).sum() / length
            loss = loss + config.sequence_balance_weight * balance / self.batch.sequences
        entropies = -(probabilities * (logits - log_sums[..., None])).sum()
        sums = torch.stack((entropies, squares, balance, logits.new_tensor(rows))).detach().double()
        counted = torch.cat((count_experts(chosen, experts), by_sequence.detach().sum(0).double(), sums))

        def count() -> None:
            self.totals = counted if self.totals is None else self.totals + counted

        return WithLoss.apply(weights, loss / config.n_layers, count)  # type: ignore[no-any-return]

    def finish_step(self, totals: Tensor, tensor_degree: int, skip: Tensor) -> None:
        """Let the state follow ``totals``, of all ranks of the pipeline stage, unless the scalar ``skip`` is not 0."""
        # Tensor-parallel ranks compute rows of the same tokens, and route them all unless each has tokens of its own.
        repeats = 1 if self.weight_grad == Partial() else tensor_degree
        totals = torch.cat((totals[:-1] / repeats, totals[-1:] / tensor_degree))
        loads = totals[: self.config.n_experts]
        self.last = totals
        # The host does not know ``skip``, and does not wait for it.
        if self.config.batch_balance_weight:
            self.load.copy_(torch.where(skip > 0, self.load, (loads / loads.sum()).float()))
        if self.config.bias_rate:
            change = self.config.bias_rate * (loads.mean() - loads).sign().float()
            self.bias.add_(torch.where(skip > 0, 0, change))


class WithLoss(torch.autograd.Function):
    """Returns ``x``. Its backward gives ``loss`` the gradient 1, and calls ``then``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return grads[0], *ctx.saved_tensors, None
