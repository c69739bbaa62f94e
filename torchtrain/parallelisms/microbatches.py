"""Split this rank's batch into microbatches on the device, and each sequence into this rank's shard of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.document_mask import document_mask, document_numbers, document_positions
from torchtrain.parallelisms.context_parallel import local_sequence


class Microbatch(NamedTuple):
    """Inputs and labels of one forward: int64 tensors on the device.

    seq is the length of this rank's part of a sequence, training.seq_len / context_parallel_degree.
    """

    tokens: Tensor  # (local_batch_size, seq)
    labels: Tensor  # (local_batch_size, seq)
    positions: Tensor  # (1 or local_batch_size, seq)
    documents: Tensor | None  # (local_batch_size, training.seq_len): numbers; None: attention crosses documents
    label_bytes: Tensor | None = None  # float64 (local_batch_size, seq), if the data loader counts bytes


def attention_mask(documents: Tensor | None, context: DeviceMesh) -> Tensor | BlockMask | None:
    """Build the mask for ``attend`` from the ``documents`` of a ``Microbatch``.

    ``context`` is the 1-D mesh over which sequences are sharded.
    """
    if documents is None:
        return None
    positions = torch.arange(documents.shape[1], device=documents.device)
    if context.size() > 1:
        positions = local_sequence(positions, context, dim=0)
    return document_mask(documents, positions)


@dataclass(frozen=True)
class Microbatches:
    """Splits a batch into microbatches of ``local_batch_size`` rows, and shards their sequences for CP."""

    mesh: Mesh
    device: torch.device
    local_batch_size: int
    document_start: int | None  # token that begins a document; None: attention crosses documents

    def __call__(self, batch: Batch) -> Iterator[Microbatch]:
        counted = () if batch.label_bytes is None else (batch.label_bytes,)
        on_device = (t.to(self.device, non_blocking=True) for t in (batch.tokens, batch.labels, *counted))
        for tokens, labels, *sizes in zip(*(torch.split(t, self.local_batch_size) for t in on_device), strict=True):
            positions, documents = torch.arange(tokens.shape[1], device=self.device)[None], None
            if self.document_start is not None:
                documents = document_numbers(tokens, self.document_start)
                positions = document_positions(documents)
            parts = (tokens, labels, positions, *sizes)
            if self.mesh.degrees.context > 1:
                parts = tuple(local_sequence(part, self.mesh.context) for part in parts)
            tokens, labels, positions, *sizes = parts
            yield Microbatch(tokens, labels, positions, documents, *sizes)
