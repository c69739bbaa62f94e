"""[grains]: runs are bitwise identical on any tensor, context and pipeline degree."""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked_run
import pytest
import torch
from data_samples import DOCUMENTS, write_jsonl
from forked_command import checked_command
from forked_run import different_tensors, finish, logged_losses, patched_loss, read_metrics, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, Curve, config_of, train
from torch import Tensor

from torchtrain.models.llama import TransformerConfig
from torchtrain.plugins.diagnostics.loss_by_source import LossBySource
from torchtrain.plugins.exact_sums import grain_layers
from torchtrain.plugins.exact_sums.tree import all_tree_sum, scatter_tree_sum, tree_sum
from torchtrain.trainer import TrainStep

SHAPE = replace(TINY, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=104)
AXES = {"R": "data_parallel_replicate", "S": "data_parallel_shard", "C": "context_parallel", "T": "tensor_parallel"}
AXES |= {"P": "pipeline_parallel"}


def layout(text: str) -> tuple[int, dict[str, Any]]:
    """Number of ranks and [parallelism] options of "S2 T2"; "-": without sequence parallelism, "": one rank."""
    ranks, options = 1, {}
    for word in text.split():
        if word == "-":
            options["enable_sequence_parallel"] = False
        elif word[1:].isdecimal():
            options[f"{AXES[word[0]]}_degree"] = int(word[1:])
            ranks *= int(word[1:])
        else:
            options["pipeline_parallel_schedule"] = word
    return ranks, options


def run(
    gloo: GlooPool,
    text: str,
    changes: dict[str, Any],
    shape: TransformerConfig,
    steps: int,
    rows: int = 2,
    function: Callable[..., Curve] = train,
) -> Curve:
    """Train on a layout, with ``rows`` in a microbatch; merge the tensors of all ranks."""
    ranks, options = layout(text)
    local = 4 if "P" in text else rows
    if "P" in text:
        options["pipeline_parallel_microbatches"] = local // rows
    options |= changes.get("parallelism", {})
    training = {"sums": "exact", "local_batch_size": local, **changes.get("training", {})}
    grains = {"tensor": 4, "context": 4, **changes.get("grains", {})}
    config = config_of(**{**changes, "training": training, "grains": grains, "parallelism": options})
    curves: list[Curve] = gloo.run(ranks, function, config, shape, steps, changes_documents(changes))
    for curve in curves[1:]:
        assert (curve.losses, curve.grad_norms) == (curves[0].losses, curves[0].grad_norms)
    last, moments, averages = (
        dict(chain.from_iterable(getattr(curve, name).items() for curve in curves))
        for name in ("last", "moments", "averages")
    )
    return replace(curves[0], last=last, moments=moments, averages=averages)


def changes_documents(changes: dict[str, Any]) -> int | None:
    return 7 if changes.get("data", {}).get("document_mask") else None


def differences(curve: Curve, reference: Curve) -> list[str]:
    """What differs in bits."""
    found = [] if curve.averaged_loss == reference.averaged_loss else ["loss with averaged weights"]
    for name in ("losses", "grad_norms", "z_losses"):
        pairs = zip(getattr(curve, name), getattr(reference, name), strict=True)
        found += [f"{name} of step {step}" for step, (a, b) in enumerate(pairs, 1) if a != b]
    for name in ("last", "moments", "averages"):
        found += [f"{name}: {t}" for t in different_tensors(getattr(curve, name), getattr(reference, name))]
    return found


