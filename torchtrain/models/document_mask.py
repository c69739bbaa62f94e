"""Document masking: document numbers, positions, and attention masks for documents packed into one sequence."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@functools.cache
def compiled_create_block_mask() -> Any:
    """Compiled ``create_block_mask``, which never materializes the mask of all query-key pairs.

    It is created on first use, because torch.compile is slow to import.
    """
    return torch.compile(create_block_mask)


def document_numbers(tokens: Tensor, bos_id: int) -> Tensor:
    """Document number of each token (bs, seq): the number of documents that have begun in its row so far."""
    return (tokens == bos_id).cumsum(dim=1)


def document_positions(numbers: Tensor) -> Tensor:
    """Position of each token in its document (bs, seq), restarting at 0 in each document and each row.

    ``numbers`` (bs, seq) are those of ``document_numbers``.
    """
    places = torch.arange(numbers.shape[1], device=numbers.device)
    begins = numbers.diff(dim=1, prepend=numbers[:, :1]) > 0
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def document_mask(numbers: Tensor, queries: Tensor) -> Tensor | BlockMask:
    """Causal mask within documents: each query attends to itself and earlier tokens of the same document.

    ``queries`` (q_seq,) are the positions of the queries in the sequence, ``numbers`` (bs, seq) the document numbers.
    Returns a BlockMask for flex_attention on CUDA, otherwise a boolean tensor of shape (bs, 1, q_seq, seq).
    """

    def may_attend(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = queries[query]
        return (place >= key) & (numbers[row, place] == numbers[row, key])

    (bs, seq), q_seq = numbers.shape, len(queries)
    if numbers.is_cuda:
        mask: BlockMask = compiled_create_block_mask()(may_attend, bs, None, q_seq, seq, device=numbers.device)
        return mask
    rows, places = torch.arange(bs)[:, None, None], torch.arange(seq)
    return may_attend(rows, rows, torch.arange(q_seq)[:, None], places)[:, None]
