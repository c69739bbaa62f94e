"""From a batch of the loader to what a forward takes, on the device: rows, and this rank's part of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.datasets.loader import Batch
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.document_mask import document_mask, document_numbers, document_positions
from torchtrain.parallelisms.context_parallel import local_sequence


class Microbatch(NamedTuple):
    """int64 tensors on the device. seq: this rank's part of a row, training.seq_len / context_parallel_degree."""

    tokens: Tensor  # (local_batch_size, seq)
    labels: Tensor  # (local_batch_size, seq)
    positions: Tensor  # (1 or local_batch_size, seq)
    documents: Tensor | None  # (local_batch_size, training.seq_len): their numbers; None: attention crosses them
    label_bytes: Tensor | None = None  # float64 (local_batch_size, seq), where the loader counts them


def attention_mask(documents: Tensor | None, context: DeviceMesh) -> Tensor | BlockMask | None:
    """As for ``attend``, from ``documents`` of a ``Microbatch``; ``context``: the 1-D mesh that splits sequences."""
    if documents is None:
        return None
    places = torch.arange(documents.shape[1], device=documents.device)
    return document_mask(documents, local_sequence(places, context, dim=0))


@dataclass(frozen=True)
class Microbatches:
    """Cuts batches: ``local_batch_size`` rows at once, and of those what context parallelism leaves to this rank."""

    mesh: Mesh
    device: torch.device
    local_batch_size: int
    document_start: int | None  # token that begins a document, to keep documents apart; None: attention crosses them

    def __call__(self, batch: Batch) -> Iterator[Microbatch]:
        own_part = partial(local_sequence, mesh=self.mesh.context)
        counted = () if batch.label_bytes is None else (batch.label_bytes,)
        on_device = (t.to(self.device, non_blocking=True) for t in (batch.tokens, batch.labels, *counted))
        for tokens, labels, *sizes in zip(*(torch.split(t, self.local_batch_size) for t in on_device), strict=True):
            places = torch.arange(tokens.shape[1], device=self.device)
            positions, documents = places[None], None
            if self.document_start is not None:
                documents = document_numbers(tokens, self.document_start)
                positions = document_positions(documents)
            yield Microbatch(own_part(tokens), own_part(labels), own_part(positions), documents, *map(own_part, sizes))
