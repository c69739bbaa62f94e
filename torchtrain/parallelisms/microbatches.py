"""From a batch of the loader to what a forward takes, on the device: rows, and this rank's part of each."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.attention.documents import document_mask, document_numbers, document_positions
from torchtrain.datasets.loader import Batch
from torchtrain.distributed.mesh import Mesh
from torchtrain.parallelisms.context_parallel import local_sequence


class Microbatch(NamedTuple):
    """``tokens`` and ``labels`` (local_batch_size, seq), ``positions`` (1 or local_batch_size, seq), ``mask``."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    mask: Tensor | BlockMask | None


class Microbatches:
    """Cuts batches: ``local_batch_size`` rows at once, and of those what context parallelism leaves to this rank."""

    def __init__(self, mesh: Mesh, device: torch.device, local_batch_size: int, document_start: int | None):
        """``document_start``: token that begins a document, to keep documents apart; None lets them see each other."""
        self.mesh = mesh
        self.device = device
        self.local_batch_size = local_batch_size
        self.document_start = document_start

    def __call__(self, batch: Batch) -> Iterator[Microbatch]:
        both = (t.to(self.device, non_blocking=True) for t in (batch.tokens, batch.labels))
        for tokens, labels in zip(*(torch.split(t, self.local_batch_size) for t in both), strict=True):
            yield self._cut(tokens, labels)

    def _cut(self, tokens: Tensor, labels: Tensor) -> Microbatch:
        context = self.mesh.context
        places = torch.arange(tokens.shape[1], device=self.device)
        positions, mask = places[None], None
        if self.document_start is not None:
            numbers = document_numbers(tokens, self.document_start)
            positions = document_positions(numbers)
            mask = document_mask(numbers, local_sequence(places, context, dim=0))
        tokens, labels, positions = (local_sequence(t, context) for t in (tokens, labels, positions))
        return Microbatch(tokens, labels, positions, mask)
