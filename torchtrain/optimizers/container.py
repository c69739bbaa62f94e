"""The optimizers of a model, as one: parameter groups, steps, and states by parameter name."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.optimizers.base import ParameterGroup, ShardedOptimizer


class OptimizerContainer(Stateful):
    """Several optimizers, each of which updates some of the parameter groups of a model.

    Checkpoints contain the optimizer states, as ``<parameter>.<entry>``, such as ``norm.weight.exp_avg``.
    Hyperparameters are not among them: they follow from the config and the step.
    """

    def __init__(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        self.optimizers = optimizers
        self.after_step: Callable[[], None] = lambda: None
        """Called after each step."""

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """The parameter groups of all optimizers."""
        return list(chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))

    def step(self, skip: Tensor | None = None) -> None:
        """Update all parameters; see ``ShardedOptimizer.step``. ``skip`` may be on another device. Collective."""
        for optimizer in self.optimizers:
            device = optimizer.param_groups[0]["params"][0].device
            optimizer.step(None if skip is None else skip.to(device))
        self.after_step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer states of all parameters, which are created where there are none."""
        tensors: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    state = optimizer.state_of(parameter)
                    tensors |= {f"{name}.{entry}": value for entry, value in state.items()}
        return tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: the checkpoint was loaded into the tensors of ``state_dict``, which are the optimizers'."""
