"""Fully sharded data parallelism (FSDP2) and hybrid sharding (HSDP), with per-parameter sharding."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtrain.config.schema import TrainingConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.models.spec import Decoder
from torchtrain.parallelisms.options import ParallelismConfig


def apply_fsdp(
    model: Decoder,
    reducer: GradientReducer,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    own_meshes: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
) -> None:
    """Apply ``fully_shard`` to each block, to the output layer, and then to the root, over ``reducer.mesh``.

    That mesh is 1-D (shard), or 2-D (replicate, shard) for HSDP. Modules in ``own_meshes`` are sharded over theirs.
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
        reshard = {"always": True, "never": False, "default": by_default}[parallelism.fsdp_reshard_after_forward]
        for child in block.modules():
            if child in own_meshes:
                shard(child, mesh=own_meshes[child], reshard_after_forward=reshard)
        shard(block, reshard_after_forward=reshard)
    own_group = shard_output_layer(model, shard) if reducer.by_block else set()
    always = parallelism.fsdp_reshard_after_forward == "always"
    shard(model, reshard_after_forward=always, ignored_params=own_group)
    modules = fsdp_modules(model)
    for module, reduce_scatter in zip(modules, reducer.reduce_scatters(len(modules)), strict=True):
        # Sum, not mean: each rank's loss is already divided by the tokens of the global batch. Without the second call,
        # NCCL would multiply every summand by a factor of 1, and gloo would fail, because it only supports plain sums.
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if reducer.after_all_reduce is not None:
            module.set_all_reduce_hook(reducer.after_all_reduce)
        if reduce_scatter is not None:
            module.set_custom_reduce_scatter(reduce_scatter)


def shard_output_layer(model: Decoder, shard: Callable[..., object]) -> set[nn.Parameter]:
    """Apply ``shard``, a partial ``fully_shard``, to the final norm and the output layer: they become one group.

    It is gathered while the last block computes, and its gradients are reduced while the backward of the blocks runs.
    Tied embeddings stay in the group of the root, because a parameter can only be in one group. Returns the parameters
    of the output layer, which the root must ignore.
    """
    if model.norm is None or model.output is None or model.config.tied_embeddings:
        return set()
    # FSDP's hooks must run once per microbatch, but the loss calls the output layer for each of its chunks. So only the
    # norm has hooks, and the output layer is its child while ``fully_shard`` collects the parameters of the group. The
    # loss uses them after the forward of the norm, and so they must not be resharded then.
    model.norm.add_module("output", model.output)
    shard(model.norm, reshard_after_forward=False)
    del model.norm.output
    return set(model.output.parameters())


def fsdp_modules(model: Decoder) -> list[FSDPModule]:
    """The modules that ``fully_shard`` was applied to, in forward order after the root."""
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
