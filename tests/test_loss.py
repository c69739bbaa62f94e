"""Chunked cross entropy equals plain cross entropy: values, gradients, and gradients under FSDP."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from gloo_pool import GlooPool
from parity import TINY, config_of, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.cpu import build as cpu_build
from torchtrain.distributed.mesh import Mesh, resolve_parallel_dims
from torchtrain.labels import IGNORE_INDEX
from torchtrain.models.initialization import layout_independent_init
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.loss.output_loss import OutputLoss
from torchtrain.models.loss.z_loss import cross_entropy_with_z
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.parallelisms.parallelize_llama import parallelize_llama

VOCAB, DIM = 96, 16


def relative_error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def loss_and_gradients(loss: OutputLoss, hidden: Tensor, output: nn.Linear, labels: Tensor) -> list[Tensor]:
    value = loss(hidden, output, labels)
    gradients = torch.autograd.grad(value.sum() / 7, (hidden, output.weight))
    return [value.detach(), *gradients]


@pytest.mark.parametrize("dim", [16, 64])  # the gradients of the logits of 60 tokens are kept if dim is at least 60
@pytest.mark.parametrize("tokens", [1, 8, 30, 1000])
def test_chunked_loss_equals_the_plain_loss(tokens: int, dim: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 20, dim, requires_grad=True)
    output = nn.Linear(dim, VOCAB, bias=False)
    labels = torch.randint(VOCAB, (3, 20))
    labels[0, 3:] = IGNORE_INDEX
    plain = loss_and_gradients(OutputLoss(0), hidden, output, labels)
    chunked = loss_and_gradients(OutputLoss(tokens), hidden, output, labels)
    assert max(map(relative_error, chunked, plain)) < 1e-6
    with torch.no_grad():
        assert relative_error(OutputLoss(tokens)(hidden, output, labels), plain[0]) < 1e-6


@pytest.mark.parametrize(
    ("chunk_tokens", "backend"),
    [(0, ""), (8, ""), (0, "aot_eager_decomp_partition"), pytest.param(0, "inductor", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_z_loss_equals_plain_pytorch(chunk_tokens: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    loss = OutputLoss(chunk_tokens, z_weight=0.3, compile=backend != "")
    torch.manual_seed(0)
    hidden = torch.randn(3, 20, DIM, requires_grad=True)
    output = nn.Linear(DIM, VOCAB, bias=False)
    labels = torch.randint(VOCAB, (3, 20))
    labels[0, 3:] = IGNORE_INDEX
    logits = output(hidden)[labels != IGNORE_INDEX]
    plain = F.cross_entropy(logits, labels[labels != IGNORE_INDEX], reduction="sum")
    z_loss = 0.3 * logits.logsumexp(dim=-1).square().sum()
    gradients = torch.autograd.grad((plain + z_loss) / 7, (hidden, output.weight))
    found = loss_and_gradients(loss, hidden, output, labels)
    assert max(map(relative_error, found, (torch.stack((plain, z_loss)), *gradients))) < 1e-6
    with torch.no_grad():
        assert relative_error(loss(hidden, output, labels), found[0]) < 1e-6


def test_z_loss_saves_no_float32_logits_for_backward() -> None:
    logits = torch.randn(2, 40, VOCAB, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy_with_z(logits, torch.randint(VOCAB, (2, 40)), 1e-4)
    assert logits.nbytes < sum(saved.values()) < 1.2 * logits.nbytes  # and some numbers of each token


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation, in forward and backward."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)), 0)
        return result


def test_chunked_loss_never_materializes_all_logits() -> None:
    output = nn.Linear(DIM, VOCAB, bias=False)
    hidden = torch.randn(4, 200, DIM, requires_grad=True)
    labels = torch.randint(VOCAB, (4, 200))
    with LargestTensor() as plain:
        loss_and_gradients(OutputLoss(0), hidden, output, labels)
    assert plain.numel == labels.numel() * VOCAB
    with LargestTensor() as chunked:
        loss_and_gradients(OutputLoss(40), hidden, output, labels)
    assert chunked.numel == max(40 * VOCAB, hidden.numel())


@pytest.mark.parametrize("dim", [16, 1024])  # with the gradient of the weight, or of the logits
def test_logits_of_a_chunk_are_freed_before_those_of_the_next(dim: int) -> None:
    output = nn.Linear(dim, VOCAB, bias=False)
    hidden = torch.randn(4, 200, dim, requires_grad=True)
    labels = torch.randint(VOCAB, (4, 200))
    logits: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    output.register_forward_pre_hook(lambda *_: alive.append(sum(of_chunk() is not None for of_chunk in logits)))
    output.register_forward_hook(lambda _layer, _inputs, result: logits.append(weakref.ref(result)))
    loss_and_gradients(OutputLoss(40), hidden, output, labels)
    assert alive == [0] * 20


class ScaledLinear(nn.Linear):
    """A linear layer whose gradient is not the product of those of its outputs and its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(("layer", "bias"), [(ScaledLinear, False), (nn.Linear, True)])
