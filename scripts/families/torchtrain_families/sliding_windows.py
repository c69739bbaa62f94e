"""Sliding windows, and other RoPE, in all layers but the last of each ``full_attention_interval`` ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, and_masks

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.errors import ConfigError
from torchtrain.models.document_mask import compiled_create_block_mask
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.model import rope_frequencies
from torchtrain.models.spec import Decoder, matrix_shapes
from torchtrain.parallelisms.context_parallel import local_sequence


@dataclass(frozen=True)
class SlidingWindowConfig(TransformerConfig):
    """In layers with a window, a token attends to itself and to the ``sliding_window`` - 1 tokens before it; their RoPE
    has the base ``local_rope_theta``, and no scaling."""

    sliding_window: int = 4096
    full_attention_interval: int = 4
    local_rope_theta: float = 500000.0

    def has_window(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval != 0


def rope_and_mask(block: nn.Module, cos: Tensor, sin: Tensor, masks: Any) -> tuple[Tensor, Tensor, Any]:
    """cos, sin and mask of ``block`` from what it gets by ``SlidingWindowTransformer``."""
    mask, local = masks
    return local if block.has_window else (cos, sin, mask)


class SlidingWindowTransformer(Transformer):
    """Gives its blocks, in place of a mask, a pair: the mask, and cos, sin and mask of layers with a window."""

    local_cos: Tensor
    local_sin: Tensor
    context: DeviceMesh | None = None
    """The mesh over which sequences are sharded."""

    def __init__(self, config: SlidingWindowConfig):
        super().__init__(config)
        for layer, block in self.layers.items():
            block.has_window = config.has_window(int(layer))
        self.register_buffer("local_cos", torch.empty_like(self.rope_cos), persistent=False)
        self.register_buffer("local_sin", torch.empty_like(self.rope_sin), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        super().init_buffers()
        if "local_cos" not in self._buffers or self.local_cos.is_meta:
            return  # the constructor of Transformer, or the meta device
        local = replace(self.config, rope_theta=self.config.local_rope_theta, rope_scaling=None)
        with torch.device("cpu"):  # as in Transformer
            angles = torch.outer(torch.arange(self.config.max_seq_len).float(), rope_frequencies(local))
        self.local_cos.copy_(angles.cos())
        self.local_sin.copy_(angles.sin())

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        local_mask = window_mask(mask, positions, self.config.sliding_window, self.context)
        local = self.local_cos[positions, None], self.local_sin[positions, None], local_mask
        return super().forward(tokens, positions, (mask, local), head)


def use_context(model: Decoder, mesh: Mesh, config: JobConfig) -> None:
    """Tell ``model`` over which mesh sequences are sharded. ConfigError: a GPU has no backward for the schedule."""
    schedule = config.parallelism.pipeline_parallel_schedule
    split = mesh.degrees.pipeline > 1 and schedule in ("InterleavedZeroBubble", "ZBVZeroBubble")
    if split and mesh.context.device_type == "cuda":
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r} runs the backward of a block in two passes, which "
            "flex_attention, the kernel for sliding windows on a GPU, does not support; take Interleaved1F1B"
        )
    model.context = mesh.context


def window_mask(
    mask: Tensor | BlockMask | None, positions: Tensor, window: int, context: DeviceMesh | None
) -> Tensor | BlockMask | None:
    """``mask``, or a causal mask, in which a query attends to the nearest ``window`` keys alone; as for ``attend``.

    ``positions`` (1 or bs, seq) has a column for each query; with ``context``, these are the queries of this rank.
    """
    q_seq, device = positions.shape[1], positions.device
    ranks = 1 if context is None else context.size()
    seq = q_seq * ranks if mask is None else mask.shape[-1]
    if seq <= window:
        return mask
    keys = torch.arange(seq, device=device)
    # In generation the queries are the last ones of the sequence.
    queries = keys[seq - q_seq :] if context is None or ranks == 1 else local_sequence(keys, context, dim=0)

    def is_near(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (queries[query] >= key) & (queries[query] - key < window)

    if isinstance(mask, BlockMask) or (mask is None and device.type == "cuda"):  # as for documents
        both = is_near if mask is None else and_masks(mask.mask_mod, is_near)
        rows = None if mask is None else mask.shape[0]
        return compiled_create_block_mask()(both, rows, None, q_seq, seq, device=device)
    near = is_near(keys, keys, torch.arange(q_seq, device=device)[:, None], keys)[None, None]
    return near if mask is None else mask & near


def flops(config: SlidingWindowConfig, seq_len: int) -> int:
    """``flops_per_token``, in which a window counts as a sequence of its length."""
    matrices = sum(rows * columns for rows, columns in matrix_shapes(config).values())
    lengths = (min(seq_len, config.sliding_window) if config.has_window(i) else seq_len for i in range(config.n_layers))
    return 6 * matrices + 12 * config.n_heads * config.head_size * sum(lengths)
