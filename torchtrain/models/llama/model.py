"""The dense decoder-only transformer of Llama, Mistral and Qwen, independent of any parallelism.

Shapes in comments: bs = number of sequences, seq = tokens per sequence, dim = width of the residual stream, heads and
kv_heads = number of query and key/value heads, head_dim = width of a head, vocab = vocabulary size.

A pipeline stage is the same ``Transformer`` with some children set to None or removed from ``layers``.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchtrain.models.llama.rope_scaling import RopeScaling


@dataclass(frozen=True)
class TransformerConfig:
    """Architecture of a ``Transformer``.

    ``ffn_dim`` is the inner width of the feed-forward network, ``head_dim`` the width of a head where it is not dim /
    n_heads. ``qk_norm``: queries and keys are normalized per head before RoPE, as in Qwen3. ``qkv_bias``: wq, wk and wv
    have biases, as in Qwen2. ``base_dim`` and ``base_layers`` are the width and depth of the base model that
    hyperparameters are transferred from (muP); they change the initial weights. ``max_seq_len`` is the length of the
    RoPE tables. ``family`` and ``max_position_embeddings`` do not change the computation; the latter is the maximum
    context length of the model where it is longer than ``max_seq_len``.

    Raises:
        ValueError: a value is invalid; the message names the rule.
    """

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
    head_dim: int | None = field(default=None, compare=False)
    qk_norm: bool = False
    qkv_bias: bool = False
    family: str = field(default="llama3", compare=False)
    base_dim: int | None = field(default=None, compare=False)
    base_layers: int | None = field(default=None, compare=False)
    max_position_embeddings: int | None = field(default=None, compare=False)
    head_size: int = field(init=False)
    """Width of a head: ``head_dim``, or by default dim / n_heads."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind: Any = self.__dataclass_fields__[name].type
            if not isinstance(value, kind) and not (kind is float and type(value) is int):  # as in a config.json
                raise ValueError(f"{name} = {value!r} must be of type {getattr(kind, '__name__', kind)}")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be above 0, and finite")
        if self.rope_theta <= 1 and self.rope_scaling is not None and self.rope_scaling.type == "yarn":
            raise ValueError(f"rope_theta = {self.rope_theta} must be above 1: yarn divides by its logarithm")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads = {self.n_kv_heads} must divide n_heads = {self.n_heads}")
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(f"n_heads = {self.n_heads} must divide dim = {self.dim}, unless head_dim is set")
        object.__setattr__(self, "head_size", self.dim // self.n_heads if self.head_dim is None else self.head_dim)
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_dim = {self.head_size} must be even, and at least 2: RoPE pairs channels")

    @property
    def mup_ratios(self) -> tuple[float, float]:
        """Ratios of dim and n_layers to those of the base model (muP); 1.0 without a base model."""
        return self.dim / (self.base_dim or self.dim), self.n_layers / (self.base_layers or self.n_layers)


def rope_frequencies(config: TransformerConfig) -> Tensor:
    """RoPE frequencies: rotation angle of each channel pair per position, in radians; float32, shape (head_dim / 2,).

    RoFormer, https://arxiv.org/abs/2104.09864, with the RoPE scaling of the config.
    """
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else config.rope_scaling.apply(frequencies, config.rope_theta)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to ``x`` (bs, seq, heads, head_dim).

    ``cos`` and ``sin`` have the shape (1 or bs, seq, 1, head_dim / 2). Channel i is paired with channel i + head_dim /
    2, as in Hugging Face's models: halves are faster than Meta's interleaved pairs. Computed in float32, returned in
    the dtype of ``x``.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


# Options of flex_attention's kernels for bfloat16, by compute capability and head_dim. With its defaults, these kernels
# run out of registers and use memory instead, within their loops (docs/development/lowering.md has the figures).
FLEX_OPTIONS: dict[tuple[int, int, int], dict[str, int]] = {
    (8, 0, 64): {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32},
    (8, 0, 128): {"bwd_num_warps": 8},
    (9, 0, 64): {"fwd_num_warps": 8},
    (9, 0, 128): {"bwd_num_stages": 2},
    (10, 0, 64): {"fwd_num_warps": 8, "bwd_num_warps": 8, "bwd_num_stages": 2},
    (10, 0, 128): {"bwd_num_warps": 8, "bwd_num_stages": 2},
}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def compute_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Scaled dot-product attention, softmax(q k^T / sqrt(head_dim)) v, with a causal mask or with ``mask``.

    ``q`` has the shape (bs, heads, q_seq, head_dim), ``k`` and ``v`` (bs, kv_heads, seq, head_dim); the result has the
    shape of ``q``. A boolean ``mask``, true where a query attends to a key, is broadcast to (bs, heads, q_seq, seq); a
    ``BlockMask`` has that shape.
    """
    gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # flex_attention must be compiled, by itself or within a compiled block: else it computes masked scores, too.
        alone = q.is_cuda and not torch.compiler.is_compiling()
        flex = compiled_flex_attention() if alone else flex_attention
        has_options = q.is_cuda and q.dtype is torch.bfloat16
        options = FLEX_OPTIONS.get((*compute_capability(), q.shape[-1])) if has_options else None
        return flex(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=options)  # type: ignore[no-any-return]
    if gqa and q.is_cuda and (mask is not None or q.dtype is torch.float32):
        # On CUDA the only fused kernel for a mask or for float32 does not support GQA. Without it, attention would
        # materialize all scores.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        gqa = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)


@functools.cache
def compiled_flex_attention() -> Any:
    """Compiled ``flex_attention``; created on first use, because torch.compile is slow to import."""
    # The option wraps it as one operation, whose output selective activation checkpointing can save.
    return torch.compile(flex_attention, options={"wrap_inductor_compiled_regions": True})


class CausalAttention(nn.Module):
    """``attend`` as a module, so that ``replace_inner_attention`` can replace it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        return attend(q, k, v, mask)


class Attention(nn.Module):
    """Multi-head attention with grouped key/value heads (GQA, https://arxiv.org/abs/2305.13245) and RoPE."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.head_dim = config.head_size
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.inner_attention: nn.Module = CausalAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        bs, seq, _ = x.shape
        # -1, because under tensor parallelism a rank has only some of the heads.
        q = self.wq(x).view(bs, seq, -1, self.head_dim)  # (bs, seq, heads, head_dim)
        k = self.wk(x).view(bs, seq, -1, self.head_dim)  # (bs, seq, kv_heads, head_dim)
        v = self.wv(x).view(bs, seq, -1, self.head_dim)  # (bs, seq, kv_heads, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
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
    """Pre-norm transformer block: attention and feed-forward, each with a residual connection."""

    feed_forward_class: type[nn.Module] = FeedForward
    """A subclass of the block may have another one, with the same parameters (docs/adding-a-model.md)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = self.feed_forward_class(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, mask)  # (bs, seq, dim)
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Decoder-only transformer: maps token ids to logits."""

    block_class: type[nn.Module] = TransformerBlock
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Module | None = nn.Embedding(config.vocab_size, config.dim)
        # A dict, so that the layers of a pipeline stage keep their names.
        self.layers = nn.ModuleDict({str(i): self.block_class(config) for i in range(config.n_layers)})
        self.norm: nn.Module | None = nn.RMSNorm(config.dim, config.norm_eps)
        self.output: nn.Module | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        table = torch.empty(config.max_seq_len, config.head_size // 2, dtype=torch.float32)
        self.register_buffer("rope_cos", table, persistent=False)
        self.register_buffer("rope_sin", table.clone(), persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialize all parameters and buffers.

        Matrices are drawn from a normal distribution with standard deviation 0.02, truncated at three standard
        deviations. The standard deviation of wo and w2, which write to the residual stream, is 0.02 / sqrt(2 * layer),
        with layers counted from 1, so that the variance of the residual stream grows slowly with depth. That of the
        output layer is 1 / sqrt(dim), so that initial logits have unit variance. Norm weights are ones, biases zeros.

        With a base model (muP), the table in docs/recipes.md lists the standard deviations.
        """
        self.tie_weights()
        width, depth = self.config.mup_ratios
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                gain = 1 / width if name == "norm.weight" else 1.0
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else gain)
                continue
            std = 0.02 / math.sqrt(width)
            if name == "tok_embeddings.weight":
                std = 0.02
            elif name == "output.weight":
                std = math.sqrt(width) / math.sqrt(self.config.dim)
            elif name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
                layer_id = int(name.split(".")[1])
                std = std / math.sqrt(2 * (layer_id / depth + 1)) / depth
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the RoPE tables, float32 of shape (max_seq_len, head_dim / 2). Checkpoints do not contain them."""
        if self.rope_cos.is_meta:
            return
        with torch.device("cpu"):  # for bitwise-identical tables on every device
            angles = torch.outer(torch.arange(self.config.max_seq_len).float(), rope_frequencies(self.config))
        amplitude = 1.0 if self.config.rope_scaling is None else self.config.rope_scaling.amplitude
        self.rope_cos.copy_(angles.cos() * amplitude)
        self.rope_sin.copy_(angles.sin() * amplitude)

    def tie_weights(self) -> None:
        """Share the embedding's parameter with the output layer if embeddings are tied and this stage has both."""
        if self.config.tied_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def replace_inner_attention(self, make: Callable[[nn.Module], nn.Module]) -> None:
        """Replace the inner attention of each block by ``make(inner_attention)``."""
        for block in self.layers.values():
            attention: Any = block.get_submodule("attention")
            attention.inner_attention = make(attention.inner_attention)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        head: Callable[[Tensor, nn.Module], Tensor] | None = None,
    ) -> Tensor:
        """Compute logits (bs, seq, vocab) for ``tokens`` (bs, seq), or the part of a pipeline stage in that.

        Pipeline stages after the first take floating-point hidden states (bs, seq, dim) instead of integer tokens. A
        stage without ``output`` returns hidden states. ``positions``, integers of shape (1 or bs, seq), default to 0,
        1, ...; ``mask`` is passed to each inner attention. If ``head`` is given, the result is ``head(h, output)`` for
        the final hidden states ``h`` (bs, seq, dim) and the output layer, such as a loss that does not need all logits
        at once.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = self.rope_cos[positions, None], self.rope_sin[positions, None]  # (1 or bs, seq, 1, head_dim / 2)
        h = tokens  # later stages get hidden states; the last one may have a tied embedding, but must not apply it
        if self.tok_embeddings is not None and not tokens.is_floating_point():
            h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, cos, sin, mask)
        h = self.norm(h) if self.norm is not None else h
        if self.output is None:
            return h
        return self.output(h) if head is None else head(h, self.output)
