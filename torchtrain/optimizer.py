"""AdamW over sharded parameters, and the norm of the whole gradient."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from torchtrain.config.schema import Optimizer
from torchtrain.distributed.process_group import all_reduce

ROW_NORM = partial(torch.linalg.vector_norm, dim=-1)


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
        for tensor, padded in self._padded:
            tensor.copy_(unpad(padded, tensor))

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        *elements, _, _ = lists  # without maxima, which are not kept, and numbers of steps
        for tensors in lists:
            tensors[:] = [local(tensor) for tensor in tensors]
        for tensors in elements if group["fused"] else ():
            padded = [pad(tensor) for tensor in tensors]
            self._padded += [(t, p) for t, p in zip(tensors, padded, strict=True) if p is not t]
            tensors[:] = padded
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
        own = local(parameter)
        elements = [own, local(parameter.grad), *(tensor.float() for tensor in resting)]
        if group["fused"]:
            elements = [pad(tensor) for tensor in elements]
        updated, gradient, mean, square_mean = elements
        adamw(
            [updated],
            [gradient],
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
        for kept, tensor in zip((own, *resting), (updated, mean, square_mean), strict=True):
            if kept is not tensor:
                kept.copy_(unpad(tensor, kept))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pad(tensor: Tensor) -> Tensor:
    """``tensor``, flat and padded to a multiple of 64 where it lies on a CPU.

    There the fused kernel rounds the elements that do not fill a vector in another way than the others. Which these are
    must not depend on how a parameter is split.
    """
    rest = -tensor.numel() % 64 if tensor.device.type == "cpu" else 0
    return nn.functional.pad(tensor.flatten(), (0, rest)) if rest else tensor


def unpad(padded: Tensor, like: Tensor) -> Tensor:
    return padded.flatten()[: like.numel()].view(like.shape)


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
    scalar, has the same value on every rank; with ``exact`` the same bits on any number of shards.
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
            norms.append(row_norms(gradient.to_local()) if exact else ROW_NORM(gradient.to_local()).flatten())
    # Where the ranks talk to each other, which under CPU offload is not where the gradients lie.
    squares = torch.cat(norms).double().square()
    if exact:
        total = exact_sum(squares.to(device))
    else:
        total = squares.sum().to(device)
        all_reduce(total)
    norm = total.sqrt().float().to(parameters[0].device)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def row_norms(local: Tensor) -> Tensor:
    """Norms of the rows of ``local``, or of its elements if it is a vector, whose bits no other row has a part in."""
    if local.ndim == 1:
        return local.abs()
    if local.device.type == "cpu":
        return ROW_NORM(local).flatten()
    # Kernels elsewhere choose by the number of rows how to add. So by elements alone: halves, until one is left.
    squares = local.double().square().flatten(0, -2)
    while (width := squares.shape[-1]) > 1:
        halves = squares[:, : width // 2] + squares[:, width - width // 2 :]
        squares = torch.cat((halves, squares[:, width // 2 : width - width // 2]), dim=1)
    return squares.sqrt().flatten()


def exact_sum(values: Tensor) -> Tensor:
    """Sum of float64 ``values``, none negative, over all elements and ranks: the same bits in any order. Collective.

    Each is split into a multiple of 2^-32 of the largest's power of two, and one of 2^-64: sums of up to 2^30 are exact in
    64-bit integers. NaN or infinity where one of ``values`` is.
    """
    largest = values.max()
    largest = torch.where(largest.isfinite(), largest, math.inf)  # a maximum over ranks may lose NaN
    all_reduce(largest, op=dist.ReduceOp.MAX)
    # A power of two by its bits: torch.ldexp computes it in float32.
    scale = ((1023 + 32 - torch.frexp(largest)[1].long()) << 52).view(torch.float64)
    scaled = values * scale
    coarse = scaled.floor()
    fine = ((scaled - coarse) * 2.0**32).round()
    sums = torch.stack((coarse.long().sum(), fine.long().sum()))
    all_reduce(sums)
    coarse, fine = sums.double()
    return torch.where(largest.isfinite(), (coarse + fine / 2.0**32) / scale, largest)


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that hold the same part of ``tensor``."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    return all(
        coordinate == 0 or not placement.is_replicate()
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
