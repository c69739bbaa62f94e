"""The training loss by source: exactly the loss of the step, on any layout, without a change of the training."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_run import CONFIG, finish, read_metrics
from gloo_pool import GlooPool
from parity import TINY, Curve, build, config_of, train, with_options
from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.datasets.dataloader import Batch
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import TokenLoss
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.plugins.diagnostics import loss_by_source_hook
from torchtrain.plugins.diagnostics.loss_by_source import LossBySource, source_labels
from torchtrain.trainer import TrainStep

STEPS = 2
SHAPE = replace(TINY, n_layers=2)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "FSDP": (2, {}, {}),
    "exact": (2, {}, {"sums": "exact"}),
    "z-loss in chunks": (2, {"tensor_parallel_degree": 2}, {"z_loss_weight": 1e-3, "loss_chunk_tokens": 8}),
    "TP": (2, {"tensor_parallel_degree": 2}, {}),
    "CP in chunks": (2, {"context_parallel_degree": 2}, {"loss_chunk_tokens": 4}),
    "PP": (2, {"pipeline_parallel_degree": 2}, {}),
    "PP, TP": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
    "PP, FSDP": (4, {"pipeline_parallel_degree": 2}, {}),
    "PP, CP": (4, {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}, {}),
    "CP, TP": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
    "HSDP": (4, {"data_parallel_replicate_degree": 2}, {}),
    "TP without sequence parallelism": (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, {}),
}


def train_by_source(
    parallelism: dict[str, Any], training: dict[str, Any], *, compile: bool = False
) -> tuple[Curve, list[dict[str, float]]]:
    """Train; returns the curve, and the metrics of each step. Asserts that the sums are the loss, bit by bit."""
    found = []

    def attach(train_step: TrainStep) -> None:
        model = train_step.model
        sources = tuple(SourceConfig(path=name) for name in "abc")
        enabled = with_options(JobConfig(data=DataConfig(sources=sources)), diagnostics={"enable_loss_by_source": True})
        trainer = SimpleNamespace(
            config=enabled,
            model=model,
            mesh=model.mesh,
            device=model.device,
        )
        hook = loss_by_source_hook(trainer)  # type: ignore[arg-type]
        assert isinstance(hook, LossBySource)

        class Check(Hook):
            def after_step(self, step: int, batch: Batch, loss: TokenLoss, grad_norm: Tensor) -> None:  # noqa: ARG002
                losses, tokens = hook.sums
                assert losses.sum().item() == loss.total.item()
                assert tokens.sum().item() == loss.tokens.item()
                found.append(hook.metrics())
                hook.begin_interval()

        train_step.hooks.all += [hook, Check()]

    config = config_of(parallelism=parallelism, training=training, compile={"enable": compile})
    return train(config, SHAPE, STEPS, attach=attach), found


def train_compiled_by_source() -> tuple[Curve, list[dict[str, float]]]:
    """``train_by_source`` with the graphs of blocks and loss that Inductor would get, run uncompiled."""
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")),
    ):
        warnings.simplefilter("ignore")  # the compiler's about its own operation
        return train_by_source({}, {}, compile=True)


def train_without(training: dict[str, Any]) -> tuple[Curve, list[float]]:
    """Train without the hook; returns the curve, and the losses in step 1 of each source alone, by masked labels."""
    model = build(config_of(training=training), SHAPE)
    losses = []

    class Reference(Hook):
        def before_step(self, step: int, batch: Batch) -> None:
            if step > 1:
                return
            for source in range(3):
                assert batch.sources is not None
                labels = torch.where((batch.sources == source)[:, None], batch.labels, -100)
                microbatches = Microbatches(model.mesh, model.device, 2, None)
                total = sum(model.forward(part).item() for part in microbatches(Batch(batch.tokens, labels)))
                losses.append(total / (labels != -100).sum().item())

    config = config_of(training=training)
    curve = train(config, SHAPE, STEPS, attach=lambda train_step: train_step.hooks.all.append(Reference()))
    return curve, losses


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> list[dict[str, float]]:
    """The metrics of one rank."""
    ((_, found),) = gloo.run(1, train_by_source, {}, {})
    return found


@pytest.fixture(scope="module")
def without(gloo: GlooPool) -> tuple[Curve, list[float]]:
    """One rank without the hook."""
    ((plain, losses),) = gloo.run(1, train_without, {})
    return plain, losses


def test_sources_have_the_losses_of_their_rows_and_training_does_not_change(
    gloo: GlooPool, reference: list[dict[str, float]], without: tuple[Curve, list[float]]
) -> None:
    plain, losses = without
    ((curve, _),) = gloo.run(1, train_by_source, {}, {})
    assert [reference[0][f"source_loss_{name}"] for name in "abc"] == pytest.approx(losses, rel=1e-6)
    assert min(abs(losses[i] - losses[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-4, "an exchange would be noticed"
    assert [name for name, tensor in curve.last.items() if not torch.equal(tensor, plain.last[name])] == []
    assert curve.losses == pytest.approx(plain.losses, rel=1e-6)


# The others repeat one of these without an option; test_logged_numbers.py has all axes.
QUICK = ("exact", "z-loss in chunks")


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_losses_by_source_are_the_same_on_layouts(
    gloo: GlooPool, reference: list[dict[str, float]], without: tuple[Curve, list[float]], layout: str
) -> None:
    ranks, parallelism, training = LAYOUTS[layout]
    for curve, found in gloo.run(ranks, train_by_source, parallelism, training):
        assert curve.losses[0] == pytest.approx(without[0].losses[0], rel=1e-6)  # of a run without the hook
        if "z_loss_weight" in training:  # from the second step on it is another training
            found, expected = found[:1], reference[:1]
        else:
            expected = reference
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_losses_by_source_are_the_same_if_compiled(
    gloo: GlooPool, reference: list[dict[str, float]], without: tuple[Curve, list[float]]
) -> None:
    ((curve, found),) = gloo.run(1, train_compiled_by_source)
    assert curve.losses == pytest.approx(without[0].losses, rel=1e-5)
    for ours, theirs in zip(found, reference, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_run_logs_loss_and_tokens_of_each_source_by_stage(tmp_path: Path) -> None:
    """Of all steps since the line before: the lines of a stage add up to its tokens."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} = [{name}]\n" * 2000)
    config = tmp_path / "two.toml"
    sources = "".join(f'[[data.sources]]\npath = "{tmp_path}/{name}.txt"\n' for name in ("a", "b"))
    by_source = "[diagnostics]\nenable_loss_by_source = true\n[report]"
    options = CONFIG.replace("steps = 8\n", "").replace("log_freq = 1", "log_freq = 3").replace("[report]", by_source)
    stages = '[[stages]]\nname = "one"\nsteps = 8\n[[stages]]\nname = "two"\nsteps = 1\n'
    config.write_text(f"{options}\n{sources}\n{stages}")
    output = finish(tmp_path / "run", "--job.config_file", str(config), ranks=1)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert [(line["step"], line["stage"]) for line in lines] == [
        (1, "one"),
        (3, "one"),
        (6, "one"),
        (8, "one"),
        (9, "two"),
    ]
    tokens = [sum(line[f"source_tokens_{name}"] for name in ("a", "b")) for line in lines]
    assert tokens == [128, 256, 384, 256, 128]
    for line in lines:  # the mean of all sources is between theirs, and is the mean over all tokens
        nats = sum(line[f"source_tokens_{name}"] * line.get(f"source_loss_{name}", 0.0) for name in ("a", "b"))
        assert line["loss_mean"] == pytest.approx(nats / sum(line[f"source_tokens_{name}"] for name in ("a", "b")))
    assert lines[0]["loss_mean"] == pytest.approx(lines[0]["loss"], 1e-12)
    assert lines[2]["loss_mean"] != pytest.approx(lines[2]["loss"], 1e-6)  # of three steps
    last = lines[-1]  # of one step
    parts = [last[f"source_tokens_{name}"] * last.get(f"source_loss_{name}", 0.0) for name in ("a", "b")]
    assert sum(parts) / 128 == pytest.approx(last["loss"], 1e-12)
    for name in ("a", "b"):
        of_one = sum(line[f"source_tokens_{name}"] for line in lines[:4])
        mean = sum(line[f"source_tokens_{name}"] * line.get(f"source_loss_{name}", 0.0) for line in lines[:4]) / of_one
        assert f"one: loss {mean:.4f} of {format_tokens(of_one)} tokens; two: loss " in " ".join(output.split())


def test_sources_with_the_same_name_are_numbered() -> None:
    paths = ("x/web", "books", "y/web")
    config = DataConfig(sources=tuple(SourceConfig(path=path) for path in paths))
    assert source_labels(config) == ["web_1", "books", "web_2"]
