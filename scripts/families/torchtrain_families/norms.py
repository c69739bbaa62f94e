"""Norms that are no ``nn.RMSNorm``, with tensor parallelism of their own: ``shard`` is called on the meta device."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a query or key, of which tensor parallelism gives a rank some."""

    def __init__(self, heads: int, head_dim: int, eps: float):
        super().__init__()
        self.width, self.eps = heads * head_dim, eps
        self.weight = nn.Parameter(torch.ones(self.width))
        self.mesh: DeviceMesh | None = None

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the weight, as the heads are, over the ranks of ``mesh``."""
        self.mesh = mesh
        own = self.weight.chunk(mesh.size())[mesh.get_local_rank()].detach()
        self.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` has the shape (bs, seq, heads, head_dim), as the result; heads are those of this rank."""
        if self.mesh is None:
            return F.rms_norm(x.flatten(2), (self.width,), self.weight, self.eps).view_as(x)
        wide = x.flatten(2).float()
        squares = DTensor.from_local(wide.square().sum(-1, keepdim=True), self.mesh, [Partial()], run_check=False)
        # Each rank uses the sum for its own heads, so that backward sums the gradients of all ranks.
        total = squares.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        normed = wide * torch.rsqrt(total / self.width + self.eps) * self.weight.to_local()
        return normed.type_as(x).view_as(x)


class OffsetNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))
        self.placement: Any = None  # of the weight's gradient on each tensor-parallel rank

    def shard(self, mesh: DeviceMesh, *, sharded_input: bool) -> None:
        """Replicate the weight over ``mesh``; ``sharded_input``: each rank normalizes a shard of the input."""
        self.placement = Partial() if sharded_input else Replicate()
        self.weight = nn.Parameter(DTensor.from_local(self.weight.detach(), mesh, [Replicate()], run_check=False))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.placement is not None:
            weight = weight.to_local(grad_placements=[self.placement])
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), self.eps).type_as(x)
