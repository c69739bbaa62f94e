"""z-loss, averaged weights (EMA) and muP hyperparameter transfer, on every layout."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_run import different_tensors, finish, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, Curve, assert_same_run, build, config_of, global_batch, train, use_existing_process_group
from torch import Tensor

from torchtrain.config.schema import JobConfig
from torchtrain.cpu.build import use_cpu_kernels
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.spec import flops_per_token
from torchtrain.optimizers.ema import EMA
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import EMAConfig, ParameterGroupConfig
from torchtrain.trainer import Trainer, initialize

PLAIN = replace(TINY, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=101)
PLAIN = replace(PLAIN, base_dim=8, base_layers=1)  # with muP's initial weights and learning rates
MODELS = {"plain": PLAIN, "tied": replace(PLAIN, tied_embeddings=True), "deep": replace(PLAIN, n_layers=4)}
STEPS = 4  # two updates of the averages
CHANGES: dict[str, dict[str, Any]] = {
    "training": {"local_batch_size": 8, "z_loss_weight": 0.05},
    "ema": {"enable": True, "decay": 0.7, "interval": 2},
}


def config_with(optimizer: str = "adamw", **parallelism: Any) -> JobConfig:
    return config_of(**CHANGES, optimizer={"name": optimizer}, parallelism=parallelism)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rel: float = 1e-5) -> None:
    for name, tensor in found.items():
        assert (tensor - expected[name]).norm() <= rel * expected[name].norm(), name


@pytest.fixture(scope="module")
def references(gloo: GlooPool) -> dict[tuple[str, str], Curve]:
    """By model and optimizer: runs of one rank with the full batch and all logits at a time."""
    return {(model, "adamw"): run_of_one_rank(gloo, model, "adamw") for model in MODELS}


def run_of_one_rank(gloo: GlooPool, model: str, optimizer: str) -> Curve:
    curves: list[Curve] = gloo.run(1, train, config_with(optimizer), MODELS[model], STEPS)
    return curves[0]


# Ranks, model, rows per rank, tokens per chunk of the loss, optimizer, [parallelism].
LAYOUTS: dict[str, tuple[int, str, int, int, str, dict[str, Any]]] = {
    "shard": (2, "plain", 4, 8, "adamw", {}),
    "replicate": (4, "tied", 2, 0, "adamw", {"data_parallel_replicate_degree": 2}),
    "tensor": (4, "tied", 8, 0, "adamw", {"tensor_parallel_degree": 4}),
    "tensor, chunks": (2, "plain", 8, 8, "adamw", {"tensor_parallel_degree": 2}),
    "context": (2, "plain", 8, 8, "adamw", {"context_parallel_degree": 2}),
    "pipeline": (2, "tied", 8, 0, "adamw", {"pipeline_parallel_degree": 2}),
    "zero bubble": (
        2,
        "deep",
        8,
        8 if torch.__version__ >= "2.13" else 0,  # not supported by torch 2.12
        "adamw",
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
    ),
}


@pytest.mark.parametrize(
    "layout",
    [
        name if name in ("shard", "tensor, chunks", "pipeline") else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_every_layout_trains_like_one_rank(
    gloo: GlooPool, references: dict[tuple[str, str], Curve], layout: str
) -> None:
    assert_layout_trains_like_one_rank(gloo, references, LAYOUTS[layout])


def assert_layout_trains_like_one_rank(
    gloo: GlooPool, references: dict[tuple[str, str], Curve], layout: tuple[int, str, int, int, str, dict[str, Any]]
) -> None:
    ranks, model, rows, chunk_tokens, optimizer, parallelism = layout
    config = config_with(optimizer, **parallelism)
    config = replace(config, training=replace(config.training, loss_chunk_tokens=chunk_tokens, local_batch_size=rows))
    curves: list[Curve] = gloo.run(ranks, train, config, MODELS[model], STEPS)
    reference = references[model, optimizer]
    assert_same_run(curves, reference)
    for curve in curves:
        torch.testing.assert_close(curve.z_losses, reference.z_losses, rtol=1e-5, atol=0)
        assert curve.averaged_loss == pytest.approx(reference.averaged_loss, rel=1e-5)


def train_with_plain_pytorch(
    config: JobConfig, shape: TransformerConfig
) -> tuple[list[float], list[float], dict[str, Tensor], float]:
    """The same run with only the model and schedule of torchtrain: losses, z-losses, averages and their loss."""
    model = Transformer(shape)
    initialize([model], config.training.seed, torch.device("cpu"))
    settings = config.optimizer
    groups = []
    for name, parameter in model.named_parameters():
        decay, factor = settings.weight_decay * (parameter.ndim > 1), 1.0
        if name == "norm.weight":
            factor = 1 / 4  # a width of 32 over one of 8
        elif name.startswith("layers.") and parameter.ndim > 1:
            factor = 1 / 4 / (2 if name.endswith(("wo.weight", "w2.weight")) else 1)  # 2 layers over 1
        groups.append({"params": [parameter], "weight_decay": decay / factor, "factor": factor})
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)
    schedule = LRSchedule(config.lr_scheduler, settings.lr, STEPS)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, z_losses = [], []
    for step in range(1, STEPS + 1):
        windows = global_batch(step, shape.vocab_size, config.training.seq_len)
        labels = windows[:, 1:].clone()
        for row in range(len(windows)):
            labels[row, : row + step % 3] = -100
        logits = model(windows[:, :-1])[labels != -100]
        loss = F.cross_entropy(logits, labels[labels != -100])
        z_loss = config.training.z_loss_weight * logits.logsumexp(dim=-1).square().mean()
        (loss + z_loss).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step) * group["factor"]
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            decay = min(0.7, (1 + step) / (10 + step)) ** 2
            for name, parameter in model.named_parameters():
                averages[name] = decay * averages[name] + (1 - decay) * parameter.detach()
        losses.append(loss.item())
        z_losses.append(z_loss.item())
    with torch.no_grad():
        logits = torch.func.functional_call(model, averages, windows[:, :-1], tie_weights=True)[labels != -100]
    return losses, z_losses, averages, F.cross_entropy(logits, labels[labels != -100]).item()


@pytest.mark.parametrize("model", ["plain", "tied"])
def test_one_rank_trains_like_plain_pytorch(references: dict[tuple[str, str], Curve], model: str) -> None:
    reference = references[model, "adamw"]
    losses, z_losses, averages, averaged_loss = train_with_plain_pytorch(config_with(), MODELS[model])
    torch.testing.assert_close(reference.losses, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(reference.z_losses, z_losses, rtol=1e-5, atol=0)
    assert reference.averaged_loss == pytest.approx(averaged_loss, rel=1e-5)
    # Weights differ by more than losses do: AdamW amplifies the rounding of gradients that are near zero.
    assert_same(reference.averages, averages, rel=1e-4)
    last = reference.last["tok_embeddings.weight"]
    assert (averages["tok_embeddings.weight"] - last).norm() > 0.003 * last.norm()


def built_options(config: JobConfig) -> dict[str, Any]:
    """The options of the components that the trainer builds; the runs above build the components themselves."""
    with use_existing_process_group(TINY):
        trainer = Trainer(config)
    step: Any = trainer.train_step
    found = {
        "rates": {(group["name"], group["lr_factor"]) for group in trainer.optimizer.param_groups},
        "mup_ratios": trainer.model.model_parts[0].config.mup_ratios,
        "max_norm": step.max_norm,
        "z_weight": step.model.loss.z_weight,
        "chunk_tokens": step.model.loss.chunk_tokens,
        "averages": step.ema is trainer.ema is not None,
        "documents": step.microbatches.document_start == trainer.tokenizer.bos_id is not None,
        "schedule": (trainer.schedule.peak, trainer.schedule.total),
        "tokens": trainer.metrics.tokens_per_step,
        "flops": trainer.metrics.flops_per_token == flops_per_token(trainer.model_config, 16),
    }
    trainer.dataloader.close()
    trainer.checkpointer.close()
    return found


def test_trainer_passes_options_to_its_components(gloo: GlooPool, tmp_path: Path) -> None:
    config = config_of(
        job={"dump_folder": str(tmp_path)},
        data={"document_mask": True, "prefetch": 0},
        mup={"base_dim": 8, "base_layers": 2},
        ema={"enable": True},
        metrics={"enable_tensorboard": False},
        training={"max_norm": 0.3, "z_loss_weight": 0.05, "global_batch_size": 4, "steps": 7, "loss_chunk_tokens": 8},
    )
    assert gloo.run(1, built_options, config)[0] == {
        "rates": {("embedding", 1.0), ("hidden", 1 / 4), ("hidden", 1 / 8), ("no_decay", 1.0), ("no_decay", 1 / 4)},
        "mup_ratios": (4.0, 2.0),
        "max_norm": 0.3,
        "z_weight": 0.05,
        "chunk_tokens": 8,
        "averages": True,
        "documents": True,
        "schedule": (3e-3, 7),
        "tokens": 4 * 16,
        "flops": True,
    }


def changes_of_activations(name: str, shapes: list[TransformerConfig]) -> list[dict[str, float]]:
    """For each model, the root mean square of the change of each block's output, and of the logits, in five steps."""
    return [changes_of_a_model(name, shape) for shape in shapes]


