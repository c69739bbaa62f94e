"""Connections between ranks: the limit on open files, the network, gloo groups, and which ranks share a machine."""

import math
import os
import resource
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtrain.errors import ConfigError

GROUPS_OF_ALL_RANKS = 2  # in CPU memory: the side group (or, on CPUs, the default one), and that of checkpoints
OTHER_FILES = 256  # data, checkpoints, logs, libraries
ENOUGH_FILES = 10240  # for many sources, of which each may hold 256 files open; macOS allows no more


def raise_file_limit(ranks: int) -> None:
    """Raise the limit on open files to ``ENOUGH_FILES``, or to what connections to ``ranks`` need, if that is more.

    They need at worst, on the first rank, one connection to each rank for each of ``GROUPS_OF_ALL_RANKS``, and one for
    the store where they meet (docs/cluster.md). Where the system allows less than that: ConfigError.
    """
    needed = OTHER_FILES + (GROUPS_OF_ALL_RANKS + 1) * ranks
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(max(needed, ENOUGH_FILES), hard)
    problem = f"the system allows {hard}"
    if soft < wanted and needed <= hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), limits[1]))
            return
        except (OSError, ValueError) as error:  # a sandbox, or a system with another limit
            problem = f"the limit of {soft} cannot be raised: {error}"
    if soft < needed:
        raise ConfigError(
            f"{ranks} ranks may need {needed} open files and connections each, and {problem}; start fewer ranks, or "
            f"raise that limit on every node (ulimit -n {needed}, or LimitNOFILE of slurmd)"
        )


def check_interface() -> None:
    """ConfigError where ``GLOO_SOCKET_IFNAME`` names a network interface that this machine does not have."""
    wanted, there = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    if not set(filter(None, wanted.split(","))) <= {*there}:
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME = {wanted!r} in the environment is no network interface of {socket.gethostname()}, "
            f"which has {', '.join(there)}: set one of these, or unset it"
        )


def new_gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks for what lies in CPU memory. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    # Where gloo connects lazily, make all connections now: if a rank dies before one is made, others wait for ever
    # (https://github.com/pytorch/gloo/issues/520).
    flag = torch.zeros(1)
    dist.all_reduce(flag, group=group)
    dist.broadcast(flag, group=group, group_src=0)
    dist.all_gather([torch.empty(1) for _ in range(group.size())], flag, group=group)
    is_first = group.rank() == 0
    dist.gather(flag, [torch.empty(1) for _ in range(group.size())] if is_first else None, group=group, group_dst=0)
    dist.barrier(group)
    return group


def on_one_machine(group: dist.ProcessGroup) -> bool:
    """Whether torchrun started all ranks of ``group`` on the same machine."""
    ranks_per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // ranks_per_machine for rank in dist.get_process_group_ranks(group)}) == 1
