"""AdamW (https://arxiv.org/abs/1711.05101) over sharded parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torchtrain.distributed.mesh import Mesh, local
from torchtrain.optimizers.base import ParameterGroup, ShardedOptimizer
from torchtrain.optimizers.options import OptimizerConfig


class ShardedAdamW(ShardedOptimizer):
    """AdamW on local shards: the update is elementwise, so it needs no DTensor operation.

    Its two moments are stored in ``state_dtype``. With bfloat16 each update converts them to float32 and back, one
    parameter at a time to save memory.
    """

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimizerConfig, options: Any, mesh: Mesh | None):
        super().__init__(groups, config, options, mesh)
        self.fused, self.foreach = config.implementation == "fused", config.implementation == "foreach"
        self.adamw: Callable[..., None] = adamw
        """The update of some parameters; ``cpu.build`` replaces it by one with the same arguments."""

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        device = parameter.device if self.fused else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, dtype=self.state_dtype),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=self.state_dtype),
        }

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        # The fused kernel reads ``skip`` on the device. For the other implementations the host waits for it.
        if not self.fused and skip is not None and skip.item():
            return
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            at_once = len(group["params"]) if self.state_dtype is torch.float32 else 1
            for first in range(0, len(parameters), at_once):
                self._update(parameters[first : first + at_once], group, skip)

    def _update(self, parameters: Sequence[Tensor], group: ParameterGroup, skip: Tensor | None) -> None:
        states = [self.state_of(parameter) for parameter in parameters]
        stored = [local(state[moment]) for moment in ("exp_avg", "exp_avg_sq") for state in states]
        moments = [moment.float() for moment in stored]  # the same tensors if they are stored in float32
        self.adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad).float() for parameter in parameters],
            moments[: len(parameters)],
            moments[len(parameters) :],
            [],
            [state["step"] for state in states],
            found_inf=skip if self.fused else None,
            fused=self.fused,
            foreach=self.foreach,
            amsgrad=False,
            maximize=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.eps,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )
        for tensor, updated in zip(stored, moments, strict=True):
            if updated is not tensor:
                tensor.copy_(updated)
