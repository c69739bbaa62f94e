"""Buffers in pinned memory: few allocations, since torch rounds each up to a power of two."""

from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from torchtrain.models.llama import Transformer
from torchtrain.models.model_config import flavor_config
from torchtrain.pinned_memory import pinned_like


def buffers_of(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
    """Return the buffers of ``pinned_like``, without pinning them, and the bytes of each allocation."""
    sizes: list[int] = []
    empty = torch.empty

    def not_pinned(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        sizes.append(size)
        return empty(size, dtype=dtype)

    with patch.object(torch, "empty", not_pinned):
        return pinned_like(tensors), sizes


def rounded(sizes: list[int]) -> int:
    return sum(1 << (size - 1).bit_length() for size in sizes)


def test_pinned_buffers_of_an_8b_model_take_less_than_10_percent_extra() -> None:
    """The tensors of one rank of 32: its shards of the parameters and of AdamW's two states."""
    with torch.device("meta"):
        model = Transformer(replace(flavor_config("qwen3", "8B"), vocab_size=151936))
    shards = {name: p.new_empty(-(-p.shape[0] // 32), *p.shape[1:]) for name, p in model.named_parameters()}
    tensors = {f"{state} {name}": shard for state in range(3) for name, shard in shards.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    found, allocated = buffers_of(tensors)
    assert len(allocated) == 3  # each at most 1 GiB
    assert rounded(allocated) < 1.1 * total
    assert rounded([tensor.nbytes for tensor in tensors.values()]) > 1.2 * total  # with one allocation per tensor
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert (
            found[name].untyped_storage().nbytes() == tensor.nbytes
        )  # otherwise a save would copy or write the rest of the storage


def test_buffers_do_not_overlap() -> None:
    tensors = {
        "odd": torch.randn(3, 5).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "wide": torch.randn(2, 100, dtype=torch.float64),
        "flag": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }
    copies, allocated = buffers_of(tensors)
    assert len(allocated) == 1
    assert copies.keys() == tensors.keys() - {"none"}
    for name, copy in copies.items():
        copy.copy_(tensors[name])
        assert copy.data_ptr() % 64 == 0
    assert [name for name, copy in copies.items() if not torch.equal(copy, tensors[name])] == []
