"""Per-parameter sharding with FSDP2."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtrain.config.schema import Parallelism, Training
from torchtrain.devices import device_kind
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import on_one_machine
from torchtrain.models.llama.model import Transformer
from torchtrain.parallelisms.exact_sums import ExactReduceScatter, ExactSums
from torchtrain.torch_internals import ReduceScatter


def apply_fsdp(
    model: Transformer, meshes: Mesh, training: Training, parallelism: Parallelism, sums: ExactSums | None = None
) -> None:
    """Shard each block and then the root over ``meshes.fsdp``: 1-D (shard), or 2-D (replicate, shard) for HSDP.

    One rank on a CPU is the exception: by default all is in the root's group. With ``sums`` the mesh is always 2-D:
    only then FSDP adds up microbatches in its reduce_dtype.
    """
    mesh = meshes.fsdp if sums is None else meshes.hsdp
    dtype = getattr(torch, training.mixed_precision_param)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.int64 if sums is not None else getattr(torch, training.mixed_precision_reduce),
        # The blocks' only float input that is not yet in param_dtype is the RoPE tables, which must stay float32.
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else OffloadPolicy()
    # Groups let transfers overlap with computing, and memory be freed in between. One rank transfers nothing, and a CPU
    # has no queue of kernels to hide what each group costs the host.
    on_cpu = device_kind(mesh.device_type) == "cpu"
    by_block = mesh.size() > 1 or not on_cpu or parallelism.fsdp_reshard_after_forward != "default"
    blocks = list(model.layers.values()) if by_block else []
    for i, block in enumerate(blocks):
        # Backward starts with the last block: freeing it after forward would gather it twice.
        # On one rank nothing is gathered, and freeing would only cast twice.
        by_default = i < len(blocks) - 1 and parallelism.pipeline_parallel_degree == 1 and mesh.size() > 1
        reshard = {"always": True, "never": False, "default": by_default}
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard[parallelism.fsdp_reshard_after_forward],
        )
    fully_shard(
        model,
        mesh=mesh,
        mp_policy=policy,
        offload_policy=offload,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward == "always",
    )
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if sums is not None:
            shards = mesh.get_group(1)
            transport = parallelism.fsdp_exact_transport
            if transport == "auto":
                transport = "all_to_all" if on_cpu or on_one_machine(shards) else "ring"
            all_to_all = transport == "all_to_all"
            module.set_custom_reduce_scatter(ExactReduceScatter(sums, dtype, shards.size(), all_to_all=all_to_all))
        elif mesh.size() == 1:
            module.set_custom_reduce_scatter(_NoReduceScatter())
        elif on_cpu:
            module.set_custom_reduce_scatter(_AllToAllReduceScatter())
        if mesh.size() == 1:
            continue
        # Sum, not mean: each rank's loss is already divided by the tokens of the whole global batch. By plain sums,
        # since gloo has no other reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if on_cpu:
            # Where there are no streams, only this lets a prefetched block arrive while another computes.
            module._set_unshard_async_op(True)
    if on_cpu:
        for block, following in pairwise(blocks):
            cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def set_accumulation(model: FSDPModule, accumulation: str, is_last: bool) -> None:
    """Before a backward: whether it is of the last microbatch, and how those accumulate (``Parallelism``)."""
    if accumulation == "unsharded":
        model.set_requires_gradient_sync(is_last)
    else:
        # Each is reduced over the shards; over the replicas of HSDP their sum is.
        model.set_requires_all_reduce(is_last)


class _NoReduceScatter(ReduceScatter):
    """On one rank: the input is the output, and FSDP's copy from one to the other costs nothing."""

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input, which FSDP asks for first; then the output."""
        if self.input is None:
            self.input = torch.empty(*size, dtype=dtype, device=device)
            return self.input
        output, self.input = self.input, None
        return output

    def __call__(self, *_: Any, **__: Any) -> None:
        """Never called by FSDP on one rank."""
        raise NotImplementedError


class _AllToAllReduceScatter(ReduceScatter):
    """For gloo, whose own takes longer: every rank gets all summands of its shard and adds them itself."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Only what ``apply_fsdp`` has FSDP ask for: a sum that is there when this returns."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        summands = torch.empty_like(input_tensor)
        dist.all_to_all_single(summands, input_tensor, group=group)
        torch.sum(summands.view(group.size(), -1), dim=0, out=output_tensor)
