"""Activation checkpointing: which activations are saved for backward and which are recomputed."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from torchtrain.config.schema import ActivationCheckpointConfig
from torchtrain.models.llama.model import Transformer, TransformerBlock
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
# Every second matrix product of a block is saved: each saves about the same amount of recomputation per byte. The last
# one, w2, is never saved, because no backward needs its output.
LINEAR_LAYERS_PER_BLOCK = len(TransformerBlock.PRODUCTS)
SAVED_LINEAR_LAYERS = range(1, LINEAR_LAYERS_PER_BLOCK, 2)


class SelectiveACPolicy:
    """Selective activation checkpointing policy: save ``OPS_TO_SAVE`` and every second matrix product.

    An instance serves one forward and its recomputation.
    """

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}  # counts of the forward (False) and its recomputation

    def __call__(self, ctx: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = op in OPS_TO_SAVE
        if op in MATRIX_PRODUCTS:
            self.products[ctx.is_recompute] += 1
            keep = self.products[ctx.is_recompute] % LINEAR_LAYERS_PER_BLOCK in SAVED_LINEAR_LAYERS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(SelectiveACPolicy())  # type: ignore[no-untyped-call]


def apply_activation_checkpoint(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Wrap the blocks of ``model`` for activation checkpointing; outputs and gradients do not change."""
    if config.mode in ("none", "memory_budget"):  # apply_compile implements memory_budget
        return
    per_op = config.mode == "selective" and config.selective_option == "op"
    every = 1 if config.mode == "full" or per_op else int(config.selective_option)
    options = {"context_fn": _selective_contexts} if per_op else {}
    for layer_id, block in list(model.layers.items()):
        if int(layer_id) % every == 0:
            # Blocks have no dropout, so there is no RNG state to restore.
            model.layers[layer_id] = checkpoint_wrapper(block, preserve_rng_state=False, **options)
