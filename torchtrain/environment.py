"""The environment of a process: variables that launchers set, and the limits on threads and address space."""

import errno
import os
import resource
import threading

from torchtrain.errors import ConfigError, TorchtrainError

# Variables with the number of processes that were started together: by srun, Open MPI, and MPICH or Intel MPI.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


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
        raise ConfigError(f"{command} runs in one process: start it without torchrun")
    if tasks > 1:
        raise ConfigError(f"{command} runs in one process, and {variable} = {tasks}: start it once (srun -n 1)")


def process_share() -> tuple[int, int]:
    """Number of this process, and of all processes, that torchrun, srun, mpirun or a SLURM job array started together.

    Raises:
        ConfigError: the indices of the job array are not consecutive.
    """
    if os.environ.keys() >= {"RANK", "WORLD_SIZE"}:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        variable, size = _tasks()
        ranks = {"SLURM_STEP_NUM_TASKS": "SLURM_PROCID", "SLURM_NTASKS": "SLURM_PROCID"}
        ranks |= {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}
        rank = int(os.environ.get(ranks.get(variable, ""), "0"))
    tasks = int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
    if tasks == 1:
        return rank, size
    first = int(os.environ.get("SLURM_ARRAY_TASK_MIN", "0"))
    step = int(os.environ.get("SLURM_ARRAY_TASK_STEP", "1"))
    index, remainder = divmod(int(os.environ["SLURM_ARRAY_TASK_ID"]) - first, step)
    if remainder or index >= tasks:
        raise ConfigError(
            f"SLURM_ARRAY_TASK_ID = {os.environ['SLURM_ARRAY_TASK_ID']} of {tasks} tasks from {first} on: the indices "
            "of the job array must be consecutive, as in --array=0-63"
        )
    return index * size + rank, tasks * size


def processes_per_node() -> int:
    """Number of processes that the launcher started on this node; 1 if it does not state it."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        if os.environ.get(variable, "").isdecimal():
            return max(1, int(os.environ[variable]))
    return 1


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
