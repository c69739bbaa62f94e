"""The layers of a model that computes in grains (``grains.py``), and the sums over grains between them.

A parameter that all grains use is handed to them by one function, whose backward adds their gradients in a tree:
autograd would add them in the order in which backward comes to them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.distributed.mesh import local
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import attend
from torchtrain.parallelisms.context_parallel import (
    ContextParallelAttention,
    attention_to_the_end,
    whole_sequence,
)
from torchtrain.plugins.exact_sums.grains import Grains
from torchtrain.plugins.exact_sums.tree import all_tree_sum, of_all_ranks, scatter_tree_sum, tree_sum

# Sums over tensor grains


def sum_tensor_grains(parts: Sequence[Tensor], grains: Grains) -> Tensor:
    """The sum of ``parts`` (bs, seq, ...) over all tensor grains, or with sequence parallelism this rank's slice."""
    root = tree_sum(parts)
    if grains.tensor_group is None:
        return root
    if grains.sharded:
        return scatter_tree_sum(grains.slices(root), grains.tensor_group).flatten(1, 2)
    return all_tree_sum(root, grains.tensor_group)


class ToTensorGrains(torch.autograd.Function):
    """The residual stream for each tensor grain of this rank; the gradient is the sum of all grains'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grains: Grains) -> tuple[Tensor, ...]:
        ctx.grains = grains
        x = grains.gather(x)
        return tuple(x.view_as(x) for _ in range(grains.own))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_tensor_grains(grads, ctx.grains), None


class SumOfTensorGrains(torch.autograd.Function):
    """The residual stream that is the sum over all tensor grains."""

    @staticmethod
    def forward(ctx: Any, grains: Grains, *parts: Tensor) -> Tensor:
        ctx.grains = grains
        total = sum_tensor_grains(parts, grains)
        return total.view_as(total) if total is parts[0] else total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = ctx.grains.gather(grads[0])
        return None, *(whole for _ in range(ctx.grains.own))


class ToFullSequence(torch.autograd.Function):
    """The full residual stream on each tensor rank, where all of them then compute the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grains: Grains) -> Tensor:
        ctx.grains = grains
        return grains.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.grains.own_slice(grads[0]), None


