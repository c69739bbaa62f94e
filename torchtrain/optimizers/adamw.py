"""AdamW (https://arxiv.org/abs/1711.05101) over sharded parameters."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from torchtrain.devices import device_kind
from torchtrain.distributed.mesh import local


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW on local shards: the update is elementwise, so it needs no DTensor operation.

    Its two moments are stored in ``state_dtype``. With bfloat16 each update converts them to float32 and back, one
    parameter at a time to save memory.
    """

    step_of_other_rules: Callable[[], None] | None = None
    """Updates the groups whose rule is not AdamW."""

    def __init__(self, groups: Sequence[dict[str, Any]], state_dtype: torch.dtype, **options: Any) -> None:
        super().__init__(groups, options)
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in (group for group in self.param_groups if group["rule"] == "adamw"):
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            at_once = len(group["params"]) if self.state_dtype is torch.float32 else 1
            for first in range(0, len(parameters), at_once):
                self._update(parameters[first : first + at_once], group)
        if self.step_of_other_rules is not None:
            self.step_of_other_rules()

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                device = parameter.device if group["fused"] else torch.device("cpu")
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter, dtype=self.state_dtype),
                    "exp_avg_sq": torch.zeros_like(parameter, dtype=self.state_dtype),
                }
        states = [self.state[parameter] for parameter in parameters]
        means, square_means = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        kinds = parameters, [parameter.grad for parameter in parameters], means, square_means
        resting = [[local(tensor) for tensor in tensors] for tensors in kinds]
        working = [[pad(t.float()) if group["fused"] else t.float() for t in tensors] for tensors in resting]
        updated, gradients, means, square_means = working
        adamw(
            updated,
            gradients,
            means,
            square_means,
            [],
            [state["step"] for state in states],
            found_inf=getattr(self, "found_inf", None),  # see ``update``
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            amsgrad=False,
            maximize=False,
            **{name: group[name] for name in ("lr", "weight_decay", "eps", "fused", "foreach")},
        )
        for tensor, new in zip(chain(*resting), chain(*working), strict=True):
            if new is not tensor:
                tensor.copy_(new.flatten()[: tensor.numel()].view_as(tensor))


def pad(tensor: Tensor) -> Tensor:
    """``tensor``, or on a CPU, unless its size is a multiple of 64, a flat copy padded with zeros to one.

    The fused CPU kernel rounds the last elements, which do not fill a SIMD vector, differently: without padding the
    result would depend on how a parameter is sharded.
    """
    missing = -tensor.numel() % 64 if device_kind(tensor.device.type) == "cpu" else 0
    return nn.functional.pad(tensor.flatten(), (0, missing)) if missing else tensor
