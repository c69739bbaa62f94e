"""Context parallelism: each sequence is sharded over the ranks of a mesh dimension.

Every rank computes attention of its own queries over all keys and values, which it all-gathers, as in The Llama 3 Herd
of Models (https://arxiv.org/abs/2407.21783, section 3.3.2). Under a causal mask later queries cost more. To balance the
load, the sequence is split into 2 n chunks, and rank r of n takes chunks r and 2 n - 1 - r.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.models.llama.model import attend
from torchtrain.models.spec import Decoder


def local_sequence(whole: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return this rank's two chunks of the full sequence ``whole``, concatenated along ``dim``.

    The size of ``dim`` must be divisible by 2 n, for n ranks of ``mesh``.
    """
    rank, chunks = mesh.get_local_rank(), whole.chunk(2 * mesh.size(), dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def whole_sequence(gathered: Tensor) -> Tensor:
    """Restore the full sequence from the shards of n ranks; the inverse of ``local_sequence``.

    ``gathered`` has the shape (n, ..., seq / n, dim), the result (..., seq, dim).
    """
    heads, tails = gathered.chunk(2, dim=-2)
    return torch.cat((*heads.unbind(), *tails.flip(0).unbind()), dim=-2)


class ContextParallelAttention(nn.Module):
    """Context-parallel replacement of ``CausalAttention``; queries, keys and values are sharded along the sequence."""

    def __init__(self, mesh: DeviceMesh, *, flash: bool = False):
        """``flash``: whether the device has the flash attention kernel, and training.attention_backend allows it."""
        super().__init__()
        self.mesh = mesh
        self.flash = flash

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        """Causal attention of this rank's queries over the keys and values of all ranks.

        ``q`` has the shape (bs, heads, seq / n, head_dim), ``k`` and ``v`` (bs, kv_heads, seq / n, head_dim); the
        result has the shape of ``q``. ``mask``, as for ``attend``, replaces the causal mask: its rows are this rank's
        queries, its columns the keys of the full sequence in order.
        """
        # One all-gather for both. Its backward sums the gradients of these keys and values over all ranks. full_tensor
        # is not used because torch 2.11 does not compile it.
        local = DTensor.from_local(torch.stack((k, v)), self.mesh, [Shard(0)], run_check=False)
        whole = local.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        k, v = whole_sequence(whole.view(-1, 2, *k.shape)).unbind()  # (bs, kv_heads, seq, head_dim)
        if mask is not None:
            return attend(q, k, v, mask)
        rank, size = self.mesh.get_local_rank(), q.shape[2] // 2
        ends = [(chunk + 1) * size for chunk in (rank, 2 * self.mesh.size() - 1 - rank)]
        parts = zip(q.chunk(2, dim=2), ends, strict=True)
        outs = [attention_to_the_end(part, k[:, :, :end], v[:, :, :end], flash=self.flash) for part, end in parts]
        return torch.cat(outs, dim=2)


def attention_to_the_end(q: Tensor, k: Tensor, v: Tensor, *, flash: bool) -> Tensor:
    """Causal attention of queries ``q`` (bs, heads, n, head_dim) at the last n positions of the keys.

    ``flash``: use the GPU's flash attention kernel if it supports the dtype and head_dim; otherwise ``attend`` with an
    explicit mask lets ``scaled_dot_product_attention`` choose a kernel.
    """
    if flash and is_supported_by_flash(q.dtype, q.shape[-1]):
        # is_causal of scaled_dot_product_attention aligns the mask with the first key, but the flash kernel itself
        # aligns it with the last key, as needed here.
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return out
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return attend(q, k, v, mask)


def is_supported_by_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash attention kernel supports this dtype, bfloat16 or float32, and ``head_dim``."""
    return dtype is not torch.float32 and head_dim % 8 == 0 and head_dim <= 256


def has_flash_kernel(device_type: str) -> bool:
    """Whether training.attention_backend allows the flash attention kernel, and the device, if it is a GPU, has it."""
    is_enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    # The kernel needs Ampere or later.
    return is_enabled and (device_type != "cuda" or torch.cuda.get_device_capability() >= (8, 0))


def apply_context_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Replace the inner attention of every block of ``model`` by context-parallel attention over the 1-D ``mesh``.

    Each rank must then call the forward with ``local_sequence`` of the tokens and positions.
    """
    flash = has_flash_kernel(mesh.device_type)
    model.replace_inner_attention(lambda _: ContextParallelAttention(mesh, flash=flash))
