"""Fully sharded data parallelism (FSDP2) and hybrid sharding (HSDP), with per-parameter sharding."""

from functools import partial

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtrain.config.schema import ParallelismConfig, TrainingConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.models.spec import Decoder


def apply_fsdp(
    model: Decoder, reducer: GradientReducer, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Apply ``fully_shard`` to each block and then to the root, over ``reducer.mesh``.

    That mesh is 1-D (shard), or 2-D (replicate, shard) for HSDP.
    """
    mesh = reducer.mesh
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=reducer.dtype,
        # The only float inputs of a block that are not in param_dtype are the RoPE tables, which must stay float32.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()
    blocks = list(model.layers.values()) if reducer.by_block else []
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for i, block in enumerate(blocks):
        # Backward starts with the last block: if it were resharded after forward, it would be all-gathered again
        # immediately. On one rank there is no all-gather, but a resharded block would be cast to param_dtype again.
        by_default = i < len(blocks) - 1 and parallelism.pipeline_parallel_degree == 1 and mesh.size() > 1
        reshard = {"always": True, "never": False, "default": by_default}
        shard(block, reshard_after_forward=reshard[parallelism.fsdp_reshard_after_forward])
    shard(model, reshard_after_forward=parallelism.fsdp_reshard_after_forward == "always")
    for module in fsdp_modules(model):
        # Sum, not mean: each rank's loss is already divided by the tokens of the global batch. Without the second call,
        # NCCL would multiply every summand by a factor of 1, and gloo would fail, because it only supports plain sums.
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        reduce_scatter = reducer.reduce_scatter()
        if reduce_scatter is not None:
            module.set_custom_reduce_scatter(reduce_scatter)


def fsdp_modules(model: Decoder) -> list[FSDPModule]:
    """The modules that ``fully_shard`` was applied to: the root, then its blocks."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def set_accumulation(model: FSDPModule, accumulation: str, is_last: bool) -> None:
    """Configure gradient accumulation for the next backward; call it before each one.

    ``accumulation`` is ``parallelism.fsdp_gradient_accumulation``; ``is_last`` is true for a step's last microbatch.
    """
    if accumulation == "unsharded":
        model.set_requires_gradient_sync(is_last)
    else:
        # Gradients of every microbatch are reduce-scattered; HSDP's all-reduce over replicas runs only in the last one.
        model.set_requires_all_reduce(is_last)
