"""Resuming on another layout: the same weights and optimizer state, and the same losses to rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_pool import GlooPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import find_resume_point
from torchtrain.checkpoint.states import ModelState, flatten
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.distributed.mesh import Mesh, resolve_parallel_dims
from torchtrain.models.initialization import layout_independent_init
from torchtrain.models.llama import Transformer
from torchtrain.models.model_config import flavor_config
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.parallelisms.options import ActivationCheckpointConfig, ParallelismConfig
from torchtrain.parallelisms.parallelize_llama import parallelize_llama

GLOBAL_BATCH = 4


class Run:
    """A training run on this rank's rows of ``GLOBAL_BATCH``, which depend only on the step."""

    def __init__(self, folder: Path, replicate: int, tied: bool, seed: int = 0) -> None:
        config = replace(
            flavor_config("llama3", "debugmodel"),
            dim=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            ffn_dim=48,
            vocab_size=101,  # not divisible by any number of ranks
            max_seq_len=16,
            tied_embeddings=tied,
        )
        parallelism = ParallelismConfig(data_parallel_replicate_degree=replicate)
        self.mesh = Mesh(torch.device("cpu"), resolve_parallel_dims(parallelism, dist.get_world_size()))
        with torch.device("meta"):
            self.model = Transformer(config)
        parallelize_llama(
            self.model,
            self.mesh,
            JobConfig(
                training=TrainingConfig(mixed_precision_param="float32"),
                parallelism=parallelism,
                activation_checkpoint=ActivationCheckpointConfig(mode="full"),
            ),
        )
        self.model.to_empty(device="cpu")
        with layout_independent_init([self.model], seed):
            self.model.init_weights()
        self.optimizer = build_optimizer([self.model], OptimizerConfig(lr=1e-2))
        self.states = {
            "model": ModelState([self.model]),
            "optimizer": self.optimizer,
        }
        checkpoint = CheckpointConfig(enable=True, interval=3)
        storage = LocalStorage(str(folder))
        self.manager = CheckpointManager(
            checkpoint, storage, self.states, "", find_resume_point(checkpoint, storage, "")
        )

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        degrees = self.mesh.degrees
        ranks, rank = degrees.batch, degrees.batch_rank(dist.get_rank())
        for step in range(first, last + 1):
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(0, 101, (GLOBAL_BATCH, 9), generator=generator)
            local_rows = rows[rank * GLOBAL_BATCH // ranks : (rank + 1) * GLOBAL_BATCH // ranks]
            logits = self.model(local_rows[:, :-1])
            labels = local_rows[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / (GLOBAL_BATCH * 8)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
            self.manager.maybe_save(step)
        return losses

    def full_tensors(self) -> dict[str, Tensor]:
        tensors = flatten(self.states)
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def train_and_save(folder: Path, replicate: int, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(folder, replicate, tied)
    run.train(1, 3)
    saved = {name: tensor.clone() for name, tensor in run.full_tensors().items()}
    losses = run.train(4, 5)
    run.manager.close()
    return losses, saved


def load_and_train(folder: Path, replicate: int, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    run = Run(folder, replicate, tied, seed=1)
    step = run.manager.start.step
    assert step == 3
    run.manager.load(step)
    loaded = {name: tensor.clone() for name, tensor in run.full_tensors().items()}
    losses = run.train(4, 5)
    run.manager.close()
    return losses, loaded


class Rows:
    """A state with one matrix of 1 Mi elements, sharded by rows."""

    def __init__(self, value: float) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        full = torch.arange(float(2**20)).view(1024, 1024) * value
        self.matrix = distribute_tensor(full, mesh, [Shard(0)])

    def state_dict(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def rows_manager(folder: Path, value: float) -> CheckpointManager:
    config = CheckpointConfig(enable=True, interval=1)
    storage = LocalStorage(str(folder))
    return CheckpointManager(config, storage, {"rows": Rows(value)}, "", find_resume_point(config, storage, ""))


def save_rows(folder: Path) -> None:
    manager = rows_manager(folder, 1)
    manager.maybe_save(1, last=True)
    manager.close()


def load_rows(folder: Path) -> int:
    """Load, and return the number of bytes that this rank has read since its start."""

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    manager = rows_manager(folder, 0)
    assert manager.resume() == 1
    count = bytes_read() - before
    manager.close()
    assert torch.equal(flatten(manager.states)["rows.matrix"].full_tensor(), Rows(1).matrix.full_tensor())  # type: ignore[attr-defined]
    return count


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("before", "after"), [(2, 2), (3, 1), *(pytest.param(1, n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_each_rank_reads_the_bytes_that_it_loads_once(gloo: GlooPool, tmp_path: Path, before: int, after: int) -> None:
    """A rank that needs only part of a piece reads all of it, to verify its hash."""
    gloo.run(before, save_rows, tmp_path)
    needed = 2**22 // (after if before == after else 1)
    for count in gloo.run(after, load_rows, tmp_path):
        assert needed < count < 1.05 * needed


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        ((2, 1), (4, 2), True),  # test_resume_on_other_layouts.py has other changes of the layout
        pytest.param((1, 1), (3, 1), False, marks=pytest.mark.slow),
        pytest.param((4, 2), (2, 1), False, marks=pytest.mark.slow),
        pytest.param((2, 1), (4, 2), False, marks=pytest.mark.slow),
        pytest.param((4, 2), (2, 1), True, marks=pytest.mark.slow),
    ],
)
def test_resume_on_another_number_of_ranks_is_the_same_run(
    gloo: GlooPool, tmp_path: Path, before: tuple[int, int], after: tuple[int, int], tied: bool
) -> None:
    """``before`` and ``after``: the number of ranks, and the number of HSDP replicas."""
    uninterrupted: Any = gloo.run(before[0], train_and_save, tmp_path, before[1], tied)[0]
    resumed: Any = gloo.run(after[0], load_and_train, tmp_path, after[1], tied)[0]
    assert uninterrupted[1].keys() == resumed[1].keys()
    for name, tensor in uninterrupted[1].items():
        assert torch.equal(tensor, resumed[1][name]), name
    torch.testing.assert_close(resumed[0], uninterrupted[0], rtol=1e-5, atol=0)
