"""Process groups: the device of each rank, rendezvous and timeouts."""

import os
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # documented
from torch.distributed.rendezvous import rendezvous

from torchtrain.distributed.connections import check_interface, new_gloo_group, raise_file_limit
from torchtrain.environment import require_ranks, require_threads
from torchtrain.errors import ConfigError, StorageError
from torchtrain.logging import logger
from torchtrain.torch_internals import _get_default_store, all_groups, set_group_timeout

LAST_BARRIER_SECONDS = 3600  # the first rank may still upload metrics while the others wait for it
THREADS_OF_A_RANK = 32  # of a layout with several axes: three for each gloo group; the loader, saves, signals
LEAVE_SECONDS = 60  # from the barrier at the end until all ranks have destroyed their groups


def world_size() -> int:
    """Number of ranks that torchrun started; 1 without it. ConfigError where something else started several."""
    require_ranks()
    return env_int("WORLD_SIZE", 1)


def rank() -> int:
    """This process among those that torchrun started; 0 without it."""
    return env_int("RANK", 0)


def env_int(variable: str, default: int) -> int:
    """A number that torchrun sets in the environment, or ``default``; ConfigError where it is not a number."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable} = {text!r} in the environment is not a number: use torchrun, or unset it")
    return int(text)


def pick_device(wanted: str) -> torch.device:
    """This rank's device for ``job.device``; ConfigError where cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("job.device = 'cuda' needs a GPU that torch can use, and there is none; try 'auto' or 'cpu'")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    local_rank = env_int("LOCAL_RANK", 0)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}; "
            "start one rank per GPU (NGPU, or torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)


def init_process_group(device: torch.device, timeout_seconds: int) -> None:
    """Join the other ranks, by torchrun's environment; alone without torchrun. Makes ``device`` the current one.

    Raises:
        ConfigError: the limits on open files or threads are too low for all ranks; a variable of torchrun's is
            missing; GLOO_SOCKET_IFNAME names no interface of this machine.
        StorageError: the other ranks do not answer in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # NCCL alone: gloo beside it would connect all ranks of each group of the mesh, too. With the device NCCL
        # connects at once, shares connections between groups, and knows the device of a barrier.
        options |= {"backend": "nccl", "device_id": device}
        # gloo then connects two ranks when they first exchange a message.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    env_int("RANK", 0)  # an error where RANK is not a number, before torch reads it
    raise_file_limit(world_size())
    require_threads(THREADS_OF_A_RANK + torch.get_num_threads())
    check_interface()
    if os.environ.keys() & {"RANK", "WORLD_SIZE"}:
        try:
            store, rank, size = next(rendezvous("env://", timeout=timeout))
        except ValueError as error:
            raise ConfigError(f"{error}: start by torchrun, which sets it, or without RANK and WORLD_SIZE") from None
        except dist.DistError as error:
            raise StorageError(f"the ranks cannot meet: {str(error).splitlines()[0]}") from None
        store.set_timeout(timeout)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun keeps one store through its restarts: without a prefix, a rank could find the address of a dead
            # one there and wait for it. Nodes count restarts differently; for several, see torchtrain.launch.
            store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(**options, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(**options, store=HashStore(), rank=0, world_size=1)


def destroy_process_group() -> None:
    """Destroy all groups when every rank is done with them. Collective; the last thing before the process ends.

    No rank closes a connection on which another one still waits, and rank 0, which may host the store, leaves last:
    until they have destroyed their groups, other ranks may use the store (the watchdog threads of NCCL do).
    """
    world = dist.group.WORLD
    assert world is not None
    store, rank, size = _get_default_store(), world.rank(), world.size()
    set_group_timeout(timedelta(seconds=LAST_BARRIER_SECONDS), world)
    try:
        dist.barrier()
        dist.destroy_process_group()
        if store.add("ranks that have left", 1) == size:
            store.set("all ranks have left", "")
        if rank == 0:
            store.wait(["all ranks have left"], timedelta(seconds=LEAVE_SECONDS))
    except RuntimeError as error:  # another rank has died, as its exit code says; the work of this one is complete
        logger.warning("a rank ended before the others were ready to: %s", str(error).splitlines()[0])


def gloo_group(device: torch.device, timeout_seconds: int) -> dist.ProcessGroup:
    """A gloo group for small messages, used from the main thread alone; on CPUs the default group. Collective."""
    world = dist.group.WORLD
    assert world is not None
    return world if device.type == "cpu" else new_gloo_group(timedelta(seconds=timeout_seconds))


def set_timeout(timeout_seconds: float, longer: Collection[dist.ProcessGroup] = ()) -> None:
    """Set the time-out of collectives, except in the groups in ``longer``."""
    # Ranks come here at different times: without the barrier, the first would already wait by the new time-out.
    dist.barrier()
    for group in all_groups():
        if group not in longer:
            set_group_timeout(timedelta(seconds=timeout_seconds), group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: Any = dist.ReduceOp.SUM) -> None:
    """``dist.all_reduce``, skipped where ``group`` has one rank."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op, group)
