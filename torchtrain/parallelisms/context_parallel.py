"""Context parallelism: each sequence is split over the ranks of a group.

Every rank computes attention for its own queries over all keys and values, which it gathers from the group, as in The
Llama 3 Herd of Models (https://arxiv.org/abs/2407.21783, section 3.3.2). Under a causal mask later queries cost more:
the sequence is cut in 2 n chunks, and rank r of n takes chunk r and chunk 2 n - 1 - r.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.devices import compute_capability, device_kind
from torchtrain.models.llama.model import Transformer, attend


def local_sequence(whole: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's two chunks of ``whole`` along ``dim``, one after the other. 2 n must divide the size of ``dim``."""
    if mesh.size() == 1:
        return whole
    rank, chunks = mesh.get_local_rank(), whole.chunk(2 * mesh.size(), dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def whole_sequence(gathered: Tensor) -> Tensor:
    """Inverse of ``local_sequence``: ``gathered`` (n, ..., seq / n, dim), the parts of n ranks, to (..., seq, dim)."""
    heads, tails = gathered.chunk(2, dim=-2)
    return torch.cat((*heads.unbind(), *tails.flip(0).unbind()), dim=-2)


class ContextParallelAttention(nn.Module):
    """Takes the place of ``CausalAttention``; its tensors hold this rank's part of the sequence."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        # training.attention_backend may want another kernel.
        self.flash: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
        """``q`` (bs, heads, seq / n, head_dim), ``k``, ``v`` (bs, kv_heads, seq / n, head_dim) to the shape of ``q``.

        ``mask``, as for ``attend``, replaces the causal one: its rows are this rank's queries, its columns the keys of
        the whole sequence in order.
        """
        # One collective for both. Its backward sums the gradients that all ranks have for these keys and values.
        # Not by full_tensor, which torch 2.11 does not compile.
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


def attention_to_the_end(q: Tensor, k: Tensor, v: Tensor, *, flash: bool = True) -> Tensor:
    """Causal attention of queries (bs, heads, n, head_dim) that belong to the last n of the keys' positions.

    ``flash``: on a GPU by that kernel where it can be; else as ``scaled_dot_product_attention`` chooses.
    """
    on_gpu = device_kind(q.device.type) == "cuda" and q.dtype is not torch.float32
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if flash and on_gpu and fits and compute_capability(q.device) >= (8, 0):
        # is_causal of scaled_dot_product_attention aligns the mask with the first key. Its kernel aligns with the last.
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return out
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return attend(q, k, v, mask)


def apply_context_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Put attention over the 1-D ``mesh`` into every block of ``model``.

    Each rank then calls the forward with ``local_sequence`` of tokens and positions.
    """
    model.replace_inner_attention(lambda _: ContextParallelAttention(mesh))
