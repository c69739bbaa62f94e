"""All numbers that a run logs, also norms and losses by source, are those of one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked_run import read_metrics
from gloo_pool import GlooPool
from parity import TINY, config_of, use_existing_process_group

from torchtrain.datasets.options import SourceConfig
from torchtrain.trainer import Trainer


def lines_of_a_run(folder: Path, parallelism: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that the trainer writes in two steps, with all numbers that are reduced over ranks."""
    sources = tuple(SourceConfig(path=str(folder / name), weight=2 - n) for n, name in enumerate(("a.txt", "b.txt")))
    config = config_of(
        job={"dump_folder": str(folder / f"run{dist.get_world_size()}{sorted(parallelism)}")},
        data={"sources": sources, "prefetch": 0},
        metrics={"log_freq": 1, "enable_tensorboard": False},
        diagnostics={"enable_loss_by_source": True, "norms_freq": 1},
        training={"global_batch_size": 8, "steps": 2, "z_loss_weight": 0.05},
        validation={"enable": True, "sources": sources, "interval": 2, "steps": 2},
        parallelism=parallelism,
    )
    with use_existing_process_group(replace(TINY, n_layers=2, vocab_size=4096)):
        trainer = Trainer(config)
    with trainer.metrics:
        trainer.run_steps()
    trainer.dataloader.close()
    trainer.checkpointer.close()
    lines = [line for line in read_metrics(Path(config.job.dump_folder)) if "event" not in line]
    for line in lines:
        if "step_seconds" in line:
            ranks = dist.get_world_size()
            assert line.pop("tokens_per_second") * line.pop("step_seconds") == pytest.approx(8 * 16 / ranks)
            assert line.pop("loss_max") >= line["loss"] - 1e-9
            for name in ("mfu", "memory_gib", "data_wait_fraction"):
                line.pop(name)
    return lines


@pytest.fixture(scope="module")
def logged(gloo: GlooPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with data, and the lines of one rank."""
    folder = tmp_path_factory.mktemp("logged")
    (folder / "a.txt").write_text("".join(f"a{n} = {n * n}\n\n" for n in range(900)))
    (folder / "b.txt").write_text("the sea and the wind\n" * 400)
    [lines] = gloo.run(1, lines_of_a_run, folder, {})
    return folder, lines


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (4, {"context_parallel_degree": 2, "pipeline_parallel_degree": 2}),
        (4, {"tensor_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
    ],
    ids=["CP, PP", "HSDP, TP"],
)
def test_numbers_that_the_trainer_logs_are_those_of_one_rank(
    gloo: GlooPool, logged: tuple[Path, list[dict[str, Any]]], ranks: int, parallelism: dict[str, Any]
) -> None:
    folder, expected = logged
    assert len(expected) == 2 + 2 + 1  # steps, norms, and a validation
    names = {name for line in expected for name in line}
    assert {"loss", "z_loss", "grad_norm", "loss_mean", "source_loss_b", "source_tokens_a"} <= names
    assert {"norm_grad_layers.0", "rms_output_layers.1", "validation_loss", "validation_tokens_b"} <= names
    for found, line in zip(gloo.run(ranks, lines_of_a_run, folder, parallelism)[0], expected, strict=True):
        assert found == pytest.approx(line, rel=1e-5)