BFLOAT16 = {"training": {"mixed_precision_param": "bfloat16"}}
QWEN3 = replace(SHAPE, head_dim=6, qk_norm=True, norm_eps=1e-6, rope_theta=1e6)
CASES: dict[str, tuple[dict[str, Any], TransformerConfig]] = {
    "float32": ({}, SHAPE),
    "bfloat16": (BFLOAT16, SHAPE),
    "tensor grains alone": ({**BFLOAT16, "grains": {"context": 1}}, SHAPE),
    "chunks alone": ({**BFLOAT16, "grains": {"tensor": 1}}, SHAPE),
    "z-loss, loss in pieces": ({"training": {"z_loss_weight": 1e-2, "loss_chunk_tokens": 2}}, SHAPE),
    "recomputed": ({**BFLOAT16, "activation_checkpoint": {"mode": "full"}}, SHAPE),
    "selective": ({"activation_checkpoint": {"mode": "selective"}}, SHAPE),
    "document mask": ({**BFLOAT16, "data": {"document_mask": True}}, SHAPE),
    "biases": (BFLOAT16, replace(SHAPE, qkv_bias=True, norm_eps=1e-6, rope_theta=1e6)),
    "qk_norm": (BFLOAT16, QWEN3),
    "muon": ({"optimizer": {"name": "muon"}}, SHAPE),
    "ema": ({"ema": {"enable": True}}, SHAPE),
    "tied": (BFLOAT16, replace(SHAPE, tied_embeddings=True)),
    "selective, muon, ema": (
        {"activation_checkpoint": {"mode": "selective"}, "optimizer": {"name": "muon"}, "ema": {"enable": True}},
        SHAPE,
    ),
    "four layers": (BFLOAT16, replace(SHAPE, n_layers=4)),
}
Reference = Callable[..., Curve]


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Reference:
    """The run of a case on one rank, by its name, number of steps and rows of a microbatch; each is trained once."""
    return cache(lambda case, steps, rows: run(gloo, "", *CASES[case], steps, rows=rows))


