"""Private names of PyTorch that torchtrain uses, and their purposes. Unless noted otherwise they exist since 2.11.

PyTorch may change them without notice; ``tests/test_torch_internals.py`` detects that. A name is looked up when it is
first imported from this module, so that a command does not import what it does not use.
"""

import json
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:  # base classes, which mypy must know
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter

FSDP, CHECKPOINT = "torch.distributed.fsdp._fully_shard", "torch.distributed.algorithms._checkpoint"

# Names that can be imported from this module: the module that each is in, and its purpose.
NAMES = {
    "ReduceScatter": (f"{FSDP}._fsdp_api", "FSDP's reduce-scatter on CPUs, and with exact sums"),
    # The public function has one name in 2.11, and another in 2.13.
    "DefaultReduceScatter": (f"{FSDP}._fsdp_collectives", "exact sums by the backend's reduce-scatter"),
    "checkpoint_wrapper": (f"{CHECKPOINT}.checkpoint_wrapper", "activation checkpointing that keeps parameters' names"),
    "inductor_compiled_code": ("torch._higher_order_ops.wrap", "selective checkpointing keeps compiled attention"),
    "enable_symm_mem_for_group": ("torch.distributed._symmetric_memory", "asynchronous tensor parallelism; until 2.12"),
    "find_reduce_scatter_patterns": (
        "torch._inductor.fx_passes.micro_pipeline_tp",
        "asynchronous tensor parallelism: the inputs of reduce-scatters in a compiled graph",
    ),
    "_get_default_store": ("torch.distributed.distributed_c10d", "leave the store last on rank 0, which may host it"),
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils",
        "the part of a tensor that a rank holds",
    ),
    "_clear_sharding_prop_cache": ("torch.distributed.tensor.debug", "forget meshes whose groups are destroyed"),
    "_streaming_load": ("torch.distributed._serialization", "read tensors from a connection"),
}

# Members that are used, replaced or set, and their purposes.
MEMBERS = {
    "torch.distributed.fsdp.FSDPModule._set_unshard_async_op": "blocks gathered ahead on CPUs",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "one group of several dimensions",
    "torch.distributed.device_mesh.DeviceMesh._unflatten": "a dimension divided further, for experts",
    "torch.distributed.device_mesh.DeviceMesh._concatenate": "the mesh of replicas and shards",
    "torch.distributed.ProcessGroupGloo._Options._threads": "one thread per gloo group",
    "torch.distributed.ProcessGroupGloo._Options._devices": "the same",
    "torch.distributed.ProcessGroupGloo._Options._timeout": "the same",
    "torch.distributed.tensor.parallel.RowwiseParallel._prepare_output_fn": "an embedding that waits for its result",
    "torch.distributed.tensor.parallel.PrepareModuleInput._prepare_input_fn": "gather only the first input of a module",
    "torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops": "V-shaped pipelines on gloo; until 2.14",
    f"{FSDP}._fsdp_state.FSDPState._root_post_backward_final_callback": "pipelines that accumulate shards, since 2.15",
    "torch._functorch.config.activation_memory_budget": "activation_checkpoint.mode = memory_budget",
    "torch._functorch.config.unsafe_treat_script_objects_as_zero_size": "the same with tensor parallelism, since 2.13",
    "torch._functorch.partitioners.has_recomputable_rng_ops": "a block without random numbers, compiled on a CPU",
    "torch._inductor.config._micro_pipeline_tp": "asynchronous tensor parallelism",
    "torch._inductor.config.post_grad_custom_pre_pass": "the same: a pass before Inductor's",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "the same",
    "torch._inductor.custom_graph_pass.get_hash_for_files": "the same",
    "torch._fused_sdp_choice": "the name of the attention kernel in use",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "whether a CPU multiplies in bfloat16",
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": "whether a CPU multiplies in float16",
    "torch._foreach_mul_": "scale all gradients: clipping, exact sums",
    "torch._foreach_copy_": "copy the reduced gradients of norms back",
    "torch.cuda.memory._record_memory_history": "memory snapshots",
    "torch.cuda.memory._snapshot": "memory snapshots",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "the metadata of checkpoints",
    "torch.distributed.checkpoint.filesystem._StorageWriterTransforms.transform_save_stream": "a hash per tensor",
    "torch.serialization._get_layout": "the metadata of checkpoints",
}


def all_groups() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set the timeout of collectives of ``group``. Public in torch 2.14, where the private function warns."""
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def flight_record() -> list[dict[str, Any]]:
    """Collectives of this rank in the flight recorders, of NCCL and of the other backends."""
    c10d: Any = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # the second one where torch is built for GPUs
        if dump := getattr(c10d, name, None):
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ())
    return entries


def forget_meshes() -> None:
    """Clear DTensor's cache of results of operations; call it when process groups are destroyed.

    It finds a result by the ranks and the names of dimensions of a mesh. Results on a later mesh would be on an earlier
    one, whose groups do not exist, or whose names are those of other groups now.
    """
    import_private("_clear_sharding_prop_cache", *NAMES["_clear_sharding_prop_cache"])()


@cache
def allow_integer_reductions() -> None:
    """Let FSDP reduce gradients in an integer dtype.

    Since 2.15 it has autograd convert gradients to the dtype of the reduction, which is an error for integers.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    dtype: Any = getattr(FSDPParam, "unsharded_grad_dtype", None)
    if dtype is not None:

        def unsharded_grad_dtype(parameter: Any) -> torch.dtype | None:
            reduced: torch.dtype | None = dtype.fget(parameter)
            return reduced if reduced is None or reduced.is_floating_point else None

        FSDPParam.unsharded_grad_dtype = property(unsharded_grad_dtype)  # type: ignore[attr-defined]  # since 2.15


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"{__name__} has no {name}")
    return import_private(name, *NAMES[name])


def import_private(name: str, module: str, purpose: str) -> Any:
    """Import ``name`` from ``module``; the ImportError, if it does not exist, says how it is used: ``purpose``."""
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ImportError) as error:
        raise ImportError(f"this PyTorch has no {module}.{name} ({purpose}); take 2.11 to 2.15") from error
