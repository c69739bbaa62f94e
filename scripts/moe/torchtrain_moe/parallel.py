"""Parallelize a mixture of experts, and complete its counts after each step.

Expert parallelism takes its ranks from those over which FSDP shards: of these, ``expert_parallel_degree`` neighbors
divide the experts among them, and FSDP shards each one's experts over the others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torchtrain_families.norms import ProjectionNorm

from torchtrain.config.schema import JobConfig, option_of_plugin, section_of
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh, ParallelDims
from torchtrain.distributed.process_group import all_reduce
from torchtrain.errors import ConfigError
from torchtrain.models.spec import Decoder
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain_moe.config import MoEConfig
from torchtrain_moe.experts import Experts
from torchtrain_moe.model import MixtureOfExperts, routers
from torchtrain_moe.options import MoESection
from torchtrain_moe.router import Batch

WIDTH = {"w1": 1, "w2": 2, "w3": 1}
"""The dimension of each projection that is an expert's inner width."""


def check_run(degree: int, config: JobConfig, model: object, dims: ParallelDims) -> None:
    """Raise ConfigError if a model cannot be trained with an ``expert_parallel_degree`` of ``degree`` on a layout."""
    given = f"moe.expert_parallel_degree = {degree}"
    if not isinstance(model, MoEConfig):
        if degree > 1:
            raise ConfigError(
                f"{given} needs a mixture of experts: set model.name = 'olmoe' or 'qwen3_moe', or omit it"
            )
        return
    for name, number in (("n_experts", model.n_experts), ("data_parallel_shard_degree * context degree", dims.fsdp)):
        if number % degree:
            fitting = [n for n in range(1, degree) if model.n_experts % n == 0 and dims.fsdp % n == 0]
            raise ConfigError(f"{given} must divide {name} = {number}; try {' or '.join(map(str, fitting[-2:]))}")
    checkpointing = config.activation_checkpoint
    if degree > 1 and checkpointing.mode == "selective" and checkpointing.selective_option == "op":
        raise ConfigError(
            f"{given}: activation_checkpoint.mode = 'selective' with selective_option = 'op' needs blocks that repeat "
            "the operations of their forward in backward, and FSDP gathers a rank's experts, a group in a block, "
            "in another way there; take selective_option = '2', or mode = 'full'"
        )
    for option, unset in (("recheck.interval", 0), ("replicas.lighthouse", "")):
        value = option_of_plugin(config, option) or unset
        if value != unset:
            raise ConfigError(
                f"{option} = {value!r} has not been tried with {model.family}, whose routers count the tokens of each "
                f"step; set it to {unset!r}"
            )
    if config.compile.enable:
        raise ConfigError(
            f"compile.enable = true: an expert of {model.family} has another number of tokens in each batch, and "
            "blocks are compiled for fixed sizes; set it to false"
        )


def parallelize(model: Decoder, mesh: Mesh, config: JobConfig, reducer: GradientReducer) -> None:
    """``parallelize_llama`` of a mixture of experts."""
    degree = section_of(config, MoESection).expert_parallel_degree
    check_run(degree, config, model.config, mesh.degrees)
    tensor = mesh.tensor if mesh.degrees.tensor > 1 else None
    residual: Placement = Shard(1) if config.parallelism.enable_sequence_parallel else Replicate()
    experts_mesh = mesh.divided(degree, "expert") if degree > 1 else None
    own_meshes: dict[nn.Module, DeviceMesh] = {}
    groups = [axis.get_group() for axis in sequence_axes(mesh, residual) if axis.size() > 1]
    parts = mesh.degrees.context * (mesh.degrees.tensor if residual.is_shard() else 1)
    for module in list(model.modules()):
        if isinstance(module, ProjectionNorm) and tensor is not None:
            module.shard(tensor)
        if isinstance(module, MixtureOfExperts):
            module.router.batch = Batch(config.training.global_batch_size, parts, groups)
            shard_experts(module.experts, None if experts_mesh is None else experts_mesh["expert"], tensor)
            if tensor is not None:
                module.shard(tensor, residual)
            if experts_mesh is not None:
                own_meshes[module.experts] = fsdp_mesh(experts_mesh, mesh, reducer)
    parallelize_llama(model, mesh, config, reducer, own_meshes)
    if config.training.sums == "exact":
        for experts, shards in own_meshes.items():
            sum_exactly(experts, reducer, shards)


def sequence_axes(mesh: Mesh, residual: Placement) -> list[DeviceMesh]:
    """The meshes whose ranks route different tokens of the same sequences."""
    return [mesh.context, mesh.tensor] if residual.is_shard() else [mesh.context]


def fsdp_mesh(experts_mesh: DeviceMesh, mesh: Mesh, reducer: GradientReducer) -> DeviceMesh:
    """The mesh over which FSDP shards the experts of a rank, with the dimensions of ``reducer.mesh``."""
    shard = experts_mesh["expert_shard"]
    return DeviceMesh._concatenate([mesh.world["replicate"], shard]) if reducer.mesh.ndim > 1 else shard


def sum_exactly(experts: nn.Module, reducer: GradientReducer, mesh: DeviceMesh) -> None:
    """Let ``experts``, which FSDP has sharded over ``mesh``, sum gradients as the exact ``reducer`` does."""
    from torchtrain.plugins.exact_sums.exact_sums import ExactGradientReducer
    from torchtrain_moe.exact import ExactExpertSums, Summand

    assert isinstance(reducer, ExactGradientReducer)
    assert isinstance(experts, Experts)
    assert isinstance(experts, FSDPModule)
    sums = ExactExpertSums(reducer.sums, mesh, reducer.param_dtype)
    experts.as_summand = lambda weight, name: Summand.apply(weight, sums, name)
    experts.set_custom_reduce_scatter(sums)
    experts.set_all_reduce_hook(sums.after_all_reduce)


def shard_experts(experts: Experts, group: DeviceMesh | None, tensor: DeviceMesh | None) -> None:
    """Shard the parameters, on the meta device: the experts over ``group``, the inner width of each over ``tensor``."""
    meshes = [axis for axis in (group, tensor) if axis is not None]
    if group is not None:
        experts.expert_group = group.get_group()
    if not meshes:
        return
    both = meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)
    for name, width in WIDTH.items():
        own = experts.get_parameter(name).detach()
        placements = []
        for axis in meshes:
            dim = 0 if axis is group else width
            own = own.chunk(axis.size(), dim)[axis.get_local_rank()]
            placements.append(Shard(dim))
        setattr(experts, name, nn.Parameter(DTensor.from_local(own.contiguous(), both, placements, run_check=False)))


@torch.no_grad()
def finish_step(model_parts: Sequence[Decoder], mesh: Mesh, skip: Tensor | None) -> None:
    """Sum what the routers of ``model_parts`` have counted over all ranks, and let their state follow the loads.

    ``skip``: see ``ModelSpec.finish_step``.
    """
    own = routers(model_parts)
    counted = [router.totals for router in own]
    for router in own:
        router.totals = None
    if skip is None or any(totals is None for totals in counted):
        return
    sums = torch.stack([totals for totals in counted if totals is not None])  # (layers, 2 E + 4)
    all_reduce(sums, group=mesh.stage.get_group())
    for router, totals in zip(own, sums, strict=True):
        router.finish_step(totals, mesh.degrees.tensor, skip)
