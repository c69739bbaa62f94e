"""Process-group initialization: the device of each rank, rendezvous, and timeouts."""

import os
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # documented
from torch.distributed.rendezvous import rendezvous

from torchtrain.distributed.agreement import broadcast_through_store
from torchtrain.distributed.connections import check_interface, gloo_backend, new_gloo_group, raise_file_limit
from torchtrain.environment import require_ranks, require_threads
from torchtrain.errors import ConfigError, StorageError
from torchtrain.logging import logger
from torchtrain.torch_internals import _get_default_store, all_groups, forget_meshes, set_group_timeout

T = TypeVar("T")

LAST_BARRIER_SECONDS = 3600  # rank 0 may still upload metrics while the other ranks wait
THREADS_PER_RANK = 32  # with several mesh dimensions: two per gloo group; data loader, saves, signals
DESTROY_SECONDS = 60  # from the last barrier until all ranks have destroyed their groups


def world_size() -> int:
    """Number of ranks that torchrun started; 1 without torchrun.

    Raises:
        ConfigError: another launcher started several processes, without RANK.
    """
    require_ranks()
    return env_int("WORLD_SIZE", 1)


def rank() -> int:
    """Rank of this process; 0 without torchrun."""
    return env_int("RANK", 0)


def env_int(variable: str, default: int) -> int:
    """The integer in an environment variable that torchrun sets, or ``default``.

    Raises:
        ConfigError: the variable is set, and not an integer.
    """
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable} = {text!r} in the environment is not a number: use torchrun, or unset it")
    return int(text)


def pick_device(wanted: str) -> torch.device:
    """The device of this rank. ``wanted`` is ``job.device``.

    Raises:
        ConfigError: there is no GPU for cuda, or fewer GPUs than ranks on this machine.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            "job.device = 'cuda' needs a GPU that PyTorch can use, and there is none; set 'auto' or 'cpu'"
        )
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    local_rank = env_int("LOCAL_RANK", 0)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}; "
            "start one rank per GPU (NGPU, or torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)


class Rendezvous:
    """The store through which ranks find each other; several process groups can use it, one after the other.

    Rendezvous uses the environment variables of torchrun; without them there is one rank.

    Raises:
        ConfigError: the limits on open files or threads are too low for the number of ranks; a variable of torchrun
            is missing; GLOO_SOCKET_IFNAME does not name a network interface of this machine.
        StorageError: rendezvous fails, for example because other ranks do not answer in time.
    """

    def __init__(self, timeout_seconds: int) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        env_int("RANK", 0)  # raises a ConfigError if RANK is not a number, before torch reads it
        raise_file_limit(world_size())
        require_threads(THREADS_PER_RANK + torch.get_num_threads())
        check_interface()
        self._groups = 0
        self.store: Any = HashStore()
        self.rank, self.size = 0, 1
        if not os.environ.keys() & {"RANK", "WORLD_SIZE"}:
            return
        try:
            self.store, self.rank, self.size = next(rendezvous("env://", timeout=timeout))
        except ValueError as error:
            raise ConfigError(f"{error}: start with torchrun, which sets it, or unset RANK and WORLD_SIZE") from None
        except dist.DistError as error:
            if "EADDRINUSE" in str(error) and "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun has chosen it itself
                raise StorageError(
                    f"MASTER_PORT = {os.environ['MASTER_PORT']} is taken on this host, by another job or program: set "
                    "another one, the same for all ranks"
                ) from None
            raise StorageError(f"rendezvous failed: {str(error).splitlines()[0]}") from None
        self.store.set_timeout(timeout)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun keeps the store when it restarts the ranks. Without a prefix, a rank could read the address of a
            # dead rank from it, and wait for that. Only for one node, because nodes count restarts differently; for
            # several nodes, see torchtrain.launch.
            self.store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", self.store)

    def next_store(self) -> Any:
        """A store for the next process group. All ranks must call it the same number of times."""
        self._groups += 1
        return PrefixStore(f"group {self._groups}", self.store)

    def agree(self, key: str, function: Callable[[], T]) -> T:
        """Broadcast the result of ``function`` on rank 0, between process groups: see ``broadcast_through_store``."""
        return broadcast_through_store(function, self.store, key, self.rank, self.size)


def init_process_group(device: torch.device, timeout_seconds: int, through: Rendezvous | None = None) -> None:
    """Initialize the default process group: NCCL on GPUs, gloo on CPUs. Also sets the current CUDA device.

    Args:
        device: the device of this rank.
        timeout_seconds: timeout of the rendezvous and of collectives.
        through: the rendezvous of a process that initializes several process groups; None: a new one.

    Raises:
        ConfigError, StorageError: see ``Rendezvous``.
    """
    timeout = timedelta(seconds=timeout_seconds)
    options: dict[str, Any] = {"backend": gloo_backend(), "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Only NCCL, because a second backend would connect all ranks of each group of the mesh over gloo, too. With
        # device_id NCCL connects immediately, shares connections between groups, and knows the device of a barrier.
        options |= {"backend": "nccl", "device_id": device}
        # The gloo groups of a GPU run connect two ranks when they first exchange a message.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if through is None:
        through = Rendezvous(timeout_seconds)
        store = through.store
    else:
        store = through.next_store()
    dist.init_process_group(**options, store=store, rank=through.rank, world_size=through.size)


def destroy_process_group() -> None:
    """Destroy all process groups once every rank has finished using them. Collective; the last call before exit.

    No rank closes a connection on which another rank still waits. Rank 0, which may host the store, returns last,
    because other ranks, such as NCCL's watchdog threads, may use the store until they have destroyed their groups.
    """
    world = dist.group.WORLD
    assert world is not None
    store, rank, size = _get_default_store(), world.rank(), world.size()
    set_group_timeout(timedelta(seconds=LAST_BARRIER_SECONDS), world)
    try:
        dist.barrier()
        dist.destroy_process_group()
        forget_meshes()
        if store.add("ranks done", 1) == size:
            store.set("all ranks done", "")
        if rank == 0:
            store.wait(["all ranks done"], timedelta(seconds=DESTROY_SECONDS))
    except RuntimeError as error:  # another rank has died, as its exit code shows; the work of this rank is complete
        logger.warning("a rank exited before the other ranks had finished: %s", str(error).splitlines()[0])


def gloo_group(device: torch.device, timeout_seconds: int) -> dist.ProcessGroup:
    """The gloo group for small messages, used only by the main thread; on CPUs the default group. Collective."""
    world = dist.group.WORLD
    assert world is not None
    return world if device.type == "cpu" else new_gloo_group(timedelta(seconds=timeout_seconds))


def set_timeout(timeout_seconds: float, longer: Collection[dist.ProcessGroup] = ()) -> None:
    """Set the timeout of collectives in all groups but those in ``longer``, which keep their longer one. Collective."""
    # Without the barrier, the first rank to get here would apply the new timeout while it waits for slower ranks.
    dist.barrier()
    for group in all_groups():
        if group not in longer:
            set_group_timeout(timedelta(seconds=timeout_seconds), group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: Any = dist.ReduceOp.SUM) -> None:
    """``dist.all_reduce``, in place; does nothing if ``group`` has one rank."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group)
