"""torch.compile, block by block, and its options."""

import logging
import warnings

from torch.distributed.device_mesh import DeviceMesh

from torchtrain.config.schema import ActivationCheckpointConfig
from torchtrain.models.llama.model import Transformer
from torchtrain.torch_internals import enable_symm_mem_for_group


def apply_compile(model: Transformer, activation_checkpoint: ActivationCheckpointConfig) -> None:
    """Compile block by block: one compilation serves all of them, and a graph of one block is quick to make."""
    import torch._functorch.partitioners  # slow to import

    if activation_checkpoint.mode == "memory_budget":
        torch._functorch.config.activation_memory_budget = activation_checkpoint.memory_budget
        # Tensor parallelism's mesh, which holds no tensors; torch 2.13 will not count it otherwise.
        if hasattr(torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"):
            torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
    # It warns of in-place operations under selective checkpointing. A block has none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # Nothing in a block is random, so that no generator's state need be kept for what is computed again. On a CPU torch
    # 2.13 would return that state after tensor parallelism's mesh, and take one for the other.
    torch._functorch.partitioners.has_recomputable_rng_ops = lambda fx_g: False  # noqa: ARG005
    for block in model.layers.values():
        # Not dynamic: sizes do not change in a run, and symbolic ones do not go through all of DTensor.
        block.compile(fullgraph=True, dynamic=False)


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler overlap the collectives of ``mesh`` with the matrix products before and after them (CUDA)."""
    import torch._inductor.config  # slow to import, and of no use elsewhere

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 does without
        enable_symm_mem_for_group(mesh.get_group().group_name)
