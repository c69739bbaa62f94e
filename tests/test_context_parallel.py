"""Context-parallel attention equals attention on one rank, in values and gradients."""

import fake_flash_attention
import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchtrain.models.llama import Transformer
from torchtrain.models.llama.model import CausalAttention
from torchtrain.parallelisms.attention_backend import choose_attention_backend
from torchtrain.parallelisms.context_parallel import (
    ContextParallelAttention,
    apply_context_parallel,
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
    expected = attention_to_the_end(q, k, k, flash=False)
    assert torch.equal(attention_to_the_end(q, k, k, flash=True), expected)


def _flash_settings() -> list[bool]:
    """``ContextParallelAttention.flash`` with the flash backend enabled, and disabled."""
    mesh = init_device_mesh("cpu", (1,))
    found = []
    try:
        for enabled in (True, False):
            torch.backends.cuda.enable_flash_sdp(enabled)
            model = Transformer(TINY)
            apply_context_parallel(model, mesh)
            attention = model.layers["0"].get_submodule("attention.inner_attention")
            assert isinstance(attention, ContextParallelAttention)
            found.append(attention.flash)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    return found


def test_context_parallelism_uses_the_flash_kernel_only_if_the_attention_backend_allows_it(gloo: GlooPool) -> None:
    """The flash kernel is called by name, so that disabling the backend alone has no effect on it."""
    assert gloo.run(1, _flash_settings) == [[True, False]]


def _with_flash_attention_3(compiled: bool) -> tuple[list[tuple[Tensor, Tensor]], dict[str, int]]:
    """As ``_context_parallel_attention``, in bfloat16 by FlashAttention 3; the reference is in float32."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    *qkv, grad, _ = full_inputs()
    fake_flash_attention.install()
    fake_flash_attention.calls.clear()
    choose_attention_backend("fa3")
    try:
        local = [local_sequence(x, mesh, dim=2).bfloat16().requires_grad_() for x in qkv]
        attention = ContextParallelAttention(mesh, flash=True)
        if compiled:
            attention.compile(fullgraph=True, dynamic=False)
        with fake_flash_attention.on_cpus():
            out = attention(*local)
            out.backward(local_sequence(grad, mesh, dim=2).bfloat16())
    finally:
        choose_attention_backend("auto")
    full = [x.bfloat16().float().requires_grad_() for x in qkv]
    expected = CausalAttention()(*full)
    expected.backward(grad.bfloat16().float())
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(local, full, strict=True))]
    found = [(a.detach().float(), local_sequence(b.detach(), mesh, dim=2)) for a, b in pairs if a is not None]
    return found, dict(fake_flash_attention.calls)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_flash_attention_3_computes_context_parallel_attention(gloo: GlooPool, compiled: bool) -> None:
    """PyTorch's own functions for FlashAttention 3 call the kernels of the package, which here compute on a CPU."""
    for pairs, calls in gloo.run(2, _with_flash_attention_3, compiled):
        assert calls == {"forward": 2, "backward": 2}  # of the two chunks of this rank's queries
        assert len(pairs) == 4
        for ours, expected in pairs:
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_flash_kernel_aligns_the_causal_mask_with_the_last_key() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(BS, heads, seq, 64, generator=generator, device="cuda")
        for heads, seq in ((HEADS, 128), (KV_HEADS, 384), (KV_HEADS, 384), (HEADS, 128))
    )
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    attention_to_the_end(*exact, flash=True).backward(grad)  # float32: with a mask
    rounded = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    out = attention_to_the_end(*rounded, flash=True)
    out.backward(grad.bfloat16())
    torch.testing.assert_close(out.float(), attention_to_the_end(q, k, v, flash=True), rtol=2e-2, atol=2e-2)
    for ours, reference in zip(rounded, exact, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.float(), reference.grad, rtol=5e-2, atol=5e-2)
