"""Apply parallelisms and optimizations to a model: TP, CP, activation checkpointing, torch.compile and FSDP."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.config.registry import GRADIENT_REDUCERS
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.errors import ConfigError
from torchtrain.models.parameters import full_name
from torchtrain.models.spec import Decoder
from torchtrain.parallelisms.activation_checkpoint import apply_activation_checkpoint
from torchtrain.parallelisms.compile import apply_compile, set_async_tensor_parallel
from torchtrain.parallelisms.context_parallel import apply_context_parallel
from torchtrain.parallelisms.fsdp import apply_fsdp
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.parallelisms.model_split import model_split
from torchtrain.parallelisms.tensor_parallel import PLAIN_STYLES, apply_tensor_parallel


def parallelize_llama(
    model: Decoder,
    mesh: Mesh,
    config: JobConfig,
    reducer: GradientReducer | None = None,
    own_meshes: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
) -> None:
    """Parallelize ``model``, or a pipeline stage of it, in place; it must be on the meta device.

    A single rank takes the same code path as many. ``reducer`` is shared by the pipeline stages of a rank; by default
    it is that of the config. ``own_meshes``: modules of blocks which FSDP shards over other meshes (``Mesh.divided``),
    because their parameters are already sharded over the remaining ranks.
    """
    if reducer is None:
        reducer = build_gradient_reducer(config, mesh)
    parallelism = config.parallelism
    conversion = linear_conversion(config)
    if conversion is not None:
        conversion.convert(model, mesh.degrees.fsdp)
    split = model_split(config)
    if split is not None:
        split.apply(model, mesh)
    else:
        if mesh.degrees.tensor > 1:
            styles = PLAIN_STYLES if conversion is None else conversion.styles()
            apply_tensor_parallel(
                model, mesh.tensor, sequence_parallel=parallelism.enable_sequence_parallel, styles=styles
            )
        if mesh.degrees.context > 1:
            apply_context_parallel(model, mesh.context)
    if config.activation_checkpoint.mode not in ("none", "memory_budget"):  # apply_compile implements memory_budget
        apply_activation_checkpoint(model, config.activation_checkpoint)
    if config.compile.enable:
        uses_async = mesh.degrees.tensor > 1 and parallelism.enable_async_tensor_parallel
        set_async_tensor_parallel(mesh.tensor if uses_async else None)
        apply_compile(model, config.activation_checkpoint)
    apply_fsdp(model, reducer, config.training, parallelism, own_meshes)
    check_meshes(model, reducer.mesh, mesh.tensor, own_meshes)


def build_gradient_reducer(config: JobConfig, mesh: Mesh) -> GradientReducer:
    """The gradient reducer that ``training.sums`` selects."""
    kind: type[GradientReducer] = GRADIENT_REDUCERS[config.training.sums]
    return kind.build(config, mesh)


def check_meshes(
    model: Decoder,
    fsdp: DeviceMesh,
    tensor: DeviceMesh,
    own_meshes: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
) -> None:
    """Raise ConfigError unless each parameter is a DTensor on all mesh dimensions that shard the model.

    On ranks of a missing dimension, copies of the parameter would diverge. A module in ``own_meshes`` divides the
    dimensions further: its parameters must be on as many ranks.
    """
    divided = {parameter for module in own_meshes for parameter in module.parameters()}
    expected = (*(fsdp.mesh_dim_names or ()), *(("tensor",) if tensor.size() > 1 else ()))
    for name, parameter in model.named_parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        axes = () if mesh is None else mesh.mesh_dim_names
        on_all = mesh is not None and parameter in divided and mesh.size() == fsdp.size() * tensor.size()
        if axes != expected and not on_all:
            module = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"model.name = {model.config.family!r}: {full_name(name)} is on the mesh {axes}, not {expected}. "
                "Tensor parallelism supports nn.RMSNorm, and the linear layers that the ModelSpec lists: add a linear "
                f"layer to linear_layers; for other modules (this one is a {module}), set ModelSpec.parallelize "
                "(docs/own-architecture.md)"
            )
