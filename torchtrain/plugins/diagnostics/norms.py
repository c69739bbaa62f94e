"""Norms of gradients, weights and updates by layer, and the size of each block's output and attention logits."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.agreement import gather_from_all_ranks
from torchtrain.distributed.mesh import local
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import TokenLoss
from torchtrain.models.parameters import full_name
from torchtrain.optimizers.clipping import is_first_replica
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.plugins.diagnostics.attention_logits import AttentionLogits

KINDS = ("grad", "weight", "update")


def layer_of(name: str) -> str:
    """The layer of the parameter ``name``: ``layers.3``, or the module outside of the blocks, such as ``output``."""
    parts = full_name(name).split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


class NormsByLayer(Hook):
    """Every ``freq`` steps, computes the L2 norms of each layer's gradient, weights and update, on any layout.

    The gradient is that before clipping, the weights are those after the update. Such a step holds a copy of this
    rank's shards of the parameters. It also computes the root mean square of each block's output over all tokens of the
    step. Hooks of a block run outside of its compiled code, which does not change. Of blocks that are not compiled, it
    also computes the root mean square and the maximum of the attention logits (``AttentionLogits``).

    Args:
        report: called on all ranks with the step and the norms by name, such as ``norm_grad_layers.3`` and
            ``rms_output_layers.3``.
        is_compiled: blocks are compiled.
        group: all ranks, for messages from the CPU; None: the default group.
    """

    def __init__(
        self,
        model: ParallelModel,
        freq: int,
        report: Callable[[int, dict[str, float]], None],
        group: dist.ProcessGroup | None = None,
        *,
        is_compiled: bool = False,
    ) -> None:
        self.freq = freq
        self.report = report
        self.device = model.device
        self.replicas = model.mesh.replicas
        tied = model.pipeline.tied_replicas if model.pipeline is not None else []
        own = [
            (layer_of(name), parameter)
            for part in model.model_parts
            for name, parameter in part.named_parameters()
            if not any(parameter is replica for replica in tied) and is_first_replica(_sharded(parameter))
        ]
        # The same order on all ranks, which may hold other layers (pipeline parallelism).
        layers_of_ranks = gather_from_all_ranks(lambda: [layer for layer, _ in own], group)
        self.layers = list(dict.fromkeys(layer for layers in layers_of_ranks for layer in layers))
        self.parameters = [(self.layers.index(layer), parameter) for layer, parameter in own]
        self.blocks = [
            (self.layers.index(f"layers.{name}"), block)
            for part in model.model_parts
            for name, block in part.layers.items()
        ]
        of_block = {} if is_compiled else {block: layer for layer, block in self.blocks}
        self.logits = AttentionLogits(model.model_parts, model.mesh.context, of_block)
        self.recorded = RecordedNorms()
        self.is_due = False

    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.is_due = step % self.freq == 0

    def before_forward_backward(self, batch: Batch) -> None:  # noqa: ARG002
        if not self.is_due:
            return
        # Of the outputs on this rank: sums of squares, and numbers of elements. Ranks without sequence parallelism
        # count the same outputs, which does not change the mean.
        self.outputs = torch.zeros(2, len(self.layers), dtype=torch.float64, device=self.device)
        self.handles = [block.register_forward_hook(self._add_output(layer)) for layer, block in self.blocks]
        self.logit_sums, self.largest_logits = (
            torch.zeros_like(self.outputs),
            torch.full_like(self.outputs[0], -math.inf),
        )
        self.logits.start(self.logit_sums, self.largest_logits)

    def after_backward(self) -> None:
        if self.is_due:
            for handle in self.handles:
                handle.remove()
            self.logits.stop()

    def _add_output(self, layer: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def add(_: nn.Module, __: Any, output: Tensor) -> None:
            with torch.no_grad():
                own = local(output)
                self.outputs[0, layer] += _sum_of_squares(own)
                self.outputs[1, layer] += own.numel()

        # Else compile.enable would compile the hook, too, for each layer.
        disabled: Callable[[nn.Module, Any, Tensor], None] = torch.compiler.disable(add)  # type: ignore[no-untyped-call]
        return disabled

    @torch.no_grad()
    def after_gradients(self) -> None:
        if not self.is_due:
            return
        self.replicas.all_reduce(self.outputs)
        self.replicas.all_reduce(self.logit_sums)
        self.replicas.all_reduce(self.largest_logits, dist.ReduceOp.MAX)
        self.squares = torch.zeros(len(KINDS), len(self.layers), dtype=torch.float64, device=self.device)
        for layer, parameter in self.parameters:
            if parameter.grad is not None:
                self._add(0, layer, _sharded(parameter.grad).to_local())
        self.before = [_sharded(parameter).to_local().clone() for _, parameter in self.parameters]

    @torch.no_grad()
    def after_update(self) -> None:
        if not self.is_due:
            return
        for (layer, parameter), before in zip(self.parameters, self.before, strict=True):
            weight = _sharded(parameter).to_local()
            self._add(1, layer, weight)
            self._add(2, layer, weight - before)
        del self.before

    def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
        if not self.is_due:
            return
        # Each shard is counted on one rank only.
        sums = torch.cat((self.squares, self.outputs, self.logit_sums))
        dist.all_reduce(sums)
        dist.all_reduce(self.largest_logits, op=dist.ReduceOp.MAX)
        norms = sums[: len(KINDS)].sqrt().tolist()
        found = {
            f"norm_{kind}_{layer}": norm
            for kind, of_kind in zip(KINDS, norms, strict=True)
            for layer, norm in zip(self.layers, of_kind, strict=True)
        }
        outputs, counts, logits, logit_counts = sums[len(KINDS) :].tolist()
        for i, layer in enumerate(self.layers):  # in the order of the forward
            if logit_counts[i]:
                found[f"rms_logits_{layer}"] = _root(logits[i] / logit_counts[i])
                found[f"max_logits_{layer}"] = self.largest_logits[i].item()
            if counts[i]:
                found[f"rms_output_{layer}"] = _root(outputs[i] / counts[i])
        self.recorded.add(step, found)
        self.report(step, found)

    def _add(self, kind: int, layer: int, tensor: Tensor) -> None:
        self.squares[kind, layer] += _sum_of_squares(tensor).to(self.device)


class RecordedNorms:
    """Finds the layer whose gradient, output or attention logits were the first to leave their usual range."""

    WINDOW = 64
    """Number of steps whose norms are kept."""
    MAX_OUTSIDE = 16
    """After more steps in a row outside of a range, that is the usual range."""
    FEWEST = 5
    """Number of steps that make a range."""
    DEVIATIONS = 6.0
    """Standard deviations above the mean of the usual values up to which a value is usual, too."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=self.WINDOW)

    def add(self, step: int, norms: Mapping[str, float]) -> None:
        """Record the norms of ``step``; after a rollback, of a step before."""
        while self.steps and self.steps[-1][0] >= step:
            self.steps.pop()
        self.steps.append((step, norms))

    def describe_first_outlier(self) -> str:
        """A text about the layer that left first, or '' if none is outside of its range in the last step recorded.

        Of several that left in the same step, it is the one that is the farthest outside, or the first in the order of
        the forward whose values are not finite.
        """
        last = self.steps[-1][1] if self.steps else {}
        forward = [name for name in last if name.startswith("rms_")]
        gradients = [name for name in last if name.startswith("norm_grad_")]
        found = []
        for order, name in enumerate([*forward, *gradients]):
            steps_outside, distance, usual = self._leave([norms[name] for _, norms in self.steps])
            if steps_outside:
                found.append((-steps_outside, -distance, order, name, usual))
        if not found:
            return ""
        start, _, _, name, usual = min(found)  # counted from the end
        step, norms = self.steps[start]
        kind, _, layer = name.removeprefix("rms_").removeprefix("norm_").partition("_")
        what = {
            "output": "root mean square of the output",
            "logits": "root mean square of the attention logits",
            "grad": "norm of the gradient",
        }[kind]
        return f"the {what} of {layer} left its range first, in step {step}: {norms[name]:.4g}, usually {usual:.4g}"

    def _leave(self, values: list[float]) -> tuple[int, float, float]:
        """Number of the last ``values`` that are outside of the range before; by how many standard deviations the first
        of them is; and the mean of that range."""
        usual: list[float] = []
        outside: list[float] = []
        distance = 0.0
        for value in values:
            own = _deviations(usual, value) if len(usual) >= self.FEWEST or not math.isfinite(value) else 0.0
            if own <= self.DEVIATIONS:
                usual.append(value)
                outside = []
                continue
            distance = distance if outside else own
            outside.append(value)
            if len(outside) > self.MAX_OUTSIDE:
                usual, outside = [value for value in outside if math.isfinite(value)], []
        return len(outside), distance, statistics.fmean(usual) if usual else math.nan


def _deviations(usual: list[float], value: float) -> float:
    """By how many standard deviations ``value`` is above the mean of ``usual``; infinite if it is not finite."""
    if not math.isfinite(value):
        return math.inf
    mean, deviation = statistics.fmean(usual), statistics.pstdev(usual)
    return (value - mean) / max(deviation, 1e-3 * mean, 1e-30)


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan  # also of NaN


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """A float64 scalar: within a row in float32, over rows in float64, as ``clip_grad_norm`` does."""
    rows = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32) if tensor.ndim > 1 else tensor.abs()
    return rows.double().square().sum()


def _sharded(tensor: Tensor | nn.Parameter) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
