"""Norms by layer: those of plain PyTorch on one rank, and the same on every layout."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_run import finish, read_metrics
from gloo_pool import GlooPool
from parity import TINY, config_of, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask

from torchtrain.datasets.dataloader import Batch
from torchtrain.metrics.hooks import Hook
from torchtrain.models.document_mask import document_mask, document_numbers
from torchtrain.models.llama import Transformer
from torchtrain.plugins.diagnostics.attention_logits import logit_statistics
from torchtrain.plugins.diagnostics.norms import NormsByLayer, RecordedNorms
from torchtrain.trainer import TrainStep

STEPS = 3
SHAPE = replace(TINY, n_layers=2)
TIED = replace(SHAPE, tied_embeddings=True)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "FSDP": (2, {}, {}),
    "HSDP": (2, {"data_parallel_replicate_degree": 2}, {}),
    "exact": (2, {}, {"sums": "exact"}),
    "TP": (2, {"tensor_parallel_degree": 2}, {}),
    "TP without SP": (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, {}),
    "CP": (2, {"context_parallel_degree": 2}, {}),
    "CP, TP": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
    "PP, FSDP": (4, {"pipeline_parallel_degree": 2}, {}),
}
Norms = list[tuple[int, dict[str, float]]]


def train_with_norms(
    parallelism: dict[str, Any],
    training: dict[str, Any],
    shape: Any = SHAPE,
    freq: int = 2,
    documents: int | None = None,
    checkpointing: str = "none",
) -> Norms:
    """Train; returns step and norms of each report. ``documents``: the token that begins one."""
    found: Norms = []

    def attach(train_step: TrainStep) -> None:
        train_step.hooks.all.append(NormsByLayer(train_step.model, freq, lambda *report: found.append(report)))

    config = config_of(parallelism=parallelism, training=training, activation_checkpoint={"mode": checkpointing})
    train(config, shape, steps=STEPS, document_start=documents, attach=attach)
    return found


class FullLogits(nn.Module):
    """Causal attention that stores its logits, one for each pair of a query and a key that it attends to."""

    def __init__(self, inner: nn.Module, logits: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.logits = inner, logits

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is None
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = torch.einsum("bhqd,bhkd->bhqk", q, keys) / math.sqrt(q.shape[-1])
        self.logits.append(logits[:, :, torch.ones(q.shape[2], k.shape[2]).tril() > 0].detach())
        return self.inner(q, k, v, mask)  # type: ignore[no-any-return]


def reference_norms() -> list[dict[str, float]]:
    """The norms of each step by plain PyTorch, of full tensors by the names of parameters; on one rank."""
    found: list[dict[str, float]] = []

    class Reference(Hook):
        def __init__(self, train_step: TrainStep) -> None:
            self.parameters = dict(train_step.model.model_parts[0].named_parameters())

        def full(self, tensor: Tensor | None) -> Tensor:
            assert isinstance(tensor, DTensor)
            return tensor.full_tensor().detach().double().clone()

        def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
            """Compute the outputs of the blocks with the same weights by a model that is not parallelized."""
            model = Transformer(SHAPE)
            model.load_state_dict({name: self.full(parameter) for name, parameter in self.parameters.items()})
            self.outputs: list[float] = []
            self.logits: list[Tensor] = []
            for block in model.layers.values():
                block.register_forward_hook(lambda _, __, out: self.outputs.append(out.pow(2).mean().sqrt().item()))
            model.replace_inner_attention(lambda inner: FullLogits(inner, self.logits))
            model(batch.tokens)

        def after_gradients(self) -> None:
            self.grads = {name: self.full(parameter.grad) for name, parameter in self.parameters.items()}
            self.before = {name: self.full(parameter) for name, parameter in self.parameters.items()}

        def after_update(self) -> None:
            after = {name: self.full(parameter) for name, parameter in self.parameters.items()}
            updates = {name: after[name] - before for name, before in self.before.items()}
            norms = {}
            for kind, tensors in (("grad", self.grads), ("weight", after), ("update", updates)):
                for layer in ["tok_embeddings", *(f"layers.{i}" for i in range(SHAPE.n_layers)), "norm", "output"]:
                    own = [t.flatten() for name, t in tensors.items() if name.startswith(f"{layer}.")]
                    norms[f"norm_{kind}_{layer}"] = torch.cat(own).norm().item()
            norms |= {f"rms_output_layers.{i}": output for i, output in enumerate(self.outputs)}
            norms |= {f"rms_logits_layers.{i}": of.pow(2).mean().sqrt().item() for i, of in enumerate(self.logits)}
            norms |= {f"max_logits_layers.{i}": of.max().item() for i, of in enumerate(self.logits)}
            found.append(norms)

    train(config_of(), SHAPE, STEPS, attach=lambda train_step: train_step.hooks.all.append(Reference(train_step)))
    return found


def test_norms_are_those_of_plain_pytorch(gloo: GlooPool) -> None:
    (expected,) = gloo.run(1, reference_norms)
    (found,) = gloo.run(1, train_with_norms, {}, {}, SHAPE, 1)
    assert [step for step, _ in found] == [1, 2, 3]
    for (_, ours), theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.fixture(scope="module")
def one_rank(gloo: GlooPool) -> Norms:
    (found,) = gloo.run(1, train_with_norms, {}, {})
    return found


QUICK = "exact"  # test_logged_numbers.py has the other axes


@pytest.mark.parametrize(
    "layout", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_norms_are_the_same_on_layouts(gloo: GlooPool, one_rank: Norms, layout: str) -> None:
    ranks, parallelism, training = LAYOUTS[layout]
    assert [step for step, _ in one_rank] == [2]
    for found in gloo.run(ranks, train_with_norms, parallelism, training):
        assert [step for step, _ in found] == [2]
        assert found[0][1] == pytest.approx(one_rank[0][1], rel=1e-5)


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_norms_are_the_same_if_forwards_are_recomputed(gloo: GlooPool, one_rank: Norms, mode: str) -> None:
    (found,) = gloo.run(1, train_with_norms, {}, {}, SHAPE, 2, None, mode)
    assert found[0][1] == pytest.approx(one_rank[0][1], rel=1e-6)


def test_logits_of_documents_are_the_same_under_context_parallelism(gloo: GlooPool) -> None:
    few = replace(SHAPE, vocab_size=8)  # so that each row has several documents
    (expected,) = gloo.run(1, train_with_norms, {}, {}, few, 2, 3)
    for found in gloo.run(2, train_with_norms, {"context_parallel_degree": 2}, {}, few, 2, 3):
        assert found[0][1] == pytest.approx(expected[0][1], rel=1e-5)


@pytest.mark.parametrize("kind", ["causal", "dense", "flex"])
def test_logits_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Logits that the mask excludes do not count: neither in the mean, nor in the maximum, though they are larger."""
    monkeypatch.setattr("torchtrain.plugins.diagnostics.attention_logits.MAX_LOGITS", 3 * 2 * 4 * 16)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 16, 8, generator=generator) for heads in (4, 2))
    numbers = document_numbers(torch.tensor([[1, *5 * [2], 1, *9 * [2]], [*9 * [2], 1, *6 * [2]]]), 1)
    dense = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril() if kind == "causal" else None
    mask: Any = None
    if dense is None:
        mask = dense = document_mask(numbers, torch.arange(16))
    if kind == "flex":  # used on CUDA
        mask = create_block_mask(lambda b, _, q, k: dense[b, 0, q, k], 2, None, 16, 16, device="cpu")
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, dim=1)) / math.sqrt(8)
    expected = logits[dense.expand(2, 4, 16, 16)]
    assert logits.max() > expected.max()
    square, count, maximum = logit_statistics(q, k, mask, torch.arange(16))
    assert count == len(expected)
    assert square.item() == pytest.approx(expected.pow(2).sum().item(), rel=1e-5)
    assert maximum.item() == pytest.approx(expected.max().item(), rel=1e-6)