LAYOUTS = [
    *("S2", "R2 S2", "T2", "T2 -", "T4", "C2", "C2 T2", "S2 T2", "P2", "P2 T2", "P2 C2", "S2 C2 T2", "S2 P2 T2"),
    *("C2 P2 T2 -", "R2 T2", "R2 C2", "R2 P2", "P2 Interleaved1F1B", "P2 T2 Interleaved1F1B"),
]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        *(("float32", "T2 -"), ("tied", "C2 T2")),
        # test_matrix, which is slow, has all cases and layouts
    ],
)
def test_runs_are_bitwise_identical_on_any_layout(gloo: GlooPool, case: str, text: str, reference: Reference) -> None:
    changes, shape = CASES[case]
    assert differences(run(gloo, text, changes, shape, 1, rows=2), reference(case, 1, 2)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_matrix(gloo: GlooPool, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "timeout_seconds", 900)  # of 20 steps
    changes, shape = CASES[case]
    steps = 20 if case in ("float32", "bfloat16") else 4
    reference, wrong = run(gloo, "", changes, shape, steps, rows=1), {}
    for text in LAYOUTS:
        degree = layout(text)[1]
        grains = changes.get("grains", {})
        if (
            degree.get("tensor_parallel_degree", 1) > grains.get("tensor", 4)
            or (degree.get("context_parallel_degree", 1) > 1 and grains.get("context", 4) < 4)
            or ("P" in text and shape.tied_embeddings)
            or ("Interleaved1F1B" in text and shape.n_layers < 4)  # two stages on each rank
        ):
            continue  # rejected
        if found := differences(run(gloo, text, changes, shape, steps, rows=1), reference):
            wrong[text] = found[:3]
    assert wrong == {}


# Faults


def no_gradient_of_one_chunk(original: Any) -> Any:
    """The backward of keys and values without the queries of one chunk."""

    def backward(ctx: Any, *grads: Tensor) -> Any:
        return original(ctx, *grads[:-1], torch.zeros_like(grads[-1]))

    return staticmethod(backward)


def chunks_before_ranks(ctx: Any, *grads: Tensor) -> Any:
    """The backward of norms' weights with another order of sums."""
    count = ctx.count
    by_chunk = [tree_sum(grads[i : i + count]) for i in range(0, len(grads), count)]
    total = tree_sum(by_chunk[i] for i in ctx.grains.leaves)
    return all_tree_sum(total, ctx.grains.tensor_group), None, None, None


def fault_of(name: str) -> AbstractContextManager[Any]:
    """A mistake in the sums over grains."""
    if name == "gradients of norms are not summed over tensor ranks":
        return patch.object(grain_layers, "all_tree_sum", lambda root, _: root)
    if name == "gradients of norms are summed over chunks before tensor ranks":
        return patch.object(grain_layers.NormWeights, "backward", staticmethod(chunks_before_ranks))
    assert name == "one chunk of queries gives keys no gradient"
    to_chunks = grain_layers.ToChunks
    return patch.object(to_chunks, "backward", no_gradient_of_one_chunk(to_chunks.backward))


def train_with_fault(name: str, *args: Any) -> Curve:
    with fault_of(name):
        return train(*args)


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        pytest.param(
            "gradients of norms are not summed over tensor ranks",
            "T2",
            "last: layers.0.attention_norm.weight",
            marks=pytest.mark.slow,
        ),
        (
            "gradients of norms are summed over chunks before tensor ranks",
            "T2",
            "moments: layers.0.attention_norm.weight.exp_avg",
        ),
        pytest.param(
            "one chunk of queries gives keys no gradient",
            "C2",
            "last: layers.0.attention.wk.weight",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_faults_are_noticed(gloo: GlooPool, name: str, text: str, first: str, reference: Reference) -> None:
    run_with_fault = run(gloo, text, {}, SHAPE, 1, function=partial(train_with_fault, name))
    found = differences(run_with_fault, reference("float32", 1, 2))
    assert first in found
    assert "losses of step 1" not in found  # what curves show


# Losses by source


def train_by_source(*args: Any) -> Curve:
    """Train with ``LossBySource``; its numbers are in place of the z-losses."""
    found: list[float] = []

    def attach(train_step: TrainStep) -> None:
        model = train_step.model
        hook = LossBySource(["a", "b", "c"], model.loss, model.mesh.loss.get_group(), model.device)
        train_step.hooks.all.append(hook)
        found.append(hook)  # type: ignore[arg-type]

    curve = train(*args, attach=attach)
    hook: Any = found[0]
    return replace(curve, z_losses=[value for _, value in sorted(hook.metrics().items())])


@pytest.mark.parametrize("text", ["C2", *(pytest.param(text, marks=pytest.mark.slow) for text in ("C2 T2", "P2 T2"))])
def test_losses_by_source_are_bitwise_identical(gloo: GlooPool, text: str, reference: Reference) -> None:
    one, ranks = (run(gloo, layout, {}, SHAPE, 1, function=train_by_source) for layout in ("", text))
    assert len(one.z_losses) == 7
    assert differences(ranks, one) == []
    # The hook does not change the loss, which is rounded by row with or without it.
    assert one.losses == reference("float32", 1, 2).losses


# The trainer


def test_run_that_changes_its_layout_is_bitwise_identical(tmp_path: Path) -> None:
    shape = replace(forked_run.TINY, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    options = ("--training.sums", "exact", "--grains.tensor", "2", "--grains.context", "4")
    options += ("--lr_scheduler.total_steps", "2", "--training.steps")
    degree = "--parallelism.{}_parallel_degree".format
    finish(tmp_path / "one", *options, "2", ranks=1, shape=shape)
    changed = tmp_path / "changed"
    output = finish(changed, *options, "1", degree("tensor"), "2", degree("context"), "2", ranks=4, shape=shape)
    assert (
        "grains: 1 of 2 tensor grains and 2 of 4 chunks of each sequence on this rank. The forward of a block has 14 "
        "matrix products in place of 7, 2 attentions in place of 1, and 2 parts of each norm"
    ) in output
    finish(changed, *options, "2", degree("pipeline"), "2", "--training.local_batch_size", "2", ranks=2, shape=shape)
    assert logged_losses(changed) == logged_losses(tmp_path / "one")
    assert different_tensors(*(saved_tensors(tmp_path / name, 2) for name in ("one", "changed"))) == []


STAGES = """
[[stages]]
name = "short"
steps = 3
[[stages]]
name = "long"
steps = 3
[stages.training]
seq_len = 64
global_batch_size = 8
"""
OPTIONS_OF_PARTS = (
    *("--model.shape.dim=32", "--model.shape.n_layers=2", "--model.shape.n_heads=4", "--model.shape.n_kv_heads=2"),
    *("--model.shape.ffn_dim=128", "--grains.tensor=2", "--grains.context=4", "--training.sums=exact"),
)
ON_FOUR = ("--parallelism.tensor_parallel_degree=2", "--parallelism.context_parallel_degree=2")


def nan_in_call_40() -> Any:
    """A hook that makes one loss of a step of the stage "long" NaN."""
    return patched_loss(lambda call, loss: loss * float("nan") if call == 40 else loss)


def options_of_run(folder: Path, config: str) -> tuple[str, ...]:
    """The options of a run in ``folder`` that ``config`` describes, with grains and little text."""
    folder.mkdir()
    (folder / "own.toml").write_text(config)
    data = write_jsonl(folder / "data.jsonl", DOCUMENTS)
    return ("--job.config_file", str(folder / "own.toml"), "--data.path", data, *OPTIONS_OF_PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ON_FOUR[1:], ON_FOUR], ids=["C2", "C2 T2"])
def test_stages_and_rollbacks_are_bitwise_identical(tmp_path: Path, layout: tuple[str, ...]) -> None:
    config = forked_run.CONFIG.replace("steps = 8\n", "") + STAGES
    for name, ranks, degrees in (("one", 1, ()), ("more", 2 ** len(layout), layout)):
        options = (*options_of_run(tmp_path / name, config), "--faults.on_nonfinite=rollback", *degrees)
        finish(tmp_path / name, *options, ranks=ranks, hook=nan_in_call_40)
        events = [line["step"] for line in read_metrics(tmp_path / name) if line.get("event") == "rolled_back"]
        assert events == [4]
    assert logged_losses(tmp_path / "more") == logged_losses(tmp_path / "one")
    assert different_tensors(*(saved_tensors(tmp_path / name, 6) for name in ("one", "more"))) == []


@pytest.mark.slow
def test_batch_ramps_are_bitwise_identical(tmp_path: Path) -> None:
    config = forked_run.CONFIG.replace("global_batch_size = 4", 'global_batch_size = "2, 4 at 128"')
    for name, ranks, degrees in (("one", 1, ()), ("four", 4, ON_FOUR)):
        options = (*options_of_run(tmp_path / name, config), "--training.steps=4", *degrees)
        finish(tmp_path / name, *options, ranks=ranks)
    assert [line["tokens"] for line in read_metrics(tmp_path / "one") if "tokens" in line] == [64, 128, 256, 384]
    assert logged_losses(tmp_path / "four") == logged_losses(tmp_path / "one")
    assert different_tensors(*(saved_tensors(tmp_path / name, 4) for name in ("one", "four"))) == []


@pytest.mark.slow
def test_replay_on_one_rank_has_the_bits_of_four(tmp_path: Path) -> None:
    """``torchtrain.explain`` trains the steps again whose checkpoints are gone."""
    folder = tmp_path / "four"
    options = (*options_of_run(folder, forked_run.CONFIG), "--training.steps=4", "--checkpoint.interval=1", *ON_FOUR)
    checked_command("torchtrain.train", *options, "--job.dump_folder", str(folder), ranks=4)
    explain = ("torchtrain.explain", str(folder), "--step=4", "--json")
    expected = json.loads(checked_command(*explain).stdout)
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoint/step-{step}")
    found = json.loads(checked_command(*explain).stdout)
    assert found["weights"] == {"checkpoint_step": 1, "replayed": 2, "exact": True}
    assert found["documents"] == expected["documents"]


# The sums


def _sums(leaves: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """The sum of ``leaves`` over all ranks, and this rank's part of it."""
    group = torch.distributed.group.WORLD
    assert group is not None
    own = leaves.chunk(group.size())[group.rank()]
    root = tree_sum(own.unbind())
    return all_tree_sum(root, group), scatter_tree_sum(root.view(parts, -1), group)


def test_sums_over_ranks_have_the_bits_of_one_rank(gloo: GlooPool) -> None:
    leaves = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    pairs = [leaves[i] + leaves[i + 1] for i in range(0, 8, 2)]
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert torch.equal(tree_sum(leaves.unbind()), expected)
    assert not torch.equal(leaves.sum(dim=0), expected)
    for ranks in (2, 4):
        found = gloo.run(ranks, _sums, leaves, ranks)
        assert all(torch.equal(total, expected) for total, _ in found)
        assert torch.equal(torch.cat([part for _, part in found]), expected)
        # Sizes that the ranks do not divide are padded.
        odd = gloo.run(ranks, _sum_of_odd, leaves[:, :5])
        assert all(torch.equal(total, expected[:5]) for total in odd)


def _sum_of_odd(leaves: Tensor) -> Tensor:
    group = torch.distributed.group.WORLD
    assert group is not None
    return all_tree_sum(tree_sum(leaves.chunk(group.size())[group.rank()].unbind()), group)
