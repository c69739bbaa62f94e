"""What launchers say in the environment of the processes that they start."""

import os

from torchtrain.errors import ConfigError

# The number of processes that were started together, by srun, Open MPI, and MPICH or Intel MPI.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def require_ranks() -> None:
    """ConfigError where several processes were started together that have no RANK: each would do all of the work."""
    if os.environ.keys() & {"RANK", "WORLD_SIZE"}:
        return
    variable, tasks = _tasks()
    if tasks > 1:
        raise ConfigError(
            f"{variable} = {tasks} in the environment, and RANK is not set: {tasks} processes would each do the whole "
            "work, in the same folder. Start one process per node, python -m torchtrain.launch (scripts/train.slurm "
            "does), or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each"
        )


def require_one_process(command: str) -> None:
    """ConfigError where torchrun, srun or mpirun has started several processes of ``command``."""
    variable, tasks = _tasks()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(f"{command} is the work of one process: start it without torchrun")
    if tasks > 1:
        raise ConfigError(f"{command} is the work of one process, and {variable} = {tasks}: start it once (srun -n 1)")


def _tasks() -> tuple[str, int]:
    """The variable that has the number of processes that were started together, and the number; 1 without one."""
    variables = list(TASKS)
    # A batch script has the number of its job's tasks, and is one process; so has the shell of salloc, with no PROCID.
    if "SLURM_PROCID" in os.environ and os.environ.get("ENVIRONMENT") != "BATCH":
        variables.append("SLURM_NTASKS")
    for variable in variables:
        if os.environ.get(variable, "").isdecimal():
            return variable, int(os.environ[variable])
    return "", 1
