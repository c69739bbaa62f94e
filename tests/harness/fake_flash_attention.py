"""The package flash_attn_3 for CPUs: its operators with their schemas, and PyTorch's functions that call them.

``install`` registers the operators as ``import flash_attn_interface`` of the real package does. PyTorch's own code then
activates them, and ``on_cpus`` lets it compute on CPUs, too.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import _fa3

# hopper/flash_api.cpp of https://github.com/Dao-AILab/flash-attention, November 2026
FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, "
    "Tensor? leftpad_k = None, Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, "
    "float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
calls: Counter[str] = Counter()
_kept: list[Library] = []


def install() -> None:
    """Make ``flash_attn_interface`` importable in this process."""
    # Of torch 2.11, where _fa3 replaces the kernels of PyTorch.
    warnings.filterwarnings("ignore", r"Warning only once for all operators")
    if _kept:
        return
    own = Library("flash_attn_3", "DEF")
    own.define(FORWARD)
    own.define(BACKWARD)
    own.impl("fwd", forward, "CPU")
    own.impl("bwd", backward, "CPU")
    _kept.append(own)
    sys.modules["flash_attn_interface"] = ModuleType("flash_attn_interface")


@contextmanager
def on_cpus() -> Iterator[None]:
    """Context manager in which PyTorch's functions for FlashAttention 3 also serve CPU tensors."""
    library = Library("aten", "IMPL")
    name = "_scaled_dot_product_flash_attention"
    library.impl(name, _fa3._fa3_scaled_dot_product_flash_attention_forward_impl_default, "CPU")
    library.impl(f"{name}_backward", _fa3._fa3_scaled_dot_product_flash_attention_backward_impl, "CPU")
    try:
        with patch.object(_fa3, "_fa3_common_support_error", lambda *_: None):
            yield
    finally:
        library._destroy()


def scores(q: Tensor, k: Tensor, scale: float | None, is_causal: bool) -> Tensor:
    """Masked scores (bs, heads, n, seq) of ``q`` (bs, n, heads, head_dim) and ``k`` (bs, seq, kv_heads, head_dim)."""
    found = torch.einsum("bqhd,bkhd->bhqk", q.float(), by_query_head(k, q)) * (scale or q.shape[-1] ** -0.5)
    if is_causal:  # aligned with the last key
        hidden = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        found = found.masked_fill(hidden, float("-inf"))
    return found


def named(name: str, options: tuple[Any, ...], first: int) -> dict[str, Any]:
    """The arguments of an operator after the ``first`` ones. PyTorch omits the last ones that are defaults."""
    arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments[first:]
    given = {argument.name: value for argument, value in zip(arguments, options, strict=False)}
    return {argument.name: argument.default_value for argument in arguments} | given


def by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of keys or values ``x``; float32."""
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, ...]:
    calls["forward"] += 1
    given = named("fwd", options, first=3)
    logits, out = scores(q, k, given["softmax_scale"], given["is_causal"]), given["out"]
    out.copy_(torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), by_query_head(v, q)))
    return out, logits.logsumexp(-1), out.new_empty(0), out.new_empty(0)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any) -> Any:
    given = named("bwd", options, first=6)
    calls["deterministic backward" if given["deterministic"] else "backward"] += 1
    scale = given["softmax_scale"] or q.shape[-1] ** -0.5
    weights = (scores(q, k, scale, given["is_causal"]) - lse[..., None]).exp()
    products = torch.einsum("bqhd,bkhd->bhqk", grad.float(), by_query_head(v, q))
    means = (grad.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    score_grad = weights * (products - means) * scale
    given["dq"].copy_(torch.einsum("bhqk,bkhd->bqhd", score_grad, by_query_head(k, q)))
    for name, (a, b) in {"dk": (score_grad, q), "dv": (weights, grad)}.items():
        by_head = torch.einsum("bhqk,bqhd->bkhd", a, b.float())
        given[name].copy_(by_head.unflatten(2, (k.shape[2], -1)).sum(3))
    return tuple(out.new_empty(0) for _ in range(5))
