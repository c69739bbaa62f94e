"""Document masks: attention stays within each document of a window, on every attention path."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_pool import GlooPool
from parity import STEPS, TINY, Curve, assert_same_run, config_of, train
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close

from torchtrain.models.document_mask import document_mask, document_numbers, document_positions
from torchtrain.models.llama import Transformer

BOS = 1
# Two rows with documents of different lengths; the second row begins within a document.
DOCUMENTS = [
    [[1, 5, 6, 7, 8], [1, 9], [1, 4, 4, 4, 4, 4, 4, 4, 3]],
    [[8, 9, 7], [1, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]],
]
TOKENS = torch.tensor([[token for document in row for token in document] for row in DOCUMENTS])


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(TINY)


def test_positions_start_at_zero_in_each_document() -> None:
    numbers = document_numbers(TOKENS, BOS)
    assert document_positions(numbers).tolist() == [
        [position for document in row for position in range(len(document))] for row in DOCUMENTS
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "flex"])
def test_logits_of_a_packed_window_are_those_of_its_documents(model: Transformer, kind: str) -> None:
    numbers = document_numbers(TOKENS, BOS)
    mask: Any = document_mask(numbers, torch.arange(16))
    if kind == "flex":  # used on CUDA; here by its slow CPU version
        dense = mask
        mask = create_block_mask(lambda b, _, q, k: dense[b, 0, q, k], 2, None, 16, 16, device="cpu")
    packed = model(TOKENS, document_positions(numbers), mask)
    unmasked = model(TOKENS)
    for row, documents in enumerate(DOCUMENTS):
        begin = 0
        for document in documents:
            alone = model(torch.tensor([document]))[0]
            span = slice(begin, begin + len(document))
            assert_close(packed[row, span], alone, rtol=1e-4, atol=1e-5)
            if begin:
                assert (unmasked[row, span] - alone).abs().max() > 1e-2
            begin += len(document)


def test_mask_of_some_queries_has_the_rows_of_the_full_mask() -> None:
    """As on a rank of a context-parallel group."""
    numbers = document_numbers(TOKENS, BOS)
    queries = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    full, part = document_mask(numbers, torch.arange(16)), document_mask(numbers, queries)
    assert isinstance(full, torch.Tensor)
    assert isinstance(part, torch.Tensor)
    assert torch.equal(part, full[:, :, queries])


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Curve:
    config = config_of(training={"local_batch_size": 8})
    return gloo.run(1, train, config, MODEL, STEPS, 7)[0]  # type: ignore[no-any-return]


MODEL = replace(TINY, n_layers=2, vocab_size=20)  # one token in twenty begins a document


@pytest.mark.parametrize(
    ("ranks", "rows", "parallelism"),
    [
        pytest.param(1, 2, {}, marks=pytest.mark.slow),  # as with activation checkpointing
        (2, 8, {"tensor_parallel_degree": 2}),
        (2, 8, {"pipeline_parallel_degree": 2}),
        (2, 8, {"context_parallel_degree": 2}),
        pytest.param(2, 4, {}, marks=pytest.mark.slow),
        pytest.param(4, 4, {"context_parallel_degree": 2, "data_parallel_shard_degree": 2}, marks=pytest.mark.slow),
        pytest.param(4, 8, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masked_documents_train_identically_on_every_layout(
    gloo: GlooPool, reference: Curve, ranks: int, rows: int, parallelism: dict[str, Any]
) -> None:
    config = config_of(training={"local_batch_size": rows}, parallelism=parallelism)
    assert_same_run(gloo.run(ranks, train, config, MODEL, STEPS, 7), reference)


@pytest.mark.parametrize("checkpoint", [{"mode": "full"}, {"mode": "selective"}], ids=str)
def test_masked_documents_train_identically_with_activation_checkpointing(
    gloo: GlooPool, reference: Curve, checkpoint: dict[str, str]
) -> None:
    assert_same_run(gloo.run(1, train, config_of(activation_checkpoint=checkpoint), MODEL, STEPS, 7), reference)


def test_document_mask_changes_the_run(gloo: GlooPool, reference: Curve) -> None:
    unmasked = gloo.run(1, train, config_of(training={"local_batch_size": 8}), MODEL, 1)[0]
    assert abs(unmasked.losses[0] - reference.losses[0]) > 1e-4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_flex_attention_on_cuda_equals_attention_with_the_dense_mask() -> None:
    torch.manual_seed(0)
    config = replace(TINY, dim=256, max_seq_len=512)
    model = Transformer(config).cuda()
    tokens = torch.randint(0, 50, (2, 512), device="cuda")
    numbers = document_numbers(tokens, BOS)
    positions, indices = document_positions(numbers), torch.arange(512, device="cuda")
    dense = document_mask(numbers.cpu(), indices.cpu())
    assert isinstance(dense, torch.Tensor)
    expected = model(tokens, positions, dense.cuda())
    assert_close(model(tokens, positions, document_mask(numbers, indices)), expected, rtol=1e-2, atol=1e-2)
