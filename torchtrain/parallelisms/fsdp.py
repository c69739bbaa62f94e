"""Fully sharded data parallelism (FSDP2) and hybrid sharding (HSDP), with per-parameter sharding."""

from functools import partial
from itertools import pairwise

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtrain.config.schema import ParallelismConfig, TrainingConfig
from torchtrain.cpu.reduce_scatter import AllToAllReduceScatter, NoReduceScatter
from torchtrain.devices import device_kind
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.models.spec import Decoder


def apply_fsdp(
    model: Decoder, reducer: GradientReducer, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Apply ``fully_shard`` to each block and then to the root, over ``reducer.mesh``.

    That mesh is 1-D (shard), or 2-D (replicate, shard) for HSDP. On a single CPU rank, all parameters are in the root's
    FSDP group by default.
    """
    mesh = reducer.mesh
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=reducer.dtype,
        # The only float inputs of a block that are not in param_dtype are the RoPE tables, which must stay float32.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()
    # One FSDP group per block lets communication overlap with computation and frees memory in between. A single rank
    # has no communication, and on a CPU each group only adds host overhead.
    on_cpu = device_kind(mesh.device_type) == "cpu"
    by_block = mesh.size() > 1 or not on_cpu or parallelism.fsdp_reshard_after_forward != "default"
    blocks = list(model.layers.values()) if by_block else []
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for i, block in enumerate(blocks):
        # Backward starts with the last block: if it were resharded after forward, it would be all-gathered again
        # immediately. On one rank there is no all-gather, but a resharded block would be cast to param_dtype again.
        by_default = i < len(blocks) - 1 and parallelism.pipeline_parallel_degree == 1 and mesh.size() > 1
        reshard = {"always": True, "never": False, "default": by_default}
        shard(block, reshard_after_forward=reshard[parallelism.fsdp_reshard_after_forward])
    shard(model, reshard_after_forward=parallelism.fsdp_reshard_after_forward == "always")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the root, then its blocks
    for module in modules:
        # Sum, not mean: each rank's loss is already divided by the tokens of the global batch. Plain sums, because
        # gloo supports no other reduction.
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        reduce_scatter = reducer.reduce_scatter()
        if reduce_scatter is not None:
            module.set_custom_reduce_scatter(reduce_scatter)
        elif on_cpu:
            module.set_custom_reduce_scatter(AllToAllReduceScatter() if mesh.size() > 1 else NoReduceScatter())
    if on_cpu and mesh.size() > 1:
        # Prefetch: all-gather each block while the previous one computes. A CPU has no separate streams for that.
        modules[0]._set_unshard_async_op(True)
        for block, following in pairwise(modules[1:]):
            block.set_modules_to_forward_prefetch([following])


def set_accumulation(model: FSDPModule, accumulation: str, is_last: bool) -> None:
    """Configure gradient accumulation for the next backward; call it before each one.

    ``accumulation`` is ``parallelism.fsdp_gradient_accumulation``; ``is_last`` is true for a step's last microbatch.
    """
    if accumulation == "unsharded":
        model.set_requires_gradient_sync(is_last)
    else:
        # Gradients of every microbatch are reduce-scattered; HSDP's all-reduce over replicas runs only in the last one.
        model.set_requires_all_reduce(is_last)
