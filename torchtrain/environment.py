"""The environment of a process: variables that launchers set, and the limits on threads and address space."""

import errno
import os
import re
import resource
import sys
import threading

from torchtrain.errors import ConfigError, TorchtrainError

# Variables with the number of processes that were started together: by srun, Open MPI, and MPICH or Intel MPI.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# For each of them, and for SLURM_NTASKS, the variable with the number of a process.
_RANKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "SLURM_NTASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}


LOST_CONNECTION = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|remote process has terminated"
)
"""What gloo and NCCL say in the error of a collective if the process of another rank has ended."""


def require_ranks() -> None:
    """Raise ConfigError if srun or mpirun started several processes without RANK: each would do all of the work."""
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
    """Raise ConfigError if torchrun, srun or mpirun has started several processes of ``command``."""
    variable, tasks = _tasks()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"{command} runs in one process, and WORLD_SIZE = {os.environ['WORLD_SIZE']}: start it without torchrun; "
            "in a pod that has this variable, by env -u RANK -u WORLD_SIZE python ..."
        )
    if tasks > 1:
        raise ConfigError(f"{command} runs in one process, and {variable} = {tasks}: start it once (srun -n 1)")


def process_share() -> tuple[int, int]:
    """Number of this process, and of all processes, that torchrun, srun, mpirun or a SLURM job array started together.

    Raises:
        ConfigError: a variable of the launcher is missing or invalid, or the indices of the job array are not
            consecutive.
    """
    if os.environ.keys() & {"RANK", "WORLD_SIZE"}:
        variable, size = "RANK", _number("WORLD_SIZE")
        rank = _number(variable, 0 if size == 1 else None)
    else:
        of_size, size = _tasks()
        variable = _RANKS.get(of_size, "")
        rank = _number(variable) if size > 1 else 0
    if rank >= size:
        raise ConfigError(f"{variable} = {rank} must be less than the number of processes, {size}")
    tasks = _number("SLURM_ARRAY_TASK_COUNT", 1)
    if tasks == 1:
        return rank, size
    first, step = _number("SLURM_ARRAY_TASK_MIN", 0), _number("SLURM_ARRAY_TASK_STEP", 1)
    index, remainder = divmod(_number("SLURM_ARRAY_TASK_ID") - first, step)
    if remainder or index >= tasks:
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID = {os.environ['SLURM_ARRAY_TASK_ID']} of {tasks} tasks from {first} on: the indices "
            "of the job array must be consecutive, as in --array=0-63"
        )
    return index * size + rank, tasks * size


def cores_of_process() -> int:
    """Number of cores for this process: its share of those that processes of the same command use on this node."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if variable in os.environ:
            return max(1, usable // max(1, _number(variable)))
    if not _tasks()[0].startswith("SLURM_"):
        return usable
    # srun may have bound each process to its own cores, which must not be divided again.
    share = _number("SLURM_CPUS_PER_TASK", _number("SLURM_CPUS_ON_NODE", usable) // _slurm_tasks_per_node())
    return max(1, min(usable, share))


def _slurm_tasks_per_node() -> int:
    """The largest number of processes that srun started on a node, from "8" or "8(x2),4"; 1 if it is not known."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_NTASKS_PER_NODE", ""))
    counts = [part.partition("(")[0] for part in text.split(",")]
    return max(1, *(int(count) for count in counts if count.isdecimal()))


def _number(variable: str, default: int | None = None) -> int:
    """The value of an environment variable that a launcher sets; ConfigError if it is missing or not a number."""
    value = os.environ.get(variable, "" if default is None else str(default))
    if not value.isdecimal():
        found = f"is {value!r}" if variable in os.environ else "is not set"
        raise ConfigError(
            f"the environment variable {variable} must be a number, and {found}: each of several processes needs its "
            "number and their count, RANK and WORLD_SIZE, or the variables of torchrun, srun or mpirun"
        )
    return int(value)


def _tasks() -> tuple[str, int]:
    """The variable with the number of processes that were started together, and that number; ("", 1) without one."""
    variables = list(TASKS)
    # SLURM_NTASKS is also set in a batch script and in the shell of salloc, each of which is one process.
    if "SLURM_PROCID" in os.environ and os.environ.get("ENVIRONMENT") != "BATCH":
        variables.append("SLURM_NTASKS")
    for variable in variables:
        if os.environ.get(variable, "").isdecimal():
            return variable, int(os.environ[variable])
    return "", 1


def require_threads(count: int) -> None:
    """Raise ConfigError if this process cannot start ``count`` more threads: a gloo group without them may hang."""
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(count)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError):
        problem = f"a rank may need {count} threads, and the system gives it {len(started)}"
        raise ConfigError(f"{problem}; {_limits()}") from None
    finally:
        ended.set()
        for thread in started:
            thread.join()


def limit_error(error: BaseException) -> TorchtrainError | None:
    """The ConfigError to report if a limit on threads, processes or address space caused ``error``; else None."""
    text = str(error)
    # The messages of Python, of C++'s std::thread, and of fork.
    if "can't start new thread" in text or text == os.strerror(errno.EAGAIN) or _is(error, errno.EAGAIN):
        return ConfigError(f"no more threads or processes can be started; {_limits()}")
    lacks_memory = isinstance(error, MemoryError) or _is(error, errno.ENOMEM)
    lacks_memory = lacks_memory or "failed to map segment" in text or "std::bad_alloc" in text
    # An error of torch's allocator counts only if there is a limit: otherwise the model is too large.
    if lacks_memory or ("can't allocate memory" in text and _limit(resource.RLIMIT_AS) != "unlimited"):
        return ConfigError(f"this process cannot allocate more memory; {_limits()}")
    return None


def _is(error: BaseException, number: int) -> bool:
    return isinstance(error, OSError) and error.errno == number and error.filename is None


def _limits() -> str:
    space, processes = _limit(resource.RLIMIT_AS, 1024), _limit(resource.RLIMIT_NPROC)
    return (
        f"ulimit -u (processes and threads of this user) is {processes}, ulimit -v (address space, in KiB) is {space}, "
        "and a container may have limits of its own: raise them, or start fewer ranks (NGPU) or threads "
        "(OMP_NUM_THREADS)"
    )


def _limit(kind: int, unit: int = 1) -> str:
    soft = resource.getrlimit(kind)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // unit:,}"
