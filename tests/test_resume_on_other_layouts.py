"""Resume on another layout: a checkpoint of one layout gives the same states, batches and losses on any other."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from parity import TINY, default_check, global_mean, use_existing_process_group
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import find_resume_point
from torchtrain.config.schema import JobConfig, JobSection, TrainingConfig
from torchtrain.datasets.options import DataConfig
from torchtrain.models.llama import TransformerConfig
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import EMAConfig, LRSchedulerConfig, OptimizerConfig
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.trainer import Trainer, TrainStep

SAVED, LAST = 2, 4
ADAMW = OptimizerConfig(lr=3e-3)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "shard 2": (2, {}),
    "shard 4": (4, {}),
    "tensor 2 x shard 2": (4, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "pipeline 2, interleaved": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
    "context 2 x tensor 2": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


class RankResult(NamedTuple):
    """The results of one rank: global losses, and its rows of the batches as [step][row]."""

    losses: list[float]
    batch_rank: int
    tokens: list[list[list[int]]]


def train(config: JobConfig, shape: TransformerConfig) -> RankResult:
    """Train with a ``Trainer`` to step ``LAST``, from the beginning or from the checkpoint of step ``SAVED``.

    What is loaded is saved in the folder ``loaded`` before the first step.
    """

    with use_existing_process_group(shape):
        trainer = Trainer(config)
    if trainer.step:
        storage = LocalStorage(f"{config.job.dump_folder}/loaded")
        start = find_resume_point(config.checkpoint, storage, "")
        with CheckpointManager(config.checkpoint, storage, trainer.checkpointer.states, "", start) as again:
            again.maybe_save(trainer.step, last=True)
    step = TrainStep(
        trainer.model,
        trainer.train_step.microbatches,
        trainer.optimizer,
        LRSchedule(config.lr_scheduler, config.optimizer.lr, LAST),
        default_check(config),
        max_norm=config.training.max_norm,
        wait_for_copies=trainer.checkpointer.wait_for_copies,
        ema=trainer.ema,
    )
    losses, tokens = [], []
    for number in range(trainer.step + 1, LAST + 1):
        batch = next(trainer.dataloader)
        loss, _ = step(number, batch)
        losses.append(global_mean(loss, trainer.model.mesh))
        tokens.append(batch.tokens.tolist())
        if number == SAVED:
            trainer.checkpointer.maybe_save(number)
    trainer.checkpointer.close()
    return RankResult(losses, trainer.parallel_dims.batch_rank(dist.get_rank()), tokens)


def bytes_of_tensors(checkpoints: Path) -> dict[str, bytes]:
    """Return the unsharded tensors of the checkpoint of step ``SAVED``, as bytes."""
    dcp_to_torch_save(checkpoints / f"step-{SAVED}", checkpoints / "whole.pt")
    tensors = torch.load(checkpoints / "whole.pt", weights_only=True)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def run_layout(
    gloo: GlooPool,
    folder: Path,
    layout: str,
    tied: bool,
    optimizer: OptimizerConfig = ADAMW,
    n_layers: int = TINY.n_layers,
) -> tuple[list[float], list[list[list[int]]]]:
    """Train on a layout; return the losses, and the rows of each global batch, after checking that all ranks agree.

    With ``tied`` embeddings, of which each pipeline stage may have a copy, weights are averaged too.
    """
    ranks, parallelism = LAYOUTS[layout]
    shape = replace(TINY, n_layers=n_layers, ffn_dim=66, tied_embeddings=tied)  # 66: not divisible by four ranks
    documents = folder / "documents.jsonl"
    code = Path(__file__).read_text()
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in code.split("\n\n")))
    config = JobConfig(
        job=JobSection(dump_folder=str(folder), device="cpu"),
        optimizer=optimizer,
        lr_scheduler=LRSchedulerConfig(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=8, seq_len=16, steps=LAST, mixed_precision_param="float32"
        ),
        data=DataConfig(path=str(documents)),
        ema=EMAConfig(enable=tied),
        parallelism=ParallelismConfig(**parallelism),
        checkpoint=CheckpointConfig(enable=True, interval=SAVED),
    )
    results: list[RankResult] = gloo.run(ranks, train, config, shape)
    rows: dict[int, list[list[list[int]]]] = {}
    for result in results:
        assert result.losses == results[0].losses
        assert result.tokens == rows.setdefault(result.batch_rank, result.tokens)
    batches = [[row for rank in sorted(rows) for row in rows[rank][step]] for step in range(len(results[0].losses))]
    return results[0].losses, batches


@pytest.mark.parametrize(
    ("saved_on", "resumed_on", "tied"),
    [
        pytest.param("shard 2", ["1 rank"], False, marks=pytest.mark.slow),
        ("tensor 2 x shard 2", ["pipeline 2"], True),
        pytest.param("pipeline 2", ["shard 2"], True, marks=pytest.mark.slow),
        pytest.param("shard 4", ["1 rank", "pipeline 2"], False, marks=pytest.mark.slow),
        pytest.param("shard 4", ["context 2 x tensor 2"], True, marks=pytest.mark.slow),
        pytest.param("tensor 2 x shard 2", ["shard 4"], True, marks=pytest.mark.slow),
        pytest.param("pipeline 2", ["pipeline 2, interleaved"], True, marks=pytest.mark.slow),
        pytest.param("shard 4", ["shard 2", "tensor 2 x shard 2"], False, marks=pytest.mark.slow),
        pytest.param("shard 4", ["pipeline 2, interleaved"], True, marks=pytest.mark.slow),
        pytest.param("pipeline 2", ["shard 4"], True, marks=pytest.mark.slow),
    ],
)
def test_resume_on_another_layout_has_the_same_states_batches_and_losses(
    gloo: GlooPool, tmp_path: Path, saved_on: str, resumed_on: list[str], tied: bool
) -> None:
    n_layers = 4 if "pipeline 2, interleaved" in resumed_on else 2
    losses, batches = run_layout(gloo, tmp_path, saved_on, tied, n_layers=n_layers)
    saved = bytes_of_tensors(tmp_path / "checkpoint")
    states = {"model", "optimizer", "loader"} | ({"ema"} if tied else set())
    assert {name.split(".")[0] for name in saved} == states
    assert len(losses) == LAST
    assert len({tuple(row) for batch in batches for row in batch}) == LAST * 8  # all rows differ
    for layout in resumed_on:
        resumed, resumed_batches = run_layout(gloo, tmp_path, layout, tied, n_layers=n_layers)
        torch.testing.assert_close(resumed, losses[SAVED:], rtol=1e-5, atol=0)
        assert resumed_batches == batches[SAVED:]
        again = bytes_of_tensors(tmp_path / "loaded")
        assert again.keys() == saved.keys()
        assert [name for name in saved if again[name] != saved[name]] == []
        shutil.rmtree(tmp_path / "loaded")
