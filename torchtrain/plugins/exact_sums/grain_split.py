"""Split a model into grains (``grains.py``)."""

from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from torchtrain.distributed.mesh import Mesh
from torchtrain.logging import logger
from torchtrain.models.loss import OutputLoss
from torchtrain.models.spec import Decoder, spec_of
from torchtrain.parallelisms.context_parallel import has_flash_kernel
from torchtrain.parallelisms.model_split import ModelSplit
from torchtrain.plugins.exact_sums.grain_layers import (
    ByTensorGrains,
    GrainAttention,
    GrainEmbedding,
    GrainHeadNorm,
    GrainLinear,
    GrainNorm,
    GrainOutput,
)
from torchtrain.plugins.exact_sums.grain_loss import GrainLoss
from torchtrain.plugins.exact_sums.grains import Grains
from torchtrain.plugins.exact_sums.options import GrainsConfig


class GrainSplit(ModelSplit):
    """``ModelSplit`` into the grains of [grains]."""

    def __init__(self, options: GrainsConfig, *, sequence_parallel: bool) -> None:
        self.options = options
        self.sequence_parallel = sequence_parallel

    def grains(self, mesh: Mesh) -> Grains:
        """The grains of this rank."""
        return Grains(mesh, self.options.tensor, self.options.context, sequence_parallel=self.sequence_parallel)

    def apply(self, model: Decoder, mesh: Mesh) -> None:
        grains = self.grains(mesh)
        split_model(model, grains)
        if "0" in model.layers:
            logger.info("%s", cost_of(grains, len(spec_of(model.config).linear_layers)))

    def loss(self, mesh: Mesh, *args: Any, **options: Any) -> OutputLoss:
        return GrainLoss(self.grains(mesh), *args, **options)


def cost_of(grains: Grains, linear_layers: int) -> str:
    """What the grains cost a rank, in kernels of a block with ``linear_layers``."""
    own, chunks = grains.own, len(grains.chunks)
    norms = (own if grains.sharded else grains.tensor) * chunks
    return (
        f"grains: {own} of {grains.tensor} tensor grains and {chunks} of {grains.context} chunks of each sequence on "
        f"this rank. The forward of a block has {linear_layers * own * chunks} matrix products in place of "
        f"{linear_layers}, {own * chunks} attentions in place of 1, and {norms} parts of each norm"
    )


def split_model(model: Decoder, grains: Grains) -> None:
    """Let ``model``, on the meta device, compute in grains; see ``ModelSplit.apply``.

    Parameters become the same DTensors as with tensor parallelism, so that checkpoints fit any layout.
    """

    def shard(module: nn.Module, placement: Placement) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if grains.ranks > 1:
                parts = distribute_tensor(parameter.detach(), grains.mesh.tensor, [placement])
                module.register_parameter(name, nn.Parameter(parts))

    if model.output is not None:
        shard(model.output, Shard(0))
    if model.tok_embeddings is not None:
        assert isinstance(model.tok_embeddings, nn.Embedding)
        shard(model.tok_embeddings, Shard(0))
        tied_output = None
        if model.config.tied_embeddings:
            assert isinstance(model.output, nn.Linear)
            model.output = tied_output = GrainOutput(model.output)
        model.tok_embeddings = GrainEmbedding(model.tok_embeddings, grains, tied_output)
    model.tie_weights()
    linear_layers = spec_of(model.config).linear_layers
    for block in model.layers.values():
        for child in sorted({name.rpartition(".")[0] for name in linear_layers}):
            module, layers = block.get_submodule(child), []
            for name, layer in list(module.named_modules(prefix=child)):
                new: Any = None
                if name in linear_layers:
                    style = linear_layers[name]
                    shard(layer, Shard(0 if style == "colwise" else 1))
                    new = GrainLinear(layer, child, style, grains)
                elif isinstance(layer, nn.RMSNorm):
                    shard(layer, Replicate())
                    new = GrainHeadNorm(layer, child, grains)
                if new is not None:
                    block.set_submodule(name, new)
                    layers.append(new)
            # A module around the child would change the names of its parameters.
            module.forward = ByTensorGrains(module.forward, layers, grains)
    for name, norm in list(model.named_modules()):
        if type(norm) is nn.RMSNorm:
            shard(norm, Replicate())
            model.set_submodule(name, GrainNorm(norm, grains, is_last=name == "norm"))
    if len(grains.chunks) > 1:
        flash = has_flash_kernel(grains.mesh.tensor.device_type)
        model.replace_inner_attention(lambda _: GrainAttention(grains, flash=flash))