class ByTensorGrains:
    """The forward of a module with column- and row-wise linear layers: the sum of what its tensor grains compute."""

    def __init__(self, forward: Callable[..., Tensor], layers: Sequence["GrainLinear | GrainHeadNorm"], grains: Grains):
        self.forward, self.layers, self.grains = forward, layers, grains

    def __call__(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        for layer in self.layers:
            layer.divide()
        try:
            outs = self.of_own_grains(x, *args, **options)
        finally:  # a recomputation for activation checkpointing ends by an exception
            for layer in self.layers:
                layer.free()
        return SumOfTensorGrains.apply(self.grains, *outs)  # type: ignore[no-any-return, no-untyped-call]

    def of_own_grains(self, x: Tensor, *args: Any, **options: Any) -> list[Tensor]:
        """What the tensor grains of this rank compute."""
        outs = []
        inputs: Sequence[Tensor] = ToTensorGrains.apply(x, self.grains)  # type: ignore[no-untyped-call]
        for number, own in enumerate(inputs):
            for layer in self.layers:
                layer.grain = number
            out = self.forward(own, *args, **options)
            if not any(out is layer.result for layer in self.layers if isinstance(layer, GrainLinear)):
                raise ConfigError(
                    f"[grains] adds what the tensor grains of {self.layers[0].parent} return, which must be what its "
                    "row-wise linear layer returns, not a function of it: move that function out of the module into "
                    "its block, or set grains.tensor = 1 and grains.context = 1"
                )
            outs.append(out)
        return outs


# Linear layers


class ChunkedLinear(torch.autograd.Function):
    """A linear layer, chunk by chunk; the gradients of weight and bias are the sums of all chunks' on this rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grains: Grains) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grains, ctx.has_bias = grains, bias is not None
        return torch.cat([F.linear(part, weight, bias) for part in grains.split(x)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grains: Grains = ctx.grains
        inputs, outputs = ([part.flatten(0, 1) for part in grains.split(whole)] for whole in (x, grads[0]))
        grad_x = torch.cat([(grad @ weight).view(len(x), -1, weight.shape[1]) for grad in outputs], dim=1)
        grad_weight = tree_sum(outputs[i].T @ inputs[i] for i in grains.leaves)
        grad_bias = tree_sum(outputs[i].sum(dim=0) for i in grains.leaves) if ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None


def split_weight(weight: Tensor, grains: Grains, dim: int) -> list[Tensor]:
    """This rank's shard of a weight, divided among its tensor grains. Copies, because strides change bits."""
    return [part.contiguous() for part in local(weight).chunk(grains.own, dim)]


class GrainLinear(nn.Linear):
    """A linear layer of a block, computed for one tensor grain at a time, and chunk by chunk.

    ``style`` is that of ``ModelSpec.linear_layers``.
    """

    def __init__(self, layer: nn.Linear, parent: str, style: str, grains: Grains):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.parent, self.grains, self.dim = parent, grains, 0 if style == "colwise" else 1
        self.grain = 0  # the number, among those of this rank, of the tensor grain that is computed
        self.weights: Sequence[Tensor] = ()  # of all grains of this rank
        self.biases: Sequence[Tensor] | None = None
        self.result: Tensor | None = None  # of a row-wise layer

    def divide(self) -> None:
        """Prepare the weights of all grains, before the forward of the first one."""
        self.weights = split_weight(self.weight, self.grains, self.dim)
        self.biases = None if self.bias is None else split_weight(self.bias, self.grains, 0)

    def free(self) -> None:
        self.weights, self.biases, self.result = (), None, None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weights[self.grain], None if self.biases is None else self.biases[self.grain]
        if len(self.grains.chunks) == 1:
            out = F.linear(x, weight, bias)
        else:
            out = ChunkedLinear.apply(x, weight, bias, self.grains)  # type: ignore[no-untyped-call]
        if self.dim == 1:
            self.result = out
        return out


# Norms


class NormWeights(torch.autograd.Function):
    """The weight of a norm for each of ``count`` parts of each chunk.

    ``over_ranks``: whether other tensor ranks have other parts of a chunk, so that their gradients are added, too. The
    reducer adds those of other context ranks.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, grains: Grains, count: int, over_ranks: bool) -> tuple[Tensor, ...]:
        ctx.grains, ctx.count, ctx.over_ranks = grains, count, over_ranks
        return tuple(weight.view_as(weight) for _ in range(count * len(grains.chunks)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grains, count = ctx.grains, ctx.count
        by_chunk = torch.stack([tree_sum(grads[i : i + count]) for i in range(0, len(grads), count)])
        if ctx.over_ranks:
            by_chunk = all_tree_sum(by_chunk, grains.tensor_group)
        return tree_sum(by_chunk[i] for i in grains.leaves), None, None, None


class GrainNorm(nn.RMSNorm):
    """A norm of the residual stream, in V parts of each chunk: a rank of V has one under sequence parallelism."""

    def __init__(self, norm: nn.RMSNorm, grains: Grains, *, is_last: bool):
        """``is_last``: whether it is the final norm, which returns the full sequences of a rank."""
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight
        self.grains, self.is_last = grains, is_last

    def forward(self, x: Tensor) -> Tensor:
        grains = self.grains
        count = grains.own if grains.sharded else grains.tensor
        weights = NormWeights.apply(local(self.weight), grains, count, grains.sharded)  # type: ignore[no-untyped-call]
        parts = zip(x.chunk(count * len(grains.chunks), dim=1), weights, strict=True)
        out = torch.cat(
            [F.rms_norm(part.contiguous(), self.normalized_shape, weight, self.eps) for part, weight in parts], dim=1
        )
        if not self.is_last or grains.tensor_group is None:
            return out
        whole = ToFullSequence.apply(out, grains)  # type: ignore[no-untyped-call]
        return DTensor.from_local(whole, grains.mesh.tensor, [Replicate()], run_check=False)


class GrainHeadNorm(nn.RMSNorm):
    """A norm of each head (QK norm), computed for one tensor grain at a time, and chunk by chunk."""

    def __init__(self, norm: nn.RMSNorm, parent: str, grains: Grains):
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = norm.weight
        self.parent, self.grains, self.grain = parent, grains, 0
        self.weights: Sequence[Tensor] = ()  # of all grains of this rank

    def divide(self) -> None:
        """Prepare the weights of all grains, before the forward of the first one."""
        grains = self.grains
        over_ranks = grains.tensor_group is not None
        self.weights = NormWeights.apply(local(self.weight), grains, grains.own, over_ranks)  # type: ignore[no-untyped-call]

    def free(self) -> None:
        self.weights = ()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights[self.grain :: self.grains.own]  # those of the chunks
        parts = zip(self.grains.split(x), weights, strict=True)
        return torch.cat([F.rms_norm(part, self.normalized_shape, w, self.eps) for part, w in parts], dim=1)


# The embedding


class ShardedEmbedding(torch.autograd.Function):
    """An embedding whose rows are sharded over the tensor ranks; the result is this rank's part of the residual
    stream."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, grains: Grains, output: "GrainOutput | None") -> Tensor:
        ctx.grains, ctx.rows, ctx.output = grains, len(weight), output
        first = grains.rank * len(weight)
        own = (tokens >= first) & (tokens < first + len(weight))
        # Other tokens get a row of their own in backward, which is then dropped.
        ctx.save_for_backward(torch.where(own, tokens - first, len(weight)))
        if grains.tensor_group is None:
            return F.embedding(tokens, weight)
        out = torch.where(own[..., None], F.embedding(torch.where(own, tokens - first, 0), weight), 0)
        # One rank has the row, and the others zeros. As integers their sum has its bits, also those of -0.
        bits = out.view(torch.int32)
        if grains.sharded:
            bits = scatter_tree_sum(grains.slices(bits), grains.tensor_group).flatten(1, 2)
        else:
            dist.all_reduce(bits, group=grains.tensor_group)
        return bits.view(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        grains: Grains = ctx.grains
        chunks = list(zip(grains.split(grains.gather(grads[0])), grains.split(rows), strict=True))

        def gradient(chunk: int) -> Tensor:
            grad, index = chunks[chunk]
            padded: Tensor = torch.ops.aten.embedding_dense_backward(grad, index, ctx.rows + 1, ctx.rows, False)
            own = padded[: ctx.rows]
            return own if ctx.output is None else own + ctx.output.weight_grads.pop(chunk)

        return None, tree_sum(map(gradient, grains.leaves)), None, None


class GrainEmbedding(nn.Embedding):
    """The token embedding."""

    def __init__(self, embedding: nn.Embedding, grains: Grains, output: "GrainOutput | None"):
        """``output``: the output layer, if it has the same weight."""
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, device="meta")
        self.weight, self.grains = embedding.weight, grains
        self.outputs = () if output is None else (output,)  # a tuple, so that it is not a child

    def forward(self, tokens: Tensor) -> Tensor:
        output = self.outputs[0] if self.outputs else None
        out: Tensor = ShardedEmbedding.apply(tokens, local(self.weight), self.grains, output)  # type: ignore[no-untyped-call]
        return out


class GrainOutput(nn.Linear):
    """An output layer with the weight of the embedding (tied embeddings).

    The gradients of both uses are added chunk by chunk, and then over chunks: other context ranks have other chunks. So
    the backward of the loss stores its gradients here, by chunk, and the later backward of the embedding adds them.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.weight_grads: dict[int, Tensor] = {}


# Attention


class ToChunks(torch.autograd.Function):
    """Keys and values (2, bs, kv_heads, seq / n, head_dim) of all n context ranks, for each chunk of queries."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, grains: Grains) -> tuple[Tensor, ...]:
        ctx.grains, whole, group = grains, own, grains.context_group
        if group is not None:
            whole = whole_sequence(of_all_ranks(own, group))
        return tuple(whole.view_as(whole) for _ in grains.chunks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grains: Grains = ctx.grains
        total, group = tree_sum(grads[i] for i in grains.leaves), grains.context_group
        if group is not None:
            chunks = total.chunk(2 * group.size(), dim=3)
            of_ranks = [torch.cat((chunks[rank], chunks[-1 - rank]), dim=3) for rank in range(group.size())]
            total = scatter_tree_sum(torch.stack(of_ranks), group)
        return total, None


class GrainAttention(ContextParallelAttention):
    """Attention of each chunk of queries of this rank over the keys and values of the full sequence."""

    def __init__(self, grains: Grains, *, flash: bool):
        super().__init__(grains.mesh.context, flash=flash)
        self.grains = grains

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        """See ``ContextParallelAttention``."""
        everywhere = ToChunks.apply(torch.stack((k, v)), self.grains)  # type: ignore[no-untyped-call]
        count = len(self.grains.chunks)
        masks = [None] * count if mask is None else [part.contiguous() for part in mask.chunk(count, dim=2)]
        outs, size = [], q.shape[2] // count
        for chunk, queries, own, keys in zip(self.grains.chunks, q.chunk(count, dim=2), masks, everywhere, strict=True):
            (k, v), end = keys.unbind(), (chunk + 1) * size
            if own is None:
                out = attention_to_the_end(queries.contiguous(), k[:, :, :end], v[:, :, :end], flash=self.flash)
            else:
                out = attend(queries.contiguous(), k, v, own)
            outs.append(out)
        return torch.cat(outs, dim=2)
