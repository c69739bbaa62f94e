"""AdamW (https://arxiv.org/abs/1711.05101) over sharded parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from torchtrain.devices import device_kind
from torchtrain.distributed.mesh import local


class ShardedAdamW(torch.optim.AdamW):
    """AdamW on what this rank holds of each parameter: an update of single elements needs nothing else of DTensor."""

    step_of_other_rules: Callable[[], None] | None = None
    """Updates the groups whose rule is not AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        self._step_of_adamw()
        if self.step_of_other_rules is not None:
            self.step_of_other_rules()

    def _step_of_adamw(self) -> None:
        self._padded: list[tuple[Tensor, Tensor]] = []
        super().step()
        copy_back(self._padded)
        self._padded.clear()  # or gradients would live on

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        if group["rule"] != "adamw":
            return False  # with the lists empty nothing is updated
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for i, tensors in enumerate(lists):
            own = [local(tensor) for tensor in tensors]
            # The last are numbers of steps.
            tensors[:] = [pad(tensor) for tensor in own] if group["fused"] and i < len(lists) - 1 else own
            self._padded += zip(own, tensors, strict=True)
        return has_complex


class AdamWBfloat16(ShardedAdamW):
    """AdamW whose two means rest in bfloat16. Each update takes them to float32 and back, one parameter at a time."""

    def _step_of_adamw(self) -> None:
        for group in (group for group in self.param_groups if group["rule"] == "adamw"):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            device = parameter.device if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        resting = [local(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
        working = [pad(tensor.float()) if group["fused"] else tensor.float() for tensor in resting]
        updated, gradient, mean, square_mean = ([tensor] for tensor in working)
        adamw(
            updated,
            gradient,
            mean,
            square_mean,
            [],
            [state["step"]],
            fused=group["fused"],
            foreach=group["foreach"],
            found_inf=getattr(self, "found_inf", None),  # see ``update``
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        copy_back(zip(resting, working, strict=True))


def pad(tensor: Tensor) -> Tensor:
    """On a CPU, a flat copy of ``tensor`` with zeros up to a multiple of 64 elements, if it needs any.

    There the fused kernel rounds otherwise what does not fill a vector, and that must not depend on how a parameter is
    split.
    """
    missing = -tensor.numel() % 64 if device_kind(tensor.device.type) == "cpu" else 0
    return nn.functional.pad(tensor.flatten(), (0, missing)) if missing else tensor


def copy_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, working in pairs:
        if working is not tensor:
            tensor.copy_(working.flatten()[: tensor.numel()].view_as(tensor))
