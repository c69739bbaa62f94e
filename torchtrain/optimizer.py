"""AdamW over sharded parameters, and the norm of the whole gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from torchtrain.config.schema import Optimizer
from torchtrain.distributed.process_group import all_reduce


def build_optimizer(parts: Sequence[nn.Module], config: Optimizer) -> torch.optim.Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101); matrices decay, vectors (the norms) do not.

    Its learning rate is a tensor-free float in each group, set anew each step by the schedule.
    """
    parameters = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
    if any(parameter.is_meta for parameter in parameters):
        raise RuntimeError(
            "the optimizer must be built after model.to_empty(device=...) and init_weights() (or a load): "
            "to_empty replaces meta parameters, and the optimizer would go on updating the old ones"
        )
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamWBfloat16 if config.state_dtype == "bfloat16" else ShardedAdamW
    return optimizer(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


class ShardedAdamW(torch.optim.AdamW):
    """AdamW on what this rank holds of each parameter: an update of single elements needs nothing else of DTensor."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex


class AdamWBfloat16(torch.optim.AdamW):
    """AdamW whose two means rest in bfloat16. Each update takes them to float32 and back, one parameter at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
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
        resting = [local(state["exp_avg"]), local(state["exp_avg_sq"])]
        mean, square_mean = (tensor.float() for tensor in resting)
        adamw(
            [local(parameter)],
            [local(parameter.grad)],
            [mean],
            [square_mean],
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
        for kept, tensor in zip(resting, (mean, square_mean), strict=True):
            kept.copy_(tensor)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def update(optimizer: torch.optim.Optimizer, refused: Tensor) -> None:
    """``optimizer.step()``, unless ``refused``, a float32 scalar, is 1: then parameters and states stay as they are.

    The fused kernel reads it on the device, where gradient scaling would say that it found infinities; for the others
    the host waits.
    """
    group = optimizer.param_groups[0]
    if group.get("fused"):
        optimizer.found_inf = refused.to(group["params"][0].device)  # type: ignore[attr-defined]
        optimizer.step()
    elif not refused.item():
        optimizer.step()


@torch.no_grad()
def clip_grad_norm(parts: Sequence[nn.Module], max_norm: float, copies: Sequence[nn.Parameter] = ()) -> Tensor:
    """Scale the gradient down to ``max_norm`` where its L2 norm over all parameters is above; returns the norm before.

    The parameters are DTensors. ``copies`` are those that another rank counts, under another mesh. The norm, a float32
    scalar, has the same value on every rank.
    """
    parameters = [p for part in parts for p in part.parameters() if p.grad is not None]
    device = torch.device("cpu")
    # Each element of the gradient enters once, from one rank: so one sum over all ranks serves every layout.
    norms = [torch.zeros(1, device=parameters[0].device)]
    for parameter in parameters:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        device = torch.device(gradient.device_mesh.device_type)
        if _is_first_copy(gradient) and not any(parameter is copy for copy in copies):
            # float32 sums over a large matrix are off by 1e-5 on CPU, and otherwise for each way to split it. Those of
            # a row are not, and take a quarter of the time of float64 throughout.
            norms.append(torch.linalg.vector_norm(gradient.to_local(), dim=-1).flatten())
    # Where the ranks talk to each other, which under CPU offload is not where the gradients lie.
    squares = torch.cat(norms).double().square().sum().to(device)
    all_reduce(squares)
    norm = squares.sqrt().float().to(parameters[0].device)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same part of ``tensor``."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(
        coordinate == 0 or not placement.is_replicate()
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