def test_chunked_loss_of_another_output_layer_equals_the_plain_loss(layer: type[nn.Linear], bias: bool) -> None:
    torch.manual_seed(0)
    hidden, labels = torch.randn(3, 20, 64, requires_grad=True), torch.randint(VOCAB, (3, 20))
    output = layer(64, VOCAB, bias=bias)
    plain, chunked = (loss_and_gradients(OutputLoss(tokens), hidden, output, labels) for tokens in (0, 8))
    assert max(map(relative_error, chunked, plain)) < 1e-6


@pytest.mark.parametrize("dim", [16, 64])
def test_chunked_bfloat16_gradients_are_as_accurate_as_plain_ones(dim: int) -> None:
    torch.manual_seed(0)
    output = nn.Linear(dim, VOCAB, bias=False).bfloat16()
    hidden = torch.randn(2, 64, dim).bfloat16().requires_grad_()
    labels = torch.randint(VOCAB, (2, 64))
    exact_output = nn.Linear(dim, VOCAB, bias=False).double()
    exact_output.load_state_dict(output.state_dict())
    exact_hidden = hidden.detach().double().requires_grad_()
    exact = loss_and_gradients(OutputLoss(0), exact_hidden, exact_output, labels)
    errors = [
        [relative_error(value.double(), reference) for value, reference in zip(results, exact, strict=True)]
        for results in (loss_and_gradients(OutputLoss(tokens), hidden, output, labels) for tokens in (0, 4))
    ]
    assert [
        (plain, chunked) for plain, chunked in zip(*errors, strict=True) if not (chunked < 1.5 * plain + 1e-6)
    ] == []


def test_number_of_chunks_divides_the_sequence_and_respects_the_limit() -> None:
    assert OutputLoss(0).chunks(torch.Size((8, 2048)), 128256) == 1
    assert OutputLoss(4096).chunks(torch.Size((8, 2048)), 128256) == 4
    assert OutputLoss(100).chunks(torch.Size((2, 150)), VOCAB) == 3
    assert OutputLoss(1).chunks(torch.Size((2, 7)), VOCAB) == 7  # a chunk has at least one position of every row
    assert OutputLoss().chunks(torch.Size((8, 256)), 4096) == 1
    on_cpu = OutputLoss()
    on_cpu.max_logits_bytes = cpu_build.MAX_LOGITS_BYTES
    for loss, vocab in ((OutputLoss(), 128256), (on_cpu, 4096)):
        chunks, limit = loss.chunks(torch.Size((2, 8192)), vocab), loss.max_logits_bytes
        assert 8192 % chunks == 0
        assert limit / 2 <= 2 * 8192 // chunks * vocab * 4 <= limit
    assert on_cpu.chunks(torch.Size((2, 8192)), 128256) == 2 * 8192 // 256


@pytest.mark.parametrize(("tied", "dim"), [(False, 16), (True, 16), (True, 64)])
def test_chunked_loss_equals_the_plain_loss_under_fsdp(gloo: GlooPool, tied: bool, dim: int) -> None:
    for plain, chunked in gloo.run(2, sharded_gradients, tied, dim):
        assert plain.keys() == chunked.keys()
        for name, reference in plain.items():
            assert relative_error(chunked[name], reference) < 1e-6, name


def sharded_gradients(tied: bool, dim: int) -> list[dict[str, Any]]:
    results = []
    for tokens in (0, 5):
        config = TransformerConfig(
            dim=dim, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=VOCAB, tied_embeddings=tied
        )
        with torch.device("meta"):
            model = Transformer(config)
        parallelize_llama(
            model,
            Mesh(torch.device("cpu"), resolve_parallel_dims(ParallelismConfig(), 2)),
            JobConfig(
                training=TrainingConfig(mixed_precision_param="float32"),
                parallelism=ParallelismConfig(fsdp_reshard_after_forward="always"),
            ),
        )
        model.to_empty(device="cpu")
        with layout_independent_init([model], 0):
            model.init_weights()
        torch.manual_seed(torch.distributed.get_rank())
        inputs, labels = torch.randint(VOCAB, (2, 2, 20))
        loss = model(inputs, head=lambda h, output: OutputLoss(tokens)(h, output, labels))  # noqa: B023
        loss.sum().backward()
        gradients = {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients})
    return results


def vocab_sizes_of_the_chunks(tensor_degree: int) -> set[int]:
    """Return the vocabulary sizes that the loss uses to choose its number of chunks."""
    seen = set()
    chunks = OutputLoss.chunks

    def recorded(loss: OutputLoss, shape: torch.Size, vocab: int) -> int:
        seen.add(vocab)
        return chunks(loss, shape, vocab)

    config = config_of(parallelism={"tensor_parallel_degree": tensor_degree}, training={"local_batch_size": 8})
    with patch.object(OutputLoss, "chunks", recorded):
        train(config, replace(TINY, vocab_size=101, n_layers=1), steps=1)
    return seen


def test_chunk_size_depends_on_the_vocabulary_shard_of_a_rank(gloo: GlooPool) -> None:
    assert gloo.run(1, vocab_sizes_of_the_chunks, 1) == [{101}]
    # The shards have 51 and 50 entries. Both ranks need the same chunks, since each chunk calls collectives.
    assert gloo.run(2, vocab_sizes_of_the_chunks, 2) == [{51}] * 2
