"""The share of a process in the work and the cores of a node, by the variables of its launcher."""

import pytest

from torchtrain import environment
from torchtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("variables", "usable", "expected"),
    [
        ({}, 16, 16),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 4),
        ({"LOCAL_WORLD_SIZE": "64"}, 16, 1),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 16, 2),
        # 8 tasks on a node of 64 cores: bound to 8 each, or not bound
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS_PER_NODE": "8"}, 8, 8),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS_PER_NODE": "8"}, 64, 8),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_CPUS_ON_NODE": "64", "SLURM_NTASKS_PER_NODE": "8"}, 8, 8),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_CPUS_ON_NODE": "64", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 64, 8),
        # one process of a batch script
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH", "SLURM_NTASKS_PER_NODE": "8"}, 64, 64),
        # torchrun in a task of srun
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_CPUS_PER_TASK": "32", "LOCAL_WORLD_SIZE": "8"}, 32, 4),
    ],
)
def test_cores_of_a_process_are_divided_once(
    variables: dict[str, str], usable: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.os, "environ", variables)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: range(usable))
    assert environment.cores_of_process() == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a number, and is 'x'"),
        ({"WORLD_SIZE": "2"}, "RANK must be a number, and is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 must be less than the number of processes, 2"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"},
            "OMPI_COMM_WORLD_RANK = 2 must be less than the number of processes, 2",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID must be a number, and is not set"),
    ],
)
def test_invalid_variables_of_a_launcher_are_a_config_error(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.os, "environ", variables)
    with pytest.raises(ConfigError, match=message):
        environment.process_share()
