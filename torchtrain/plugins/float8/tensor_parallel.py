"""Tensor parallelism of linear layers in float8 with tensorwise scaling, by the parallel styles of torchao.

Activations, and in backward the gradients of the outputs, are cast to float8 before they are all-gathered. The scale of
a tensor is that of all its shards: DTensor reduces the largest absolute value over the tensor-parallel ranks. So the
float8 numbers are those of one rank.
"""

from copy import copy
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

from torchtrain.parallelisms.tensor_parallel import GatherInput, LinearStyles


class Float8GatherInput(GatherInput, PrepareFloat8ModuleInput):  # type: ignore[misc]
    """GatherInput that casts the input to float8 first: all linear layers of the module share the result."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # A copy for each module, because it takes its float8 config from the module's first layer. With the config of
        # another block, that block would be compiled separately.
        return super(Float8GatherInput, copy(self))._apply(module, device_mesh)


class Float8Colwise(Float8ColwiseParallel):  # type: ignore[misc]
    """Float8ColwiseParallel that leaves the output's gradient as it is where there is a bias.

    Float8ColwiseParallel casts it to float8, and would compute the gradient of the bias from the result. The layer
    itself casts it for its matrix products, as on one rank.
    """

    @staticmethod
    def _prepare_output_fn(layouts: Any, use_local: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Any:
        style: Any = Float8ColwiseParallel if module.bias is None else ColwiseParallel
        return style._prepare_output_fn(layouts, use_local, module, outputs, mesh)


class Float8Rowwise(Float8RowwiseParallel):  # type: ignore[misc]
    """Float8RowwiseParallel that leaves the output's gradient as it is where there is a bias, as ``Float8Colwise``."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, use_local: bool, module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Any:
        style: Any = Float8RowwiseParallel if module.bias is None else RowwiseParallel
        return style._prepare_output_fn(layouts, use_local, module, outputs, mesh)


FLOAT8_STYLES = LinearStyles(Float8GatherInput, Float8Colwise, Float8Rowwise)
