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
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtrain.datasets.dataloader import Batch
from torchtrain.metrics.norms import NormsByLayer, RecordedNorms
from torchtrain.metrics.step_hook import StepHook
from torchtrain.models.llama import Transformer
from torchtrain.trainer import TrainStep

STEPS = 3
TIED = replace(TINY, tied_embeddings=True)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "FSDP": (2, {}, {}),
    "HSDP": (2, {"data_parallel_replicate_degree": 2}, {}),
    "exact": (2, {}, {"sums": "exact"}),
    "TP": (2, {"tensor_parallel_degree": 2}, {}),
    "TP without SP": (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, {}),
    "CP": (2, {"context_parallel_degree": 2}, {}),
    "PP, FSDP": (4, {"pipeline_parallel_degree": 2}, {}),
}
Norms = list[tuple[int, dict[str, float]]]


def train_with_norms(parallelism: dict[str, Any], training: dict[str, Any], shape: Any = TINY, freq: int = 2) -> Norms:
    """Train; returns step and norms of each report."""
    found: Norms = []

    def attach(train_step: TrainStep) -> None:
        train_step.hooks.append(NormsByLayer(train_step.model, freq, lambda *report: found.append(report)))

    train(config_of(parallelism=parallelism, training=training), shape, steps=STEPS, attach=attach)
    return found


def reference_norms() -> list[dict[str, float]]:
    """The norms of each step by plain PyTorch, of full tensors by the names of parameters; on one rank."""
    found: list[dict[str, float]] = []

    class Reference(StepHook):
        def __init__(self, train_step: TrainStep) -> None:
            self.parameters = dict(train_step.model.model_parts[0].named_parameters())

        def full(self, tensor: Tensor | None) -> Tensor:
            assert isinstance(tensor, DTensor)
            return tensor.full_tensor().detach().double().clone()

        def before_step(self, step: int, batch: Batch) -> None:  # noqa: ARG002
            """Compute the outputs of the blocks with the same weights by a model that is not parallelized."""
            model = Transformer(TINY)
            model.load_state_dict({name: self.full(parameter) for name, parameter in self.parameters.items()})
            self.outputs: list[float] = []
            for block in model.layers.values():
                block.register_forward_hook(lambda _, __, out: self.outputs.append(out.pow(2).mean().sqrt().item()))
            model(batch.tokens)

        def after_gradients(self) -> None:
            self.grads = {name: self.full(parameter.grad) for name, parameter in self.parameters.items()}
            self.before = {name: self.full(parameter) for name, parameter in self.parameters.items()}

        def after_update(self) -> None:
            after = {name: self.full(parameter) for name, parameter in self.parameters.items()}
            updates = {name: after[name] - before for name, before in self.before.items()}
            norms = {}
            for kind, tensors in (("grad", self.grads), ("weight", after), ("update", updates)):
                for layer in ["tok_embeddings", *(f"layers.{i}" for i in range(TINY.n_layers)), "norm", "output"]:
                    own = [t.flatten() for name, t in tensors.items() if name.startswith(f"{layer}.")]
                    norms[f"norm_{kind}_{layer}"] = torch.cat(own).norm().item()
            norms |= {f"rms_output_layers.{i}": output for i, output in enumerate(self.outputs)}
            found.append(norms)

    train(config_of(), steps=STEPS, attach=lambda train_step: train_step.hooks.append(Reference(train_step)))
    return found


def test_norms_are_those_of_plain_pytorch(gloo: GlooPool) -> None:
    (expected,) = gloo.run(1, reference_norms)
    (found,) = gloo.run(1, train_with_norms, {}, {}, TINY, 1)
    assert [step for step, _ in found] == [1, 2, 3]
    for (_, ours), theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.fixture(scope="module")
def one_rank(gloo: GlooPool) -> Norms:
    (found,) = gloo.run(1, train_with_norms, {}, {})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_are_the_same_on_layouts(gloo: GlooPool, one_rank: Norms, layout: str) -> None:
    ranks, parallelism, training = LAYOUTS[layout]
    assert [step for step, _ in one_rank] == [2]
    for found in gloo.run(ranks, train_with_norms, parallelism, training):
        assert [step for step, _ in found] == [2]
        assert found[0][1] == pytest.approx(one_rank[0][1], rel=1e-5)


def test_tied_embedding_is_counted_once(gloo: GlooPool) -> None:
    (expected,) = gloo.run(1, train_with_norms, {}, {}, TIED)
    assert "norm_grad_output" not in expected[0][1]
    for found in gloo.run(2, train_with_norms, {"pipeline_parallel_degree": 2}, {}, TIED):
        assert found[0][1] == pytest.approx(expected[0][1], rel=1e-5)


def test_run_writes_norms_every_norms_freq_steps(tmp_path: Path) -> None:
    finish(tmp_path, "--metrics.norms_freq", "3", "--training.steps", "7", "--metrics.log_freq", "100", ranks=1)
    lines = [line for line in read_metrics(tmp_path) if "norm_grad_output" in line]
    assert [line["step"] for line in lines] == [3, 6]
    assert all(0.01 < line["rms_output_layers.0"] < 100 for line in lines)
    assert all(line["norm_weight_layers.0"] > line["norm_update_layers.0"] > 0 for line in lines)


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
    names = [f"{kind}_layers.{i}" for kind in ("norm_grad", "norm_weight", "norm_update", "rms_output") for i in (0, 1)]
    recorded = RecordedNorms()
    recorded.add(99, dict.fromkeys(names, 500.0))  # undone by a rollback
    for step, usual in USUAL:
        recorded.add(step, {name: changes.get((step, name), usual) for name in names})
    assert recorded.first_to_leave().startswith(expected)
    assert bool(recorded.first_to_leave()) == bool(expected)
