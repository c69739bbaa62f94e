"""Autoregressive text generation: a key/value cache, and sampling of the next token.

Prompts of a batch are padded on the left, so that all rows end at the same position.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.models.spec import Decoder

PROBABILITY_UNITS = 2**52  # probabilities are integers with at most this sum, so that float64 sums are exact


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The filters apply in the order of the fields, as in transformers.

    ``temperature`` 0 selects the most likely token (greedy decoding). ``top_k`` 0 and ``top_p`` 1 disable the filter.
    Top-p is nucleus sampling (https://arxiv.org/abs/1904.09751).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class CachedAttention(nn.Module):
    """Attention with a key/value cache: prepends the keys and values of earlier calls, and calls ``inner``.

    A call begins at position ``start``. The cache has ``capacity`` positions. The first call allocates it, because the
    number of heads on this rank is not known before.
    """

    def __init__(self, inner: nn.Module, capacity: int):
        super().__init__()
        self.inner = inner
        self.capacity = capacity
        self.start = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """``q`` (bs, heads, seq, head_dim), ``k`` and ``v`` (bs, kv_heads, seq, head_dim), ``mask`` as ``inner``'s."""
        if self.keys is None or self.values is None:
            bs, kv_heads, _, head_dim = k.shape
            self.keys = k.new_empty(bs, kv_heads, self.capacity, head_dim)
            self.values = torch.empty_like(self.keys)
        end = self.start + k.shape[2]
        self.keys[:, :, self.start : end] = k
        self.values[:, :, self.start : end] = v
        self.start = end
        out: Tensor = self.inner(q, self.keys[:, :, :end], self.values[:, :, :end], mask)
        return out


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int | Sequence[int],
    eos_ids: Collection[int] = (),
    first_prompt: int = 0,
) -> Iterator[list[int | None]]:
    """Generate tokens: yield at each step the next token of each prompt, or None for a prompt that has ended.

    The tokens of a prompt depend only on the prompt, ``sampling`` and its index, not on the rest of the batch. All
    ranks of a tensor-parallel model must call this, and get the same tokens.

    Args:
        model: its ``config.max_seq_len`` must be at least the number of tokens of the longest text.
        prompts: token ids of each prompt, at least one each.
        max_new_tokens: maximum number of new tokens, one number for all prompts or one for each.
        eos_ids: tokens that end a text.
        first_prompt: index of the first prompt, which seeds its random numbers.
    """
    assert all(prompts), "each prompt must have at least one token"
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    longest, steps, max_seq_len = max(map(len, prompts)), max(limits), model.config.max_seq_len
    capacity = longest + steps
    assert all(len(prompt) + limit <= max_seq_len for prompt, limit in zip(prompts, limits, strict=True))
    device = next(model.parameters()).device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # (bs,)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    indices = torch.arange(capacity, device=device)
    # One generator for each prompt, so that its text does not depend on the rest of the batch.
    generators = [prompt_generator(sampling.seed, first_prompt + i) for i in range(len(prompts))]
    ended = [False] * len(prompts)

    model.replace_inner_attention(lambda inner: CachedAttention(inner, capacity))
    try:
        start = 0
        for number in range(1, steps + 1):
            end = start + tokens.shape[1]
            queries, keys = indices[start:end, None], indices[:end]
            # Earlier tokens except padding. Padding attends to itself, because a softmax over no keys gives NaN.
            visible = (keys <= queries) & ((keys >= padding[:, None, None]) | (keys == queries))  # (bs, seq, end)
            # Prompts that have ended may exceed the RoPE tables; their tokens are discarded.
            positions = (indices[start:end] - padding[:, None]).clamp(0, max_seq_len - 1)  # (bs, seq)
            with attention_for_generation():
                logits = model(tokens, positions, visible[:, None])[:, -1]  # (bs, vocab)
            if isinstance(logits, DTensor):
                logits = logits.full_tensor()
            uniform = torch.tensor([torch.rand((), generator=generator).item() for generator in generators])
            chosen = choose(logits.float(), sampling, uniform.to(device))
            step: list[int | None] = [
                None if done else token for done, token in zip(ended, chosen.tolist(), strict=True)
            ]
            yield step
            ended = [
                done or token in eos_ids or number == limit
                for done, token, limit in zip(ended, step, limits, strict=True)
            ]
            if all(ended):
                return
            tokens, start = chosen[:, None], end
    finally:
        model.replace_inner_attention(lambda cached: cached.get_submodule("inner"))


def prompt_generator(seed: int, index: int) -> torch.Generator:
    """The random numbers of the prompt number ``index``."""
    return torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Sample the next token of each row by inverse transform sampling over the tokens in the order of their ids.

    Args:
        logits: float tensor of shape (bs, vocab).
        uniform: random numbers in [0, 1), of shape (bs,).

    Returns:
        Token ids, int64 of shape (bs,).
    """
    if sampling.temperature < torch.finfo(torch.float32).tiny:
        return logits.argmax(dim=-1)
    below_best = logits - logits.amax(dim=-1, keepdim=True)  # which a small temperature does not make infinite
    scores, order = (below_best / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scores[:, sampling.top_k :] = -torch.inf
    # Integers, because CUDA may sum floating-point numbers in another order on each rank and in each call.
    shares = (scores.softmax(dim=-1).double() * PROBABILITY_UNITS).long()
    before = shares.cumsum(dim=-1) - shares  # cumulative probability of all more likely tokens
    shares[before >= max(1, int(sampling.top_p * PROBABILITY_UNITS))] = 0  # the most likely token remains
    # In the order of ids: in that of probabilities, tokens that are almost equally likely may change places with the
    # rounding of another layout, and with them the token that a number selects.
    cumulative = torch.zeros_like(shares).scatter(1, order, shares).cumsum(dim=-1).double()
    return (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(dim=-1)


@contextmanager
def attention_for_generation() -> Iterator[None]:
    """Context manager for attention with masks, and with shapes that change with each call.

    It disables cuDNN, which builds an execution plan for each shape, in 20 to 40 ms. The flash kernels of GPUs have no
    masks, so that it enables kernels that have, if ``choose_attention_backend`` has disabled them.
    """
    backends = torch.backends.cuda
    cudnn, efficient = backends.cudnn_sdp_enabled(), backends.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    math = backends.math_sdp_enabled()  # type: ignore[no-untyped-call]
    backends.enable_cudnn_sdp(False)
    if not math:
        backends.enable_mem_efficient_sdp(True)
        backends.enable_math_sdp(True)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(cudnn)
        backends.enable_mem_efficient_sdp(efficient)
        backends.enable_math_sdp(math)
