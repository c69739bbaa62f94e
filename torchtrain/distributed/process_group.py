"""Ranks: which device is mine, how we find each other, how long we wait."""

import os
from collections.abc import Collection
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from torchtrain.errors import ConfigError


def world_size() -> int:
    """Number of ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def pick_device(wanted: str) -> torch.device:
    """This rank's device for ``job.device``; ConfigError where cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("job.device = 'cuda' needs a GPU that torch can use, and there is none; try 'auto' or 'cpu'")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}; "
            "start one rank per GPU (NGPU, or torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)


def init_process_group(device: torch.device, timeout_seconds: int) -> None:
    """Join the other ranks, by torchrun's environment; alone without torchrun. Makes ``device`` the current one."""
    timeout = timedelta(seconds=timeout_seconds)
    # gloo beside nccl: what lies in CPU memory is gathered without a detour over the GPU.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun keeps one store through its restarts: without this, a rank could find the address of a dead one
            # there and wait for it. Agents of several nodes count differently; for them, see torchtrain.launch.
            store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)


def set_timeout(timeout_seconds: int, longer: Collection[dist.ProcessGroup] = ()) -> None:
    """Wait at most so long in every later collective, but in those of the groups in ``longer``."""
    # Ranks reach this point at different times: without the barrier the first to arrive would already hurry the last.
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in longer:
            _set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``dist.all_reduce`` of a sum, which would take its time to do nothing where a rank is alone in ``group``."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
