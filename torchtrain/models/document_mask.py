"""Documents packed into one sequence: their numbers, their positions, and a mask that keeps them apart."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@functools.cache
def compiled_create_block_mask() -> Any:
    """Compiled, it never holds the mask of all pairs. Made when first needed: torch.compile takes long to import."""
    return torch.compile(create_block_mask)


def document_numbers(tokens: Tensor, bos_id: int) -> Tensor:
    """For each of ``tokens`` (bs, seq) the number of its document: how many have begun in its row so far."""
    return (tokens == bos_id).cumsum(dim=1)


def document_positions(numbers: Tensor) -> Tensor:
    """Positions that begin at 0 in each document, and in each row; ``numbers`` (bs, seq) from ``document_numbers``."""
    places = torch.arange(numbers.shape[1], device=numbers.device)
    begins = numbers.diff(dim=1, prepend=numbers[:, :1]) > 0
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def document_mask(numbers: Tensor, queries: Tensor) -> Tensor | BlockMask:
    """Lets the tokens at places ``queries`` (q_seq,) attend to what came before them in their document.

    On CUDA a BlockMask for flex_attention, elsewhere a boolean (bs, 1, q_seq, seq).
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
