"""Llama 2, 3, 3.1 and 3.2, and nothing of how it is split over ranks.

Shapes in comments: bs = sequences, seq = tokens of a sequence, dim = width of the residual stream, heads and kv_heads =
query and key/value heads, head_dim = dim / heads, vocab = vocabulary.

A pipeline stage is the same ``Transformer`` with some children set to None or taken from ``layers``.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of RoPE beyond the length that was first trained.

    Source: ``apply_scaling`` in Meta's llama-models, ``models/llama3/model.py``.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a model. ``ffn_dim`` is the inner width of the feed-forward network."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_frequencies(config: TransformerConfig) -> Tensor:
    """Angle by which each pair of channels turns per position, float32 of shape (head_dim / 2,).

    RoFormer, https://arxiv.org/abs/2104.09864, with Llama 3.1's scaling where the config has one: long wavelengths are
    slowed by ``factor``, short ones kept, and those between interpolated.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # full turns within the original length
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (bs, seq, heads, head_dim) by ``cos`` and ``sin`` (1 or bs, seq, 1, head_dim / 2).

    Channel i is paired with channel i + head_dim / 2, Hugging Face's order: contiguous halves vectorize, where Meta's
    interleaved pairs do not. Computed in float32, returned in the dtype of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over what came before, or over what ``mask`` lets attend.

    ``q`` (bs, heads, q_seq, head_dim), ``k`` and ``v`` (bs, kv_heads, seq, head_dim) to the shape of ``q``. A boolean
    ``mask`` is broadcast to (bs, heads, q_seq, seq); a ``BlockMask`` is of that shape, and has its own kernel.
    """
    gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Not compiled, by itself or with all around it, it computes every score, masked or not.
        alone = q.is_cuda and not torch.compiler.is_compiling()
        flex = compiled_flex_attention() if alone else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=gqa)  # type: ignore[no-any-return]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)


@functools.cache
def compiled_flex_attention() -> Any:
    """Made when it is first needed: torch.compile imports half of torch."""
    # As one operation that selective activation checkpointing sees, and keeps.
    return torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})


class CausalAttention(nn.Module):
    """The place to put another implementation of attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        """As ``attend``."""
        return attend(q, k, v, mask)


class Attention(nn.Module):
    """Multi-head attention with grouped key/value heads (GQA, https://arxiv.org/abs/2305.13245) and RoPE."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.inner_attention: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        bs, seq, _ = x.shape
        # -1: a rank of a tensor-parallel group holds a part of the heads.
        q = self.wq(x).view(bs, seq, -1, self.head_dim)  # (bs, seq, heads, head_dim)
        k = self.wk(x).view(bs, seq, -1, self.head_dim)  # (bs, seq, kv_heads, head_dim)
        v = self.wv(x).view(bs, seq, -1, self.head_dim)  # (bs, seq, kv_heads, head_dim)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = self.inner_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(out.transpose(1, 2).reshape(bs, seq, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each with a norm before and a residual around it."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, mask)  # (bs, seq, dim)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A Llama: tokens in, logits out."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        # A dict, so that a pipeline stage holds a part of the layers under their full names.
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config) for i in range(config.n_layers)})
        self.norm: nn.Module | None = RMSNorm(config.dim, config.norm_eps)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        table = torch.empty(config.max_seq_len, config.head_dim // 2, dtype=torch.float32)
        self.register_buffer("rope_cos", table, persistent=False)
        self.register_buffer("rope_sin", table.clone(), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Fill every parameter and buffer anew.

        Matrices: normal of standard deviation 0.02, cut at three of them; those that write to the residual stream, of
        0.02 / sqrt(2 * depth), so that the stream's variance grows slowly with depth; the output, of 1 / sqrt(dim), so
        that the first logits have unit variance. Norms: ones.
        """
        std = 0.02
        self.tie_weights()
        if self.tok_embeddings is not None:
            init_matrix(self.tok_embeddings, std)
        for layer_id, block in self.layers.items():
            residual_std = std / math.sqrt(2 * (int(layer_id) + 1))
            for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
                init_matrix(block.get_submodule(name), std)
            for name in ("attention.wo", "feed_forward.w2"):
                init_matrix(block.get_submodule(name), residual_std)
            nn.init.ones_(block.get_parameter("attention_norm.weight"))
            nn.init.ones_(block.get_parameter("ffn_norm.weight"))
        if self.norm is not None:
            nn.init.ones_(self.norm.get_parameter("weight"))
        if self.output is not None and not self.config.tied_embeddings:
            init_matrix(self.output, 1 / math.sqrt(self.config.dim))
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the RoPE tables, float32 of shape (max_seq_len, head_dim / 2). No checkpoint holds them."""
        if self.rope_cos.is_meta:
            return
        with torch.device("cpu"):  # the same bits on every device
            angles = torch.outer(torch.arange(self.config.max_seq_len).float(), rope_frequencies(self.config))
        self.rope_cos.copy_(angles.cos())
        self.rope_sin.copy_(angles.sin())

    def tie_weights(self) -> None:
        """Make the output share the embedding's parameter where the config says so and both are here."""
        if self.config.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        """Logits (bs, seq, vocab) for ``tokens`` (bs, seq), or what the missing children leave of that.

        Floating-point ``tokens`` are a residual stream (bs, seq, dim), not to be embedded; without ``output`` it is
        returned.
        ``positions``, integers of shape (1 or bs, seq), default to 0, 1, ...; ``mask`` goes to each inner attention.
        With ``head`` the result is ``head(h, output)``, for the last hidden states ``h`` (bs, seq, dim) and the output
        layer: a loss that need not have all logits at once.
        """
        if positions is None:
            cos, sin = self.rope_cos[None, : tokens.shape[1]], self.rope_sin[None, : tokens.shape[1]]
        else:
            cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)  # (1 or bs, seq, 1, head_dim / 2)
        # Not a question of tok_embeddings alone: where they are tied, the last pipeline stage has them, too.
        h = tokens
        if self.tok_embeddings is not None and not tokens.is_floating_point():
            h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, cos, sin, mask)
        h = self.norm(h) if self.norm is not None else h
        if self.output is None:
            return h
        return self.output(h) if head is None else head(h, self.output)


def init_matrix(module: nn.Module, std: float) -> None:
    """Fill ``module.weight`` from a normal distribution of standard deviation ``std``, cut at three of them."""
    nn.init.trunc_normal_(module.get_parameter("weight"), mean=0.0, std=std, a=-3 * std, b=3 * std)
