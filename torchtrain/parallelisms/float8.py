"""Float8 training of the blocks' linear layers with torchao (https://github.com/pytorch/ao, torchao.float8)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torchtrain.config.schema import Float8Config
from torchtrain.models.spec import Decoder
from torchtrain.parallelisms.tensor_parallel import PLAIN_STYLES, LinearStyles


def apply_float8(model: Decoder, config: Float8Config, *, shards: int, emulate: bool = False) -> None:
    """Convert the linear layers of the blocks to float8, on the meta device; parameter names and shapes do not change.

    ``shards`` is the number of ranks over which FSDP shards a parameter. ``emulate`` computes float8 values in a wider
    dtype, which is slow, on devices without float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe: Any = replace(
        Float8LinearConfig.from_recipe_name(config.recipe),
        enable_fsdp_float8_all_gather=gathers_float8(config, shards),
        emulate=emulate,
    )
    for block in model.layers.values():
        convert_to_float8_training(block, config=recipe)


def gathers_float8(config: Float8Config, shards: int) -> bool:
    """Whether FSDP all-gathers the weights of the blocks in float8."""
    return config.recipe == "tensorwise" and config.enable_fsdp_float8_all_gather and shards > 1


def compute_scales(model_parts: Sequence[nn.Module]) -> None:
    """Compute the scales of all float8 weights with a single all-reduce. Call it whenever the weights change."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in model_parts:
        precompute_float8_dynamic_scale_for_fsdp(part)


def tensor_parallel_styles(config: Float8Config) -> LinearStyles:
    """The styles with which tensor parallelism shards the linear layers.

    With rowwise scaling, activations are gathered in their own dtype: the layers cast them afterwards, and DTensor
    reduces the largest absolute values of rows that are sharded.
    """
    if config.recipe != "tensorwise":
        return PLAIN_STYLES
    from torchtrain.parallelisms.float8_tensor_parallel import FLOAT8_STYLES

    return FLOAT8_STYLES
