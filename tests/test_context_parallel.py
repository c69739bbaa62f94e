"""Context-parallel attention equals attention on one rank, in values and gradients."""

import pytest
import torch
from gloo_pool import GlooPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchtrain.devices import planned_for_gpu
from torchtrain.models.llama.model import CausalAttention
from torchtrain.parallelisms.context_parallel import (
    ContextParallelAttention,
    attention_to_the_end,
    local_sequence,
    whole_sequence,
)

BS, HEADS, KV_HEADS, SEQ, HEAD_DIM = 2, 4, 2, 16, 8


def full_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, a gradient of the output, and a mask of documents that begin at odd positions."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(BS, heads, SEQ, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    documents = torch.tensor([0] * 3 + [1] * 8 + [2] * 5)
    mask = (documents[:, None] == documents).tril()[None, None]
    return q, k, v, grad, mask


def _context_parallel_attention(with_mask: bool) -> list[tuple[Tensor, Tensor]]:
    """Pairs of this rank's result and its part of the one-rank result: output, and gradients of q, k and v."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    *qkv, grad, mask = full_inputs()
    local = [local_sequence(x, mesh, dim=2).requires_grad_() for x in qkv]
    local_mask = local_sequence(mask, mesh, dim=2) if with_mask else None
    out = ContextParallelAttention(mesh)(*local, local_mask)
    out.backward(local_sequence(grad, mesh, dim=2))
    full = [x.requires_grad_() for x in qkv]
    expected = CausalAttention()(*full, mask if with_mask else None)
    expected.backward(grad)
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(local, full, strict=True))]
    return [(a.detach(), local_sequence(b.detach(), mesh, dim=2)) for a, b in pairs if a is not None and b is not None]


@pytest.mark.parametrize("with_mask", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_attention_equals_attention_on_one_rank(gloo: GlooPool, ranks: int, with_mask: bool) -> None:
    for pairs in gloo.run(ranks, _context_parallel_attention, with_mask):
        assert len(pairs) == 4
        for ours, expected in pairs:
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def _local_positions() -> Tensor:
    return local_sequence(torch.arange(SEQ), init_device_mesh("cpu", (torch.distributed.get_world_size(),)), dim=0)


def test_ranks_have_balanced_positions_that_cover_the_sequence(gloo: GlooPool) -> None:
    parts = gloo.run(4, _local_positions)
    assert parts[0].tolist() == [0, 1, 14, 15]
    assert {sum(part.tolist()) for part in parts} == {30}  # position p attends to p + 1 keys
    assert whole_sequence(torch.stack(parts).unsqueeze(-1)).squeeze(-1).tolist() == list(range(SEQ))


@pytest.mark.parametrize("head_dim", [20, 264])
def test_head_dims_without_a_flash_kernel_use_a_mask_on_a_gpu(head_dim: int) -> None:
    """The flash kernel needs a head dimension of at most 256, padded to a multiple of 8."""
    q, k = torch.randn(1, 4, 8, head_dim).bfloat16(), torch.randn(1, 2, 16, head_dim).bfloat16()
    expected = attention_to_the_end(q, k, k)
    with planned_for_gpu((9, 0)):
        assert torch.equal(attention_to_the_end(q, k, k), expected)


def _attention_planned_for_gpu_without_flash() -> Tensor:
    mesh = init_device_mesh("cpu", (1,))
    q, k, v, _, _ = (x.bfloat16() for x in full_inputs())
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        attention = ContextParallelAttention(mesh)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    with planned_for_gpu((9, 0)):
        return attention(q, k, v) - CausalAttention()(q, k, v)  # type: ignore[no-any-return]


def test_attention_backend_option_does_not_disable_the_explicit_flash_kernel(gloo: GlooPool) -> None:
    """The flash kernel for GPUs is called by name, so that disabled backends have no effect on it."""
    assert gloo.run(1, _attention_planned_for_gpu_without_flash)[0].abs().max() < 0.05


@pytest.mark.gpu
def test_flash_kernel_aligns_the_causal_mask_with_the_last_key() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(BS, heads, seq, 64, generator=generator, device="cuda")
        for heads, seq in ((HEADS, 128), (KV_HEADS, 384), (KV_HEADS, 384), (HEADS, 128))
    )
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    attention_to_the_end(*exact).backward(grad)  # float32: with a mask
    rounded = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    out = attention_to_the_end(*rounded)
    out.backward(grad.bfloat16())
    torch.testing.assert_close(out.float(), attention_to_the_end(q, k, v), rtol=2e-2, atol=2e-2)
    for ours, reference in zip(rounded, exact, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.float(), reference.grad, rtol=5e-2, atol=5e-2)
