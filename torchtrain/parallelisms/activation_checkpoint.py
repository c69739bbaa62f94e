"""Activation checkpointing: which activations are saved for backward and which are recomputed."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from torchtrain.models.spec import Decoder, spec_of
from torchtrain.parallelisms.options import ActivationCheckpointConfig
from torchtrain.torch_internals import checkpoint_wrapper, inductor_compiled_code

# Outputs that are cheaper to save than to recompute: those of attention and of collectives.
OPS_TO_SAVE = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.higher_order.flex_attention,  # in a compiled block
    inductor_compiled_code,  # flex_attention in a block that is not compiled
}
MATRIX_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default}


def saved_linear_layers(linear_layers: int) -> range:
    """The linear layers of a block, counted from 1, whose outputs are saved: every second one.

    Each saves about the same amount of recomputation per byte. The last one is never saved, because no backward needs
    its output.
    """
    return range(1, linear_layers, 2)


class SelectiveACPolicy:
    """Selective activation checkpointing policy: save ``OPS_TO_SAVE`` and every second matrix product.

    An instance serves one forward and its recomputation. ``linear_layers`` is the number of linear layers of a block.
    """

    def __init__(self, linear_layers: int) -> None:
        self.linear_layers = linear_layers
        self.saved = saved_linear_layers(linear_layers)
        self.products = {False: 0, True: 0}  # counts of the forward (False) and its recomputation

    def __call__(self, ctx: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = op in OPS_TO_SAVE
        if op in MATRIX_PRODUCTS:
            self.products[ctx.is_recompute] += 1
            keep = self.products[ctx.is_recompute] % self.linear_layers in self.saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts(linear_layers: int) -> Any:
    return create_selective_checkpoint_contexts(SelectiveACPolicy(linear_layers))  # type: ignore[no-untyped-call]


def apply_activation_checkpoint(model: Decoder, config: ActivationCheckpointConfig) -> None:
    """Wrap the blocks of ``model`` for ``config.mode``, "full" or "selective"; outputs and gradients do not change."""
    per_op = config.mode == "selective" and config.selective_option == "op"
    every = 1 if config.mode == "full" or per_op else int(config.selective_option)
    options = {"context_fn": partial(_selective_contexts, len(spec_of(model.config).linear_layers))} if per_op else {}
    for layer_id, block in list(model.layers.items()):
        if int(layer_id) % every == 0:
            # Blocks have no dropout, so there is no RNG state to restore.
            model.layers[layer_id] = checkpoint_wrapper(block, preserve_rng_state=False, **options)
