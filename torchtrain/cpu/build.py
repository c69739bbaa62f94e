"""Build a model and its optimizer for CPUs.

The rest of torchtrain is written for GPUs. What CPUs need otherwise is in this folder, and is applied here from the
outside: lower layers do not import it.
"""

from itertools import pairwise

import torch

from torchtrain.config.schema import JobConfig
from torchtrain.cpu.attention_backward import BatchedBackwardAttention
from torchtrain.cpu.fused_adamw import padded_adamw
from torchtrain.cpu.gloo_reducer import build_cpu_gradient_reducer
from torchtrain.cpu.matmul import apply_float32_matmul
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.spec import Decoder, DecoderConfig
from torchtrain.optimizers.adamw import ShardedAdamW
from torchtrain.optimizers.container import OptimizerContainer
from torchtrain.parallelisms.context_parallel import ContextParallelAttention
from torchtrain.parallelisms.fsdp import fsdp_modules
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model

MAX_LOGITS_BYTES = 1 << 23  # logits of a chunk that fit a CPU's cache make the loss up to twice as fast


def build_cpu_model(model_config: DecoderConfig, mesh: Mesh, device: torch.device, config: JobConfig) -> ParallelModel:
    """``build_parallel_model`` for CPUs."""
    training = config.training
    dtype: torch.dtype = getattr(torch, training.mixed_precision_param)
    apply_float32_matmul(dtype)
    model = build_parallel_model(model_config, mesh, device, config, build_cpu_gradient_reducer(config, mesh))
    model.loss.max_logits_bytes = MAX_LOGITS_BYTES
    for part in model.model_parts:
        apply_batched_attention_backward(part, training.attention_backend, dtype)
        for module in part.modules():
            if isinstance(module, ContextParallelAttention):
                module.flash = False  # that kernel is only for GPUs
        if model.reducer.mesh.size() > 1:
            prefetch_blocks(part)
    return model


def has_batched_attention_backward(wanted: str, dtype: torch.dtype) -> bool:
    """Whether ``training.attention_backend`` = ``wanted`` selects ``BatchedBackwardAttention``.

    "auto" does, in bfloat16. In float32, torch's own backward is faster.
    """
    return wanted == "auto" and dtype is torch.bfloat16


def apply_batched_attention_backward(model: Decoder, wanted: str, dtype: torch.dtype) -> None:
    """Replace the inner attention of each block of ``model`` if ``has_batched_attention_backward``."""
    if has_batched_attention_backward(wanted, dtype):
        model.replace_inner_attention(
            lambda inner: inner if isinstance(inner, ContextParallelAttention) else BatchedBackwardAttention()
        )


def prefetch_blocks(model: Decoder) -> None:
    """All-gather each block while the previous one computes. On GPUs FSDP's CUDA streams do that."""
    root, *blocks = fsdp_modules(model)
    root._set_unshard_async_op(True)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def use_cpu_kernels(container: OptimizerContainer) -> None:
    """Let the optimizers use kernels for CPUs; call it before the first step."""
    for optimizer in container.optimizers:
        if isinstance(optimizer, ShardedAdamW) and optimizer.fused:
            optimizer.adamw = padded_adamw
        dtype = optimizer.prepare_for_cpu()
        if dtype is not None:
            apply_float32_matmul(dtype)
