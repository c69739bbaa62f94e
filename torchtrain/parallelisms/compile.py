"""Apply torch.compile to each transformer block, and set compiler options."""

import logging
import warnings

from torch.distributed.device_mesh import DeviceMesh

from torchtrain.models.spec import Decoder
from torchtrain.parallelisms.options import ActivationCheckpointConfig
from torchtrain.torch_internals import enable_symm_mem_for_group


def apply_compile(model: Decoder, activation_checkpoint: ActivationCheckpointConfig) -> None:
    """Compile each block separately: all share one compilation, and the graph of a single block compiles quickly."""
    import torch._functorch.partitioners  # slow to import

    # Options of the process, which may have trained another stage before. 1 is torch's default.
    has_budget = activation_checkpoint.mode == "memory_budget"
    torch._functorch.config.activation_memory_budget = activation_checkpoint.memory_budget if has_budget else 1.0
    # Tensor parallelism adds its mesh to the graph, a script object without tensors, whose size torch 2.13 does not
    # count unless this option is set.
    if has_budget and hasattr(torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"):
        torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
    # This logger warns about in-place operations under selective activation checkpointing. Blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # No operation in a block is random, so recomputation needs no saved RNG state. On CPUs, torch 2.13 returns that
    # state and the mesh of tensor parallelism in the wrong order. torch has no option for it, so its function is
    # replaced in the whole process.
    torch._functorch.partitioners.has_recomputable_rng_ops = lambda fx_g: False  # noqa: ARG005
    for block in model.layers.values():
        # Not dynamic: sizes do not change during a run, and not all of DTensor supports symbolic sizes.
        block.compile(fullgraph=True, dynamic=False)


def set_async_tensor_parallel(mesh: DeviceMesh | None) -> None:
    """Async tensor parallelism: the compiler overlaps collectives of ``mesh`` with adjacent matmuls (CUDA).

    None disables it: the option is one of the process, which may have trained another stage before.
    """
    import torch._inductor.config  # imported here because it is slow to import and not needed elsewhere

    torch._inductor.config._micro_pipeline_tp = mesh is not None
    torch._inductor.config.post_grad_custom_pre_pass = None
    if mesh is None:
        return
    from torchtrain.parallelisms.async_tensor_parallel import FusibleCollectives

    torch._inductor.config.post_grad_custom_pre_pass = FusibleCollectives()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 no longer needs the call
        enable_symm_mem_for_group(mesh.get_group().group_name)
