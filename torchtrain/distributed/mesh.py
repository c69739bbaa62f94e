"""The device mesh. Its dimensions, from the outermost to the innermost, whose ranks have the fastest links:

pipeline    splits the layers into stages
replicate   splits the batch; replicates the parameters (HSDP)
shard       splits the batch; FSDP shards the parameters
context     splits each sequence; FSDP shards the parameters over these ranks, too
tensor      shards each weight matrix
"""

import math
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchtrain.distributed.replicas import Replicas
from torchtrain.errors import ConfigError
from torchtrain.parallelisms.options import ParallelismConfig


@dataclass(frozen=True)
class ParallelDims:
    """Parallelism degrees: the size of each mesh dimension, outermost first. Their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def batch(self) -> int:
        """Data-parallel degree: the number of parts into which the global batch is split."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Number of ranks over which FSDP shards a parameter."""
        return self.shard * self.context

    def batch_rank(self, rank: int) -> int:
        """Data-parallel rank of the global ``rank``: the index of its part of the global batch."""
        return rank // (self.context * self.tensor) % self.batch


def resolve_parallel_dims(config: ParallelismConfig, world_size: int) -> ParallelDims:
    """The degrees in the config, with -1 replaced by a value.

    Raises:
        ConfigError: the product of the degrees is not ``world_size``.
    """
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
        resolved = zip(keys, astuple(degrees), strict=True)
        given = " x ".join(f"{key} = {degree}" for key, degree in resolved if degree != 1)
        raise ConfigError(
            f"parallelism: the product of the degrees must be the number of ranks, {world_size}, but the product of "
            f"{given or 'all of 1'} is {product}; start {product} ranks "
            f"(NGPU={product} ./run_llama_train.sh ...), or set data_parallel_shard_degree = -1 (all "
            "remaining ranks) and other degrees whose product divides the number of ranks"
        )
    return degrees


class Mesh:
    """The device mesh of all ranks and its submeshes.

    Attributes:
        degrees: the parallelism degrees.
        world: all ranks, with all five dimensions.
        batch: the ranks that hold different rows of the batch, in the order of the rows.
        loss: the ranks over which the loss is summed.
        fsdp: the mesh of ``fully_shard``: 1-D, or 2-D (replicate, shard) for HSDP.
        hsdp: the same, always 2-D.
        pipeline, context, tensor: the dimensions of these parallelisms.
        replicas: other jobs that share the batch with this one; they are not in ``world``.
    """

    def __init__(self, device: torch.device, degrees: ParallelDims, replicas: Replicas | None = None):
        self.degrees = degrees
        self.replicas = Replicas() if replicas is None else replicas
        self.world = init_device_mesh(
            device.type, astuple(degrees), mesh_dim_names=tuple(field.name for field in fields(degrees))
        )
        self.batch: DeviceMesh = self.world["replicate", "shard"]._flatten("batch")
        # Without tensor: all ranks of a tensor-parallel group have the same loss.
        self.loss: DeviceMesh = self.world["pipeline", "replicate", "shard", "context"]._flatten("loss")
        # Context-parallel ranks use the same parameters, so FSDP shards over them, too.
        shard = self.world["shard", "context"]._flatten("fsdp") if degrees.context > 1 else self.world["shard"]
        self.hsdp = DeviceMesh._concatenate([self.world["replicate"], shard])
        self.fsdp = self.hsdp if degrees.replicate > 1 else shard
        self.pipeline = self.world["pipeline"]
        self.context = self.world["context"]
        self.tensor = self.world["tensor"]
        self._divided: dict[tuple[int, str], DeviceMesh] = {}

    @cached_property
    def stage(self) -> DeviceMesh:
        """All ranks of a pipeline stage, which share its parameters. The first access is collective over all ranks."""
        return self.world["replicate", "shard", "context", "tensor"]._flatten("stage")

    def divided(self, degree: int, name: str) -> DeviceMesh:
        """The ranks over which FSDP shards, divided further for a parallelism that a package brings.

        The result is 2-D, with the dimensions ``{name}_shard`` and ``name``; the latter has ``degree`` neighbors. The
        first call with such arguments is collective over all ranks.
        """
        key = degree, name
        if key not in self._divided:
            sizes = self.degrees.fsdp // degree, degree
            flat = self.world["shard", "context"]._flatten("fsdp") if self.degrees.context > 1 else self.world["shard"]
            self._divided[key] = flat._unflatten(0, sizes, (f"{name}_shard", name))
        return self._divided[key]


def local(tensor: Any) -> Tensor:
    """The local shard of ``tensor``, or ``tensor`` itself if it is not a DTensor. Shares its memory."""
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(shard, "_tensor", shard)  # unwrap a tensor subclass that converts weights for their all-gather
