"""AdamW over sharded parameters, and the norm of the whole gradient."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from torchtrain.config.schema import Optimizer
from torchtrain.devices import device_kind
from torchtrain.distributed.process_group import all_reduce

FLOAT64_ELEMENTS = 1 << 24  # of a gradient that exist at once


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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._padded: list[tuple[Tensor, Tensor]] = []
        super().step(closure)
        copy_back(self._padded)
        self._padded.clear()  # or gradients would live on

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for i, tensors in enumerate(lists):
            own = [local(tensor) for tensor in tensors]
            # The last are numbers of steps.
            tensors[:] = [pad(tensor) for tensor in own] if group["fused"] and i < len(lists) - 1 else own
            self._padded += zip(own, tensors, strict=True)
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


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
def clip_grad_norm(
    parts: Sequence[nn.Module], max_norm: float, copies: Sequence[nn.Parameter] = (), *, exact: bool = False
) -> Tensor:
    """Scale the gradient down to ``max_norm`` where its L2 norm over all parameters is above; returns the norm before.

    The parameters are DTensors. ``copies`` are those that another rank counts, under another mesh. The norm, a float32
    scalar, has the same value on every rank; with ``exact`` the same bits for any number of them that share the rows.
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
            norms.append(row_norms(gradient.to_local(), exact))
    # Where the ranks talk to each other, which under CPU offload is not where the gradients lie.
    squares = torch.cat(norms).double().square().to(device)
    if exact:
        total = exact_sum(squares)
    else:
        all_reduce(total := squares.sum())
    norm = total.sqrt().float().to(parameters[0].device)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def row_norms(gradient: Tensor, exact: bool) -> Tensor:
    """Of a matrix the norm of each row, of a vector that of each element."""
    if gradient.ndim == 1:
        return gradient.abs()
    if not exact or device_kind(gradient.device.type) == "cpu":
        norms: Tensor = torch.linalg.vector_norm(gradient, dim=-1)
        return norms.flatten()
    # CUDA's kernel adds in an order that depends on the number of rows. So by elements: half of a row to the other.
    norms_of_some = []
    for rows in torch.split(gradient, max(1, FLOAT64_ELEMENTS // gradient.shape[-1])):
        squares = rows.double().square()
        while (width := squares.shape[1]) > 1:
            halves = squares[:, : width // 2] + squares[:, -(width // 2) :]
            squares = torch.cat((halves, squares[:, width // 2 : -(width // 2)]), dim=1)
        norms_of_some.append(squares.sqrt().flatten())
    return torch.cat(norms_of_some)


def exact_sum(values: Tensor) -> Tensor:
    """Sum over all ranks of float64 ``values``, none negative and 2^30 at most, with the same bits in any order.

    Each is added as two 64-bit integers, down to 2^-64 of the largest. Infinite if one is infinite or NaN. Collective.
    """
    largest = values.nan_to_num(math.inf, posinf=math.inf).max()
    all_reduce(largest, op=dist.ReduceOp.MAX)
    scale = (1055 - torch.frexp(largest)[1].long() << 52).view(torch.float64)  # a power of two, made of its bits
    coarse = (values * scale).floor()  # under 2^32
    fine = ((values * scale - coarse) * 2.0**32).round()
    sums = torch.stack((coarse.long().sum(), fine.long().sum()))
    all_reduce(sums)
    sums = sums.double()
    return torch.where(largest.isfinite(), (sums[0] + sums[1] * 2.0**-32) / scale, largest)


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same part of ``tensor``."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(
        coordinate == 0 or not placement.is_replicate()
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
