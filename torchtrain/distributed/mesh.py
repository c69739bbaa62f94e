"""The device mesh of a run. Its axes, from the outermost to the innermost, whose ranks have the fastest links:

pipeline    the model's layers, in stages
replicate   rows of the batch; copies of the parameters (HSDP)
shard       rows of the batch; FSDP shards parameters
context     parts of each sequence; FSDP shards parameters over these ranks, too
tensor      parts of each matrix
"""

import math
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchtrain.config.schema import ParallelismConfig
from torchtrain.errors import ConfigError


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis, outermost first; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def batch(self) -> int:
        """Data-parallel degree: number of parts that the global batch is divided into."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that FSDP splits a parameter over."""
        return self.shard * self.context

    def batch_rank(self, rank: int) -> int:
        """Which part of the global batch is that of ``rank``."""
        return rank // (self.context * self.tensor) % self.batch


def resolve_parallel_dims(config: ParallelismConfig, world_size: int) -> ParallelDims:
    """The degrees with -1 filled in; ConfigError where they do not multiply to ``world_size``."""
    keys = {
        "pipeline_parallel_degree": config.pipeline_parallel_degree,
        "data_parallel_replicate_degree": config.data_parallel_replicate_degree,
        "data_parallel_shard_degree": config.data_parallel_shard_degree,
        "context_parallel_degree": config.context_parallel_degree,
        "tensor_parallel_degree": config.tensor_parallel_degree,
    }
    others = math.prod(degree for degree in keys.values() if degree != -1)
    degrees = ParallelDims(*(max(1, world_size // others) if degree == -1 else degree for degree in keys.values()))
    product = math.prod(astuple(degrees))
    if product != world_size:
        given = " x ".join(f"{key} = {degree}" for key, degree in keys.items() if degree != 1)
        raise ConfigError(
            f"parallelism: the degrees must multiply to the number of ranks, {world_size}, and {given or 'all of 1'} "
            f"make {product}; start {product} ranks, or set data_parallel_shard_degree = -1 (all that the others "
            "leave) and others whose product divides the number of ranks"
        )
    return degrees


class Mesh:
    """The device mesh of all ranks, and parts of it."""

    def __init__(self, device: torch.device, degrees: ParallelDims):
        self.degrees = degrees
        self.world = init_device_mesh(
            device.type, astuple(degrees), mesh_dim_names=tuple(field.name for field in fields(degrees))
        )
        # All ranks that hold different rows of the batch, in the order of the rows.
        self.batch: DeviceMesh = self.world["replicate", "shard"]._flatten("batch")
        # Where the loss is summed: ranks of a tensor-parallel group have the same losses, so that axis is left out.
        self.loss: DeviceMesh = self.world["pipeline", "replicate", "shard", "context"]._flatten("loss")
        # A context group would hold the same parameters on each rank, so FSDP shards over it, too.
        shard = self.world["shard", "context"]._flatten("fsdp") if degrees.context > 1 else self.world["shard"]
        self.hsdp = DeviceMesh._concatenate([self.world["replicate"], shard])
        # Where fully_shard works: 1-D, or (replicate, shard) for HSDP.
        self.fsdp = self.hsdp if degrees.replicate > 1 else shard
        self.pipeline = self.world["pipeline"]
        self.context = self.world["context"]
        self.tensor = self.world["tensor"]

    @cached_property
    def stage(self) -> DeviceMesh:
        """All ranks of a pipeline stage, which share its parameters. Collective over all ranks when first asked for."""
        return self.world["replicate", "shard", "context", "tensor"]._flatten("stage")


def local(tensor: Any) -> Tensor:
    """What this rank holds of ``tensor``, sharing its memory."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(held, "_tensor", held)  # within torchao's own kind of tensor, of weights that are gathered in float8
