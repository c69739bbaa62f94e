"""Per-parameter sharding with FSDP2."""

from functools import partial
from itertools import pairwise

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtrain.config.schema import ParallelismConfig, TrainingConfig
from torchtrain.cpu.reduce_scatter import AllToAllReduceScatter, NoReduceScatter
from torchtrain.devices import device_kind
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.llama.model import Transformer
from torchtrain.parallelisms.exact_sums import ExactReduceScatter, ExactSums


def apply_fsdp(
    model: Transformer,
    meshes: Mesh,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    sums: ExactSums | None = None,
) -> None:
    """Shard each block and then the root over ``meshes.fsdp``: 1-D (shard), or 2-D (replicate, shard) for HSDP.

    One rank on a CPU is the exception: by default all is in the root's group. With ``sums`` the mesh is always 2-D:
    only then FSDP adds up microbatches in its reduce_dtype.
    """
    mesh = meshes.fsdp if sums is None else meshes.hsdp
    dtype = getattr(torch, training.mixed_precision_param)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=reduce_dtype(training),
        # The blocks' only float input that is not yet in param_dtype is the RoPE tables, which must stay float32.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()
    # Groups by block let transfers overlap with computing, and memory be freed in between. One rank transfers nothing,
    # and on a CPU each group only takes time of the host.
    on_cpu = device_kind(mesh.device_type) == "cpu"
    by_block = mesh.size() > 1 or not on_cpu or parallelism.fsdp_reshard_after_forward != "default"
    blocks = list(model.layers.values()) if by_block else []
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for i, block in enumerate(blocks):
        # Backward starts with the last block: freed after forward, it would be gathered again at once. On one rank
        # nothing is gathered, but a freed block would be cast to param_dtype again.
        by_default = i < len(blocks) - 1 and parallelism.pipeline_parallel_degree == 1 and mesh.size() > 1
        reshard = {"always": True, "never": False, "default": by_default}
        shard(block, reshard_after_forward=reshard[parallelism.fsdp_reshard_after_forward])
    shard(model, reshard_after_forward=parallelism.fsdp_reshard_after_forward == "always")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the root, then its blocks
    for module in modules:
        # Sum, not mean: each rank's loss is already divided by the tokens of the whole global batch. By plain sums,
        # since gloo has no other reduction.
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if sums is not None:
            module.set_custom_reduce_scatter(ExactReduceScatter(sums, dtype, mesh, parallelism.fsdp_exact_transport))
        elif on_cpu:
            module.set_custom_reduce_scatter(AllToAllReduceScatter() if mesh.size() > 1 else NoReduceScatter())
    if on_cpu and mesh.size() > 1:
        # Gather each block while the one before computes, without the streams that a GPU has for it.
        modules[0]._set_unshard_async_op(True)
        for block, following in pairwise(modules[1:]):
            block.set_modules_to_forward_prefetch([following])


def reduce_dtype(training: TrainingConfig) -> torch.dtype:
    """In which gradients are reduced over ranks."""
    return torch.int64 if training.sums == "exact" else getattr(torch, training.mixed_precision_reduce)


def set_accumulation(model: FSDPModule, accumulation: str, is_last: bool) -> None:
    """Call it before each backward. ``accumulation``: ``parallelism.fsdp_gradient_accumulation``."""
    if accumulation == "unsharded":
        model.set_requires_gradient_sync(is_last)
    else:
        # Every microbatch is reduce-scattered over the shards; HSDP's all-reduce over replicas waits for the last.
        model.set_requires_all_reduce(is_last)
