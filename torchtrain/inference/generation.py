"""Text from a model, token by token: a key/value cache and the choice of the next token.

Prompts of a batch are padded on the left, so that all rows end at the same place and one step serves them all.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.models.llama.model import Transformer
from torchtrain.parallelisms.attention_backend import without_cudnn_attention

WHOLE = 2**52  # shares of a probability distribution; float64 has all sums of them


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Filters apply in the order of the fields, as in transformers.

    ``temperature`` 0 takes the most likely token. ``top_k`` 0 and ``top_p`` 1 leave all tokens in; top-p is nucleus
    sampling (https://arxiv.org/abs/1904.09751).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class CachedAttention(nn.Module):
    """Puts the keys and values of earlier calls before those of this one, and calls ``inner``.

    A call continues at position ``start``; ``capacity`` positions fit. The first call makes the buffers, because the
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


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int | Sequence[int],
    eos_ids: Collection[int] = (),
    first_prompt: int = 0,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each prompt; None for a prompt that has ended.

    A prompt ends with one of ``eos_ids``, or after ``max_new_tokens``, one number for all prompts or one for each.

    A prompt's tokens depend on it, on ``sampling`` and on its number (``first_prompt`` onwards), not on the rest of the
    batch. The RoPE tables of ``model`` must reach over each prompt and its new tokens. All ranks of a tensor-parallel
    model call this together and get the same.
    """
    assert all(prompts), "each prompt needs a token to begin with"
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    longest, steps, positions_known = max(map(len, prompts)), max(limits), model.rope_cos.shape[0]
    capacity = longest + steps
    assert all(len(prompt) + limit <= positions_known for prompt, limit in zip(prompts, limits, strict=True))
    device = model.rope_cos.device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # (bs,)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    places = torch.arange(capacity, device=device)
    # One generator for each prompt, so that its text does not depend on the rest of the batch.
    generators = [
        torch.Generator().manual_seed((sampling.seed * 1_000_003 + first_prompt + i) % 2**63)
        for i in range(len(prompts))
    ]
    ended = [False] * len(prompts)

    model.replace_inner_attention(lambda inner: CachedAttention(inner, capacity))
    try:
        start = 0
        for number in range(1, steps + 1):
            end = start + tokens.shape[1]
            queries, keys = places[start:end, None], places[:end]
            # Earlier tokens that are no padding; padding sees itself, because a softmax over nothing gives NaN.
            visible = (keys <= queries) & ((keys >= padding[:, None, None]) | (keys == queries))  # (bs, seq, end)
            # Prompts that have ended may go beyond what is known: nobody reads their tokens.
            positions = (places[start:end] - padding[:, None]).clamp(0, positions_known - 1)  # (bs, seq)
            with without_cudnn_attention():  # each token has another number of keys
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


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The next token of each row of ``logits`` (bs, vocab), by one number of ``uniform`` (bs,), in [0, 1), each.

    The number is looked up in the cumulative distribution over the tokens, the most likely first.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scores, order = (logits / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        scores[:, sampling.top_k :] = -torch.inf
    # As integers: in which order CUDA adds numbers up differs between ranks, and from one time to the next.
    shares = (scores.softmax(dim=-1).double() * WHOLE).long()
    before = shares.cumsum(dim=-1) - shares  # of all that are more likely
    shares[before >= int(sampling.top_p * WHOLE)] = 0
    cumulative = shares.cumsum(dim=-1).double()
    place = (cumulative < uniform[:, None] * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return order.gather(1, place)[:, 0]
