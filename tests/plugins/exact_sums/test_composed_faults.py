"""A run with exact sums ends with the same bits after several faults, on other ranks."""

import random
from pathlib import Path

import crash_test
import crash_test_composed
import psutil
import pytest
from disk_faults import DiskFaults
from forked_run import (
    ForkedRun,
    different_tensors,
    saved_tensors,
    slow_steps,
)
from test_faults import check_states_after_a_rollback


class ForkedScript:
    """A start of ``crash_test_composed.Trial`` in forked processes; rank 0 is in place of the launcher."""

    def __init__(self, dump: Path, checkpoints: str, data: Path, ranks: int, steps: int) -> None:
        options = ("--checkpoint.folder", checkpoints, "--data.path", str(data), "--training.steps", str(steps))
        options += ("--training.sums", "exact", "--faults.stop_grace_seconds", "2")
        self.run = ForkedRun(dump, *options, ranks=ranks, hook=slow_steps)
        self.launcher = self.ranks()[0]

    def ranks(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self.run.processes if process.exitcode is None]

    def wait(self) -> int:
        return self.run.wait()[0]

    def end(self) -> None:
        self.run.end()

    def output(self) -> str:
        return self.run.output()


ROUNDS = [["layout", "move", "file_times", "kill_rank"], ["pause_rank", "clock", "full_disk"]]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_run_with_composed_faults_ends_like_an_uninterrupted_run(disk: DiskFaults, tmp_path: Path, rounds: int) -> None:
    data = tmp_path / "training.jsonl"
    crash_test.write_training_data(data)
    trial = crash_test_composed.Trial(tmp_path, ForkedScript, data, disk, ranks_allowed=(1, 2), latest_seconds=1.5)
    for seed, kinds in enumerate(ROUNDS[:rounds]):
        crash_test_composed.Round(trial, seed, random.Random(seed)).play(kinds)
    steps = crash_test_composed.disturb(trial, 0, 0, []) + 4
    uninterrupted = tmp_path / "uninterrupted"
    for dump, checkpoints, ranks in ((trial.dump, trial.checkpoints, trial.ranks), (uninterrupted, "checkpoint", 2)):
        assert ForkedScript(dump, checkpoints, trial.data, ranks, steps).wait() == 0
    (trial.dump / trial.checkpoints).rename(trial.dump / "checkpoint")
    assert different_tensors(saved_tensors(trial.dump, steps), saved_tensors(uninterrupted, steps)) == []
    lines = [crash_test.metrics_in(dump) for dump in (trial.dump, uninterrupted)]
    assert crash_test.steps_that_differ(*lines) == []
    assert len(crash_test.numbers_in(lines[0])) >= steps - 4


def test_rollback_restores_all_states_but_data_and_statistics(tmp_path: Path) -> None:
    """Exact sums repeat steps, so that the NaN may come earlier."""
    check_states_after_a_rollback(tmp_path, "--training.sums", "exact", statistics=("sums",))
