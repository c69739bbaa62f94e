"""Names of parameters, and the part of a parameter that this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtrain.torch_internals import compute_local_shape_and_global_offset

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def full_name(name: str) -> str:
    """Parameter name without the prefixes that activation checkpointing and torch.compile add."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def module_in_block(name: str) -> str:
    """Name within its block of the module that has the parameter ``name``: ``layers.3.attention.wq.weight`` gives
    ``attention.wq``. Parameters outside of blocks give names that no block has."""
    return name.rpartition(".")[0].partition("layers.")[2].partition(".")[2]


def local_block(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of ``tensor`` (a tensor, or a DTensor of any placement), and its global position as slices."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tensor.to_local()
    assert tuple(part.shape) == tuple(shape)
    return part, tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
