"""Private names of PyTorch that the planner uses, and their purposes; see ``torchtrain/torch_internals.py``."""

from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import PipelineStage

from torchtrain.torch_internals import FSDP, import_private

if TYPE_CHECKING:  # a base class, which mypy must know
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Names that can be imported from this module: the module that each is in, and its purpose.
NAMES = {
    "TorchDispatchMode": ("torch.utils._python_dispatch", "see each operation"),
    "tree_leaves": ("torch.utils._pytree", "tensors in the arguments of an operation"),
    "tree_map_only": ("torch.utils._pytree", "tensors in the results of an operation, replaced"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "tensors without data"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "tensors without data"),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor", "operations on the fake tensors of a compiled graph"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "simulated ranks"),
    "_resolve_process_group": ("torch.distributed.distributed_c10d", "the group of a functional collective"),
    "FSDPParamGroup": (f"{FSDP}._fsdp_param_group", "when FSDP gathers, reduces and waits"),
    "ShardingPropagator": ("torch.distributed.tensor._sharding_prop", "leave out DTensor's trial tensors"),
    "_PipelineSchedule": ("torch.distributed.pipelining.schedules", "static shapes, without a vote of the ranks"),
    "InferenceMode": ("torch.distributed.pipelining._utils", "shapes that need no warm-up, since 2.13"),
    "_scoped_library": ("torch.library", "a kernel that CPUs lack, during a simulation"),
    "aot_autograd": ("torch._dynamo.backends.common", "the graphs that Inductor would compile"),
    "min_cut_rematerialization_partition": (
        "torch._functorch.partitioners",
        "the activations that a compiled block saves",
    ),
    "select_decomp_table": ("torch._inductor.decomposition", "the operations of a compiled block"),
    "micro_pipeline_tp_pass": (
        "torch._inductor.fx_passes.micro_pipeline_tp",
        "the collectives that asynchronous tensor parallelism overlaps",
    ),
}

SINCE_2_15 = hasattr(PipelineStage, "start_gradient_reduction")
"""Whether pipelines are those of PyTorch 2.15 or later."""

SHARDING = "torch.distributed.tensor._sharding_prop"

# Members that are used, replaced or set, and their purposes.
MEMBERS = {
    "torch._functorch.config.patch": "undo the memory budget of a simulation",
    f"{SHARDING}.ShardingPropagator._propagate_tensor_meta_non_cached": "leave out DTensor's trial tensors",
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.wait_for_unshard": "when FSDP waits",
    "torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group": "collectives that the compiler would fuse",
    "torch._C._current_autograd_node": "forward or backward",
    "torch._ops.OpOverload": "kinds of operations",
    "torch._ops.OperatorBase": "kinds of operations",
    "torch._ops.HigherOrderOperator": "kinds of operations",
    "torch._dynamo.reset": "forget compiled blocks",
    "torch.optim.adam._get_value": "the number of steps",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"{__name__} has no {name}")
    return import_private(name, *NAMES[name])