def changes_of_a_model(name: str, shape: TransformerConfig) -> dict[str, float]:
    # AdamW's changes of the embedding would hide those of another optimizer.
    frozen = ParameterGroupConfig(lr_factor=0.0)
    others = {"embedding": frozen, "no_decay": frozen} if name != "adamw" else {}
    config = config_of(optimizer={"name": name, "lr": 0.01, "weight_decay": 0.0, **others})
    model = build(config, shape)
    (part,) = model.model_parts
    outputs: dict[str, Tensor] = {}
    for number, block in part.layers.items():
        block.register_forward_hook(lambda _, __, out, number=number: outputs.update({number: out.detach()}))
    optimizer = build_optimizer(model.model_parts, config.optimizer, model.mesh, shape)
    use_cpu_kernels(optimizer)
    tokens, labels = torch.randint(shape.vocab_size, (2, 8, 16), generator=torch.Generator().manual_seed(0))
    before: dict[str, Tensor] = {}
    for _ in range(6):
        logits = part(tokens)
        outputs["logits"] = logits.detach()
        before = before or dict(outputs)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: (value - before[key]).square().mean().sqrt().item() for key, value in outputs.items()}


WIDTHS = (32, 64, 128, 256)


def coordinates(gloo: GlooPool, name: str, widths: tuple[int, ...] = WIDTHS, **changes: Any) -> list[dict[str, float]]:
    shapes = [TransformerConfig(dim, 2, dim // 16, dim // 16, 2 * dim, 64, 16, **changes) for dim in widths]
    return gloo.run(1, changes_of_activations, name, shapes)[0]  # type: ignore[no-any-return]


def test_activation_changes_do_not_depend_on_width_with_mup(gloo: GlooPool) -> None:
    """The coordinate check: without muP, activations change more in wider models."""
    check_coordinates_over_widths(gloo, "adamw", growth=10)


def check_coordinates_over_widths(gloo: GlooPool, name: str, growth: float) -> None:
    """``growth``: at least that of the changes without muP, of the widest model over the narrowest one."""
    found, plain = coordinates(gloo, name, base_dim=32), coordinates(gloo, name, (WIDTHS[0], WIDTHS[-1]))
    for key in ("0", "1", "logits"):
        sizes = [of_width[key] for of_width in found]
        # The contribution of the initial output weights vanishes with the width, so that logits decrease to a limit.
        assert max(sizes) < (1.2 if key != "logits" else 1.7) * min(sizes), (key, sizes)
    assert plain[-1]["1"] > growth * plain[0]["1"], plain


def test_activation_changes_do_not_depend_on_depth_with_mup(gloo: GlooPool) -> None:
    """The coordinate check of CompleteP: the change of the last block's output over depths."""
    sizes = {}
    for base, depths in ((2, (2, 8, 16)), (None, (2, 16))):
        shapes = [TransformerConfig(32, n, 2, 2, 64, 64, 16, base_layers=base) for n in depths]
        found = gloo.run(1, changes_of_activations, "adamw", shapes)[0]
        sizes[base] = [of_depth[str(n - 1)] for n, of_depth in zip(depths, found, strict=True)]
    assert max(sizes[2]) < 1.2 * min(sizes[2]), sizes
    assert sizes[None][-1] > 5 * sizes[None][0], sizes


def updates(ema: EMAConfig, found_inf: list[float]) -> list[bool]:
    """Whether each update, after parameters have changed, has changed any bit of the averages."""
    model = build(config_of())
    averages = EMA(model.model_parts, ema)
    changed = []
    for step, flag in enumerate(found_inf, start=1):
        for parameter in averages.parameters.values():
            parameter.data.add_(0.1)
        before = {name: average.clone() for name, average in averages.averages.items()}
        averages.update(step, torch.tensor(flag))
        changed.append(any(not torch.equal(before[name], average) for name, average in averages.averages.items()))
    return changed


@pytest.mark.parametrize("offload", [False, True])
def test_averages_change_only_at_the_interval_and_not_for_skipped_updates(gloo: GlooPool, offload: bool) -> None:
    ema = EMAConfig(enable=True, interval=2, offload=offload)
    assert gloo.run(1, updates, ema, [0, 0, 0, 1, 0, 0])[0] == [False, True, False, False, False, True]


EMA_OPTIONS = ("--ema.enable", "--ema.decay", "0.8", "--checkpoint.keep_latest_k", "0")


def train_with_averages(folder: Path) -> Path:
    """A run on two ranks that validates with trained and averaged weights, after its checkpoint of step 6."""
    (folder / "texts").mkdir()
    (folder / "texts/a.txt").write_text("def f(x):\n    return x\n" * 40)
    validation = ("--validation.enable", "--validation.path", str(folder / "texts"), "--validation.weights", "both")
    finish(folder, *EMA_OPTIONS, *validation, "--validation.interval", "7")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_with_averages(tmp_path_factory.mktemp("run"))


def copy_checkpoint(run: Path, folder: Path) -> None:
    """Copy the checkpoint of step 6 of a run to another dump folder, as if the run had been killed after it."""
    shutil.copytree(run / "checkpoint/step-6", folder / "checkpoint/step-6")


def test_averages_resume_bitwise_and_validation_does_not_change_them(run: Path, tmp_path: Path) -> None:
    copy_checkpoint(run, tmp_path)
    finish(tmp_path, *EMA_OPTIONS)
    uninterrupted = saved_tensors(run, 8)
    assert {name for name in uninterrupted if name.startswith("ema.")} == {
        name.replace("model.", "ema.") for name in uninterrupted if name.startswith("model.")
    }
    assert different_tensors(saved_tensors(tmp_path, 8), uninterrupted) == []


# Step 7 is not a multiple of the interval, so that the averages are those that were loaded.
SEVEN = (*EMA_OPTIONS, "--training.steps", "7", "--ema.interval", "4", "--checkpoint.allow_changes", "ema.interval")


def test_averages_are_loaded_on_another_number_of_ranks(run: Path, tmp_path: Path) -> None:
    copy_checkpoint(run, tmp_path)
    finish(tmp_path, *SEVEN, ranks=1)
    before, after = saved_tensors(tmp_path, 6), saved_tensors(tmp_path, 7)
    for name in before:
        if name.startswith("ema."):
            assert torch.equal(after[name], before[name])
            assert not torch.equal(after[name], before[name.replace("ema.", "model.")])


def test_averages_may_be_enabled_on_resume(tmp_path: Path) -> None:
    finish(tmp_path, "--training.steps", "6", "--checkpoint.interval", "6", ranks=1)
    assert "ema.enable = True" in finish(tmp_path, *SEVEN, "ema.enable", "ema.decay", ranks=1)
    before, after = saved_tensors(tmp_path, 6), saved_tensors(tmp_path, 7)
    for name in before:
        if name.startswith("model."):
            assert torch.equal(after[name.replace("model.", "ema.")], before[name])
            assert not torch.equal(after[name], before[name])


def test_averaged_weights_without_ema_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"validation.weights = 'ema' needs averaged weights: set ema.enable = true"):
        config_of(validation={"weights": "ema"})


def test_cooldown_from_a_checkpoint_of_a_stable_run(tmp_path: Path) -> None:
    """As in docs/recipes.md: a copy of a checkpoint, in a separate folder, with a schedule that decays."""
    stable, cooldown, uninterrupted = (tmp_path / name for name in ("stable", "cooldown", "uninterrupted"))
    ten_steps = ("--training.steps", "10", "--checkpoint.interval", "6")
    finish(stable, *ten_steps, ranks=1)
    copy_checkpoint(stable, cooldown)
    schedule = {"total_steps": "10", "decay_type": "linear", "decay_ratio": "0.4"}
    options = [text for key, value in schedule.items() for text in (f"--lr_scheduler.{key}", value)]
    allowed = ("--checkpoint.allow_changes", *(f"lr_scheduler.{key}" for key in schedule))
    assert "lr_scheduler.decay_type = 'linear' (checkpoint: 'constant')" in finish(
        cooldown, *options, *ten_steps, *allowed, ranks=1
    )
    finish(uninterrupted, *options, *ten_steps, ranks=1)
    assert different_tensors(saved_tensors(cooldown, 10), saved_tensors(uninterrupted, 10)) == []
    assert different_tensors(saved_tensors(stable, 10), saved_tensors(uninterrupted, 10)) != []
