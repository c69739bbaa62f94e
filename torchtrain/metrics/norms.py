"""Norms of gradients, weights and updates by layer."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.agreement import gather_from_all_ranks
from torchtrain.metrics.step_hook import StepHook
from torchtrain.models.loss import TokenLoss
from torchtrain.models.parameters import full_name
from torchtrain.optimizers.clipping import is_first_replica
from torchtrain.parallelisms.parallel_model import ParallelModel

KINDS = ("grad", "weight", "update")


def layer_of(name: str) -> str:
    """The layer of the parameter ``name``: ``layers.3``, or the module outside of the blocks, such as ``output``."""
    parts = full_name(name).split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


class NormsByLayer(StepHook):
    """Every ``freq`` steps, computes the L2 norms of each layer's gradient, weights and update, on any layout.

    The gradient is that before clipping, the weights are those after the update. Such a step holds a copy of this
    rank's shards of the parameters.

    Args:
        report: called on all ranks with the step and the norms by name, such as ``norm_grad_layers.3``.
        group: all ranks, for messages from the CPU; None: the default group.
    """

    def __init__(
        self,
        model: ParallelModel,
        freq: int,
        report: Callable[[int, dict[str, float]], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.freq = freq
        self.report = report
        self.device = model.device
        replicas = model.pipeline.tied_replicas if model.pipeline is not None else []
        own = [
            (layer_of(name), parameter)
            for part in model.model_parts
            for name, parameter in part.named_parameters()
            if not any(parameter is replica for replica in replicas) and is_first_replica(_sharded(parameter))
        ]
        # The same order on all ranks, which may hold other layers (pipeline parallelism).
        layers_of_ranks = gather_from_all_ranks(lambda: [layer for layer, _ in own], group)
        self.layers = list(dict.fromkeys(layer for layers in layers_of_ranks for layer in layers))
        self.parameters = [(self.layers.index(layer), parameter) for layer, parameter in own]
        self.is_due = False

    def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
        self.is_due = step % self.freq == 0

    @torch.no_grad()
    def after_gradients(self) -> None:
        if not self.is_due:
            return
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
        dist.all_reduce(self.squares)
        norms = self.squares.sqrt().tolist()
        self.report(
            step,
            {
                f"norm_{kind}_{layer}": norm
                for kind, of_kind in zip(KINDS, norms, strict=True)
                for layer, norm in zip(self.layers, of_kind, strict=True)
            },
        )

    def _add(self, kind: int, layer: int, tensor: Tensor) -> None:
        """Add the squares of ``tensor``: within a row in float32, over rows in float64, as ``clip_grad_norm`` does."""
        rows = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32) if tensor.ndim > 1 else tensor.abs()
        self.squares[kind, layer] += rows.double().square().sum().to(self.device)


def _sharded(tensor: Tensor | nn.Parameter) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor
