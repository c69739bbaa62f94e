"""Base class of optimizers: local shards, optimizer states by parameter, and skipped updates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtrain.config.component import Component
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.optimizers.options import OptimizerConfig

ParameterGroup = dict[str, Any]
"""One of ``torch.optim.Optimizer.param_groups``: the keys params and param_names, in the same order, name, lr,
lr_factor and weight_decay. ``LRSchedule.apply`` sets lr, a plain float, before each step."""


class ShardedOptimizer(Component, torch.optim.Optimizer):
    """Updates the parameters of some groups, which are DTensors on ``mesh``, or plain tensors.

    An elementwise optimizer implements ``init_state`` and ``update`` (AdamW overrides ``step`` for its fused kernel).
    An optimizer that needs more than one element at a time, or the tensors of many parameters at once, implements
    ``step`` instead of ``update``.

    Args:
        groups: parameter groups, in which params is a list of (full name, parameter).
        config: the section [optimizer].
        options: an instance of ``Options``, from [optimizer.options.NAME].
        mesh: None for plain tensors.
    """

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimizerConfig, options: Any, mesh: Mesh | None):
        super().__init__(groups, {})
        self.config, self.options, self.mesh = config, options, mesh
        self.state_dtype: torch.dtype = getattr(torch, config.state_dtype)

    @classmethod
    def check_parameter(cls, name: str, parameter: Tensor) -> None:
        """Raise ConfigError if the optimizer cannot update this parameter; ``parameter`` may be on the meta device."""

    @classmethod
    def create_process_groups(cls, mesh: Mesh) -> None:
        """Create the process groups that the optimizer needs.

        Collective over all ranks, also those without a parameter for this optimizer.
        """

    @classmethod
    def mup_divisor(cls, width: float) -> float:
        """By how much muP divides the learning rates of the blocks' matrices in a model ``width`` times as wide.

        ``width``, by default, as for AdamW, whose updates of all elements have about the same size, so that the largest
        singular value of an update grows as ``width``.
        """
        return width

    def prepare_for_cpu(self) -> torch.dtype | None:
        """Choose what is fast on a CPU; called before the first step. Returns the dtype of matrix products, if any."""
        return None

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """New optimizer state of ``parameter``: scalars, and tensors sharded like it (``torch.zeros_like``)."""
        raise NotImplementedError

    def update(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: ParameterGroup
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weight and the new state. The arguments are local shards, and must not be modified."""
        raise NotImplementedError

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The optimizer state of ``parameter``, which is created if there is none."""
        if parameter not in self.state:
            self.state[parameter] = self.init_state(parameter)
        state: dict[str, Tensor] = self.state[parameter]
        return state

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            skip: float32 scalar on the parameters' device, identical on all ranks: 1 leaves parameters and states
                bitwise unchanged, even if gradients are infinite or NaN. The host need not wait for it. None: 0.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight = local(parameter)
                state = {key: local(value) for key, value in self.state_of(parameter).items()}
                new_weight, new_state = self.update(weight, local(parameter.grad), dict(state), group)
                assign(weight, new_weight, skip)
                for key, value in state.items():
                    assign(value, new_state[key], skip)


def assign(tensor: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Copy ``new`` into ``tensor``, unless ``skip`` is 1. The host does not wait for ``skip``."""
    tensor.copy_(new if skip is None else torch.where(skip > 0, tensor, new))
