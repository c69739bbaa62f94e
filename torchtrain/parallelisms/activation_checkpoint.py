"""Which activations are kept for backward and which are computed again."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from torchtrain.config.schema import ActivationCheckpointConfig
from torchtrain.models.llama.model import Transformer, TransformerBlock
from torchtrain.torch_internals import checkpoint_wrapper, inductor_compiled_code

# Results that cost more to compute again than to keep: attention, and what came over the network.
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
# Every second product of a block is kept: each saves about the same work for a byte. The last one, w2, never is: no
# backward needs its result.
LINEAR_LAYERS_PER_BLOCK = len(TransformerBlock.PRODUCTS)
SAVED_LINEAR_LAYERS = range(1, LINEAR_LAYERS_PER_BLOCK, 2)


class SelectiveACPolicy:
    """Policy of one forward (or its recomputation): keep ``OPS_TO_SAVE`` and every second matrix product."""

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}  # counted apart in forward and in its recomputation

    def __call__(self, ctx: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = op in OPS_TO_SAVE
        if op in MATRIX_PRODUCTS:
            self.products[ctx.is_recompute] += 1
            keep = self.products[ctx.is_recompute] % LINEAR_LAYERS_PER_BLOCK in SAVED_LINEAR_LAYERS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(SelectiveACPolicy())  # type: ignore[no-untyped-call]


def apply_activation_checkpoint(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Wrap the blocks of ``model`` as ``config`` says; values and gradients do not change."""
    if config.mode in ("none", "memory_budget"):  # the second is the compiler's
        return
    per_op = config.mode == "selective" and config.selective_option == "op"
    every = 1 if config.mode == "full" or per_op else int(config.selective_option)
    options = {"context_fn": _selective_contexts} if per_op else {}
    for layer_id, block in list(model.layers.items()):
        if int(layer_id) % every == 0:
            # No dropout: there is no random state to restore.
            model.layers[layer_id] = checkpoint_wrapper(block, preserve_rng_state=False, **options)
