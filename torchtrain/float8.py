"""The blocks' linear layers in float8, by torchao (https://github.com/pytorch/ao, torchao.float8)."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtrain.config.schema import Float8
from torchtrain.devices import compute_capability
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import Transformer, TransformerBlock, TransformerConfig

MULTIPLE = 16  # of both sides of a matrix, activations among them: what the float8 kernels ask for


def check_float8(
    config: Float8,
    model: TransformerConfig,
    device: torch.device,
    tensor_degree: int,
    tokens: int,
    *,
    shards: int = 1,
    offload: bool = False,
) -> None:
    """ConfigError where the package, the device or a shape cannot do it.

    ``tokens``: of a forward on a rank. ``shards``: ranks that FSDP splits a parameter over. ``offload``: whether
    parameters lie in CPU memory.
    """
    if config.recipe == "none":
        return
    given = f"float8.recipe = {config.recipe!r}"
    if device.type != "cuda" or compute_capability(device) < (8, 9):
        name = "one of {}.{}".format(*compute_capability(device)) if device.type == "cuda" else "a CPU"
        raise ConfigError(
            f"{given} needs a GPU of compute capability 8.9 or more (Ada, Hopper), not {name}; set 'none'"
        )
    if not importlib.util.find_spec("torchao"):
        raise ConfigError(f"{given} needs torchao: pip install 'torchtrain[float8]'")
    if tensor_degree > 1:
        raise ConfigError(f"{given} and parallelism.tensor_parallel_degree = {tensor_degree} do not go together yet")
    if tokens % MULTIPLE:
        raise ConfigError(
            f"{given} needs a multiple of {MULTIPLE} tokens at once, and a rank has {tokens}, of the sequences in a "
            "microbatch; change training.seq_len or training.local_batch_size, or set 'none'"
        )
    gathers = gathers_float8(config, shards)
    whole = "or set float8.enable_fsdp_float8_all_gather = false"
    if gathers and offload:
        raise ConfigError(
            f"{given} reduces the scales of what it gathers where the parameters lie: with training.enable_cpu_offload "
            f"= true in CPU memory, which NCCL does not reach; switch that off, {whole}"
        )
    with torch.device("meta"):
        block = TransformerBlock(model)
    for name in block.PRODUCTS:
        rows, columns = block.get_parameter(f"{name}.weight").shape
        if rows % MULTIPLE or columns % MULTIPLE:
            raise ConfigError(
                f"{given} needs matrices whose sides are multiples of {MULTIPLE}, and {name} is {rows} x {columns}; "
                "set 'none', or change the model's shape"
            )
        if gathers and rows % shards:
            raise ConfigError(
                f"{given} gathers float8 from {shards} shards, which must divide the rows of each matrix, and {name} "
                f"has {rows}; take other degrees of [parallelism], {whole}"
            )


def apply_float8(model: Transformer, config: Float8, *, shards: int, emulate: bool = False) -> None:
    """Swap the linear layers of the blocks, on the meta device; names and shapes of parameters stay.

    ``shards``: ranks that FSDP splits a parameter over. ``emulate`` computes float8's values in a wider dtype, slowly,
    on devices without it.
    """
    if config.recipe == "none":
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe: Any = replace(
        Float8LinearConfig.from_recipe_name(config.recipe),
        enable_fsdp_float8_all_gather=gathers_float8(config, shards),
        emulate=emulate,
    )
    for block in model.layers.values():
        convert_to_float8_training(block, config=recipe)


def gathers_float8(config: Float8, shards: int) -> bool:
    """Whether FSDP gathers the blocks' weights in float8."""
    return config.recipe == "tensorwise" and config.enable_fsdp_float8_all_gather and shards > 1


def compute_scales(parts: Sequence[nn.Module], *_: Any) -> None:
    """Compute the scales of all float8 weights by one all-reduce, not by one for each. Call it when weights changed."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)
