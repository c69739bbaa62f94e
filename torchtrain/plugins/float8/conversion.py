"""Float8 training of the blocks' linear layers with torchao (https://github.com/pytorch/ao, torchao.float8)."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.parameters import module_in_block
from torchtrain.models.spec import Decoder, DecoderConfig, matrix_shapes, spec_of
from torchtrain.optional_packages import install_command
from torchtrain.parallelisms.linear_conversion import LinearConversion
from torchtrain.parallelisms.tensor_parallel import PLAIN_STYLES, LinearStyles
from torchtrain.plugins.float8.options import Float8Config

MULTIPLE = 16  # float8 kernels require the sizes of weights and activations to be multiples of it


class Float8(LinearConversion):
    """Converts the linear layers of the blocks to float8.

    Args:
        options: the section [float8].
        emulate: compute float8 values in a wider dtype, which is slow, on devices without float8.
    """

    def __init__(self, options: Float8Config, *, emulate: bool = False) -> None:
        self.options = options
        self.emulate = emulate

    @property
    def label(self) -> str:
        return f"float8 ({self.options.recipe})"

    def check(
        self,
        config: JobConfig,
        degrees: ParallelDims,
        model: DecoderConfig,
        tokens: int,
        capability: tuple[int, int] | None,
    ) -> None:
        given = f"float8.recipe = {self.options.recipe!r}"
        if capability is None or capability < (8, 9):
            found = "this is a CPU" if capability is None else "this one has {}.{}".format(*capability)
            raise ConfigError(
                f"{given} needs a GPU of compute capability 8.9 or higher (Ada, Hopper), and {found}; set 'none'"
            )
        if not importlib.util.find_spec("torchao"):
            raise ConfigError(f"{given} needs the package torchao: {install_command('float8')}")
        if tokens % MULTIPLE:
            raise ConfigError(
                f"{given} needs a multiple of {MULTIPLE} tokens at once, and a rank has {tokens}, those of a "
                "microbatch; change training.seq_len or training.local_batch_size, or set 'none'"
            )
        gathers = gathers_float8(self.options, degrees.fsdp)
        alternative = "or set float8.enable_fsdp_float8_all_gather = false"
        if gathers and config.training.enable_cpu_offload:
            raise ConfigError(
                f"{given} reduces the scales of the gathered weights over ranks: with training.enable_cpu_offload = "
                f"true in CPU memory, which NCCL does not support; switch that off, {alternative}"
            )
        sizes = [size for parameter, size in matrix_shapes(model).items() if module_in_block(parameter)]
        shares_inputs = self.options.recipe == "tensorwise" and degrees.tensor > 1
        if shares_inputs and not all(self.is_converted(*size) for size in sizes):
            raise ConfigError(
                f"float8.filter_small_layers = true leaves out some layers of this model, but with {given} the layers "
                f"of a block share inputs that tensor-parallel ranks gather in float8; set it to false"
            )
        styles = spec_of(model).linear_layers
        on_ranks = f" on each of {degrees.tensor} tensor-parallel ranks" if degrees.tensor > 1 else ""
        for parameter, (rows, columns) in matrix_shapes(model).items():
            name = module_in_block(parameter)
            if not name or not self.is_converted(rows, columns):  # the output layer has no name in a block
                continue
            if styles.get(name) == "colwise":
                rows //= degrees.tensor
            elif styles.get(name) == "rowwise":
                columns //= degrees.tensor
            if rows % MULTIPLE or columns % MULTIPLE:
                lower = ", or lower parallelism.tensor_parallel_degree" if degrees.tensor > 1 else ""
                raise ConfigError(
                    f"{given} needs weights whose dimensions are multiples of {MULTIPLE}, and {name} is {rows} x "
                    f"{columns}{on_ranks}; set 'none', or change [model.shape]{lower}"
                )
            if gathers and rows % degrees.fsdp:
                raise ConfigError(
                    f"{given} gathers float8 weights from {degrees.fsdp} shards, which must divide the rows of each "
                    f"matrix, and {name} has {rows}{on_ranks}; change the degrees in [parallelism], {alternative}"
                )

    def convert(self, model: Decoder, shards: int) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe: Any = replace(
            Float8LinearConfig.from_recipe_name(self.options.recipe),
            enable_fsdp_float8_all_gather=gathers_float8(self.options, shards),
            emulate=self.emulate,
        )

        def is_converted(layer: nn.Module, _: str) -> bool:
            return isinstance(layer, nn.Linear) and self.is_converted(*layer.weight.shape)

        for block in model.layers.values():
            convert_to_float8_training(block, module_filter_fn=is_converted, config=recipe)

    def is_converted(self, outputs: int, inputs: int) -> bool:
        """Whether a layer of these sizes is converted; with ``filter_small_layers`` by torchao's rule.

        The rule is that of ``_auto_filter_for_recipe`` in torchao/float8/float8_linear_utils.py (torchao 0.18).
        """
        if not self.options.filter_small_layers:
            return True
        if self.options.recipe == "tensorwise":
            return outputs > 1024 or inputs > 4096
        return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)

    def styles(self) -> LinearStyles:
        """Those of float8 with tensorwise scaling.

        With rowwise scaling, activations are gathered in their own dtype: the layers cast them afterwards, and DTensor
        reduces the largest absolute values of rows that are sharded.
        """
        if self.options.recipe != "tensorwise":
            return PLAIN_STYLES
        from torchtrain.plugins.float8.tensor_parallel import FLOAT8_STYLES

        return FLOAT8_STYLES

    def after_change(self, model_parts: Sequence[nn.Module], shards: int) -> None:
        """Compute the scales of all weights that are gathered in float8 with a single all-reduce."""
        if not gathers_float8(self.options, shards):
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in model_parts:
            precompute_float8_dynamic_scale_for_fsdp(part)


def gathers_float8(config: Float8Config, shards: int) -> bool:
    """Whether FSDP all-gathers the weights of the blocks in float8."""
    return config.recipe == "tensorwise" and config.enable_fsdp_float8_all_gather and shards > 1
