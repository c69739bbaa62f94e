"""Connections between ranks: limit on open files, network interface, gloo groups, and ranks of the same machine."""

import math
import os
import resource
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtrain.errors import ConfigError

GROUPS_OF_ALL_RANKS = 2  # gloo groups of all ranks: for small messages (on CPUs the default group), for checkpoints
OTHER_FILES = 256  # data, checkpoints, logs, libraries
ENOUGH_FILES = 10240  # for many data sources, each of which may open 256 files; the maximum of macOS


def raise_file_limit(ranks: int) -> None:
    """Raise the limit on open files of this process, so that it can connect to ``ranks`` ranks.

    The new limit is ``ENOUGH_FILES``, or what the connections need, if that is more: on rank 0, which hosts the store
    of the rendezvous, one connection to each rank for the store and for each of ``GROUPS_OF_ALL_RANKS`` groups
    (docs/cluster.md).

    Raises:
        ConfigError: the hard limit is lower than what the connections need.
    """
    needed = OTHER_FILES + (GROUPS_OF_ALL_RANKS + 1) * ranks
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(max(needed, ENOUGH_FILES), hard)
    problem = f"the hard limit is {hard}"
    if soft < wanted and needed <= hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
            return
        except (OSError, ValueError) as error:  # for example in a sandbox
            problem = f"the limit of {soft} cannot be raised: {error}"
    if soft < needed:
        raise ConfigError(
            f"{ranks} ranks may need {needed} open files and connections each, but {problem}; start fewer ranks, or "
            f"raise the limit on every node (ulimit -n {needed}, or LimitNOFILE of slurmd)"
        )


def check_interface() -> None:
    """Raise ConfigError if ``GLOO_SOCKET_IFNAME`` names a network interface that this machine does not have."""
    wanted, available = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    if not set(filter(None, wanted.split(","))) <= {*available}:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME = {wanted!r} in the environment is not a network interface of {socket.gethostname()}, "
            f"which has {', '.join(available)}: set one of these, or unset it"
        )


def gloo_backend() -> str:
    """The name of the backend of process groups on CPUs: gloo with one worker thread per group.

    With the two threads of PyTorch's ``"gloo"``, a rank may die. A thread that has completed a collective assigns its
    name to a ``std::string`` of the group, without a lock (``ProcessGroupGloo::runLoop`` in 2.13). A name of more than
    15 characters, such as that of DTensor's all-gathers (``ALLGATHER_COALESCED``), is on the heap, where one thread may
    write a name after the other one has freed it: "malloc(): unaligned tcache chunk detected". ``dist.new_group`` and
    ``dist.init_process_group`` ignore the options of ``"gloo"``.
    """
    name = "gloo_single_thread"
    dist.Backend.register_backend(name, _new_single_thread_gloo, extended_api=True, devices=["cpu", "cuda"])
    return name


def gloo_options(timeout: timedelta, host: str = "") -> Any:
    """Options of a gloo group with one worker thread (``gloo_backend``), which listens at ``host``.

    Without ``host`` it does as PyTorch does: at the interfaces in GLOO_SOCKET_IFNAME, or the address of the machine's
    name.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    if host:
        options._devices = [gloo.create_device(hostname=host)]
    else:
        devices = [gloo.create_device(interface=interface) for interface in interfaces]
        options._devices = devices or [gloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    return options


def _new_single_thread_gloo(group: Any, _: object) -> Any:
    """What PyTorch does for ``"gloo"``, apart from the number of threads."""
    options = gloo_options(group.timeout)
    options.global_ranks_in_group, options.group_name = group.global_ranks_in_group, group.group_id
    return dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)


def new_gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, for tensors in CPU memory. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend=gloo_backend(), timeout=timeout)
    # If gloo connects lazily, open all connections now: if a rank dies before a connection is opened, the other ranks
    # wait indefinitely (https://github.com/pytorch/gloo/issues/520).
    flag = torch.zeros(1)
    dist.all_reduce(flag, group=group)
    dist.broadcast(flag, group=group, group_src=0)
    dist.all_gather([torch.empty(1) for _ in range(group.size())], flag, group=group)
    is_first = group.rank() == 0
    dist.gather(flag, [torch.empty(1) for _ in range(group.size())] if is_first else None, group=group, group_dst=0)
    dist.barrier(group)
    return group