def test_tied_embedding_is_counted_once(gloo: GlooPool) -> None:
    (expected,) = gloo.run(1, train_with_norms, {}, {}, TIED)
    assert "norm_grad_output" not in expected[0][1]
    for found in gloo.run(2, train_with_norms, {"pipeline_parallel_degree": 2}, {}, TIED):
        assert found[0][1] == pytest.approx(expected[0][1], rel=1e-5)


def test_run_writes_norms_every_norms_freq_steps(tmp_path: Path) -> None:
    finish(tmp_path, "--diagnostics.norms_freq", "3", "--training.steps", "7", "--metrics.log_freq", "100", ranks=1)
    lines = [line for line in read_metrics(tmp_path) if "norm_grad_output" in line]
    assert [line["step"] for line in lines] == [3, 6]
    assert [line for line in lines if not (0.01 < line["rms_output_layers.0"] < 100)] == []
    assert [line for line in lines if not (0 < line["rms_logits_layers.0"] < line["max_logits_layers.0"] < 10)] == []
    assert [line for line in lines if not (line["norm_weight_layers.0"] > line["norm_update_layers.0"] > 0)] == []


USUAL = [(step, 1.0 + step % 3 / 10) for step in range(1, 13)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        (
            {(12, "norm_grad_layers.1"): 9.0},
            "the norm of the gradient of layers.1 left its range first, in step 12: 9,",
        ),
        # The block whose output left two steps before, and not the gradients that left with the loss.
        (
            {
                **{(step, "rms_output_layers.1"): 3.0 for step in (10, 11, 12)},
                (12, "norm_grad_layers.0"): 90.0,
                (12, "rms_output_layers.0"): 5.0,
            },
            "the root mean square of the output of layers.1 left its range first, in step 10: 3, usually 1.1",
        ),
        # Of what left together, what is the farthest outside.
        (
            {(12, "norm_grad_layers.0"): 9.0, (12, "norm_grad_layers.1"): 90.0},
            "the norm of the gradient of layers.1 left its range first, in step 12: 90, usually 1.1",
        ),
        # Logits come before the output of their block.
        (
            {(12, name): math.nan for name in ("rms_logits_layers.1", "rms_output_layers.1", "norm_grad_layers.0")},
            "the root mean square of the attention logits of layers.1 left its range first, in step 12: nan, ",
        ),
        # What is not finite spreads to all later outputs and to all gradients.
        (
            {(12, name): math.nan for name in ("rms_output_layers.1", "norm_grad_layers.0", "norm_grad_layers.1")},
            "the root mean square of the output of layers.1 left its range first, in step 12: nan, usually 1.1",
        ),
        # A spike that is over does not widen the range.
        (
            {(10, "norm_grad_layers.1"): 90.0, (12, "norm_grad_layers.1"): 9.0},
            "the norm of the gradient of layers.1 left its range first, in step 12: 9, usually 1.1",
        ),
        ({(10, "norm_grad_layers.1"): 90.0}, ""),
        # Weights and updates grow in any run.
        ({(12, "norm_weight_layers.1"): 90.0, (12, "norm_update_layers.1"): 90.0}, ""),
    ],
)
def test_layer_that_left_its_range_first_is_named(changes: dict[tuple[int, str], float], expected: str) -> None:
    names = [f"{kind}_layers.{i}" for kind in ("norm_grad", "norm_weight", "norm_update") for i in (0, 1)]
    names += [f"{kind}_layers.{i}" for i in (0, 1) for kind in ("rms_logits", "rms_output")]
    recorded = RecordedNorms()
    recorded.add(99, dict.fromkeys(names, 500.0))  # undone by a rollback
    for step, usual in USUAL:
        recorded.add(step, {name: changes.get((step, name), usual) for name in names})
    assert recorded.describe_first_outlier().startswith(expected)
    assert bool(recorded.describe_first_outlier()) == bool(expected)
