"""How ranks are connected: by few connections, over no more open files than the system allows, and for how long."""

import errno
import math
import os
import re
import resource
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from forked_command import run_command
from forked_run import TINY
from gloo_pool import GlooPool
from parity import use_existing_process_group

from torchtrain import cli
from torchtrain.checkpoint.resume_point import GROUP_TIMEOUT
from torchtrain.config.schema import (
    CheckpointConfig,
    CommConfig,
    DataConfig,
    JobConfig,
    JobSection,
    ParallelismConfig,
    TrainingConfig,
)
from torchtrain.distributed.connections import ENOUGH_FILES, OTHER_FILES, new_gloo_group, raise_file_limit
from torchtrain.distributed.process_group import init_process_group, set_timeout
from torchtrain.environment import limit_error
from torchtrain.errors import ConfigError
from torchtrain.fault_tolerance.watchdog import REPORT_SECONDS
from torchtrain.torch_internals import all_groups
from torchtrain.trainer import Trainer

RANKS = 16


def connections_of_a_group(lazy: bool) -> int:
    """How many this process has more with one group more, after a collective of each kind that is used there."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    before = len(psutil.Process().net_connections("tcp"))
    group = new_gloo_group(timedelta(seconds=60))
    made = len(psutil.Process().net_connections("tcp")) - before
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, "some words", group=group)
    dist.broadcast_object_list(values, src=0, group=group)
    dist.gather_object("some words", values if dist.get_rank() == 0 else None, dst=0, group=group)
    dist.scatter_object_list([None], values if dist.get_rank() == 0 else None, src=0, group=group)
    dist.all_reduce(torch.ones(100), dist.ReduceOp.MAX, group=group)
    dist.barrier(group)
    assert len(psutil.Process().net_connections("tcp")) - before == made  # all were there from the beginning
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    return made


def test_lazy_connections_are_as_many_as_docs_cluster_says(gloo: GlooPool) -> None:
    first, *others = gloo.run(RANKS, connections_of_a_group, True)
    listening = 1  # a group's own socket, not a connection
    assert first - listening <= RANKS - 1
    assert max(others) - listening <= 2 * math.log2(RANKS) + 2
    eager = gloo.run(4, connections_of_a_group, False)
    assert {made - listening for made in eager} == {3}


def test_a_network_interface_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    with pytest.raises(ConfigError, match=r"'lo,nosuch0' in the environment is no network interface of .*, which has "):
        init_process_group(torch.device("cpu"), 60)
    assert not dist.is_initialized()


def limits_after(ranks: int, soft: int, hard: int) -> tuple[int, int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, min(hard, before[1])))
    raise_file_limit(ranks)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def refusal(ranks: int, hard: int) -> str:
    try:
        limits_after(ranks, hard, hard)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_the_limit_on_open_files_is_raised_or_refused(gloo: GlooPool) -> None:
    assert gloo.run(1, limits_after, 4, 1024, 20000) == [(ENOUGH_FILES, 20000)]
    assert gloo.run(1, limits_after, 4096, 1024, 20000) == [(OTHER_FILES + 3 * 4096, 20000)]
    assert gloo.run(1, limits_after, 4, 12000, 20000) == [(12000, 20000)]
    assert gloo.run(1, limits_after, 4, 256, 4096) == [(4096, 4096)]  # macOS begins with 256
    (message,) = gloo.run(1, refusal, 1024, 2048)
    assert "1024 ranks may need 3328 open files and connections each, and the system allows 2048" in message
    assert "ulimit -n 3328" in message


def test_only_groups_of_the_step_get_its_timeout(gloo: GlooPool) -> None:
    assert gloo.run(2, timeouts_after_the_first_step) == [(7.0, 3600.0)] * 2


def timeouts_after_the_first_step() -> tuple[float, float]:
    patient = new_gloo_group(timedelta(hours=1))
    set_timeout(7, longer=[patient])
    world = dist.group.WORLD
    assert world is not None
    return tuple(  # type: ignore[return-value]
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in (world, patient)
    )


def test_a_run_s_groups_have_the_first_step_s_timeout_from_its_beginning(gloo: GlooPool, tmp_path: Path) -> None:
    assert gloo.run(2, timeouts_of_a_new_run, tmp_path) == [{70.0 + REPORT_SECONDS, GROUP_TIMEOUT.total_seconds()}] * 2


def timeouts_of_a_new_run(folder: Path) -> set[float]:
    config = JobConfig(
        job=JobSection(dump_folder=str(folder)),
        training=TrainingConfig(local_batch_size=1, seq_len=16),
        data=DataConfig(prefetch=0),
        parallelism=ParallelismConfig(context_parallel_degree=2),
        comm=CommConfig(init_timeout_seconds=70),
        checkpoint=CheckpointConfig(enable=False),
    )
    with use_existing_process_group(TINY):
        trainer = Trainer(config)
    cpu = torch.device("cpu")
    timeouts = {group._get_backend(cpu).options._timeout.total_seconds() for group in all_groups()}
    trainer.checkpointer.close()
    return timeouts


def test_cuda_gets_nccl_alone_its_device_and_lazy_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    device = torch.device("cuda", 0)
    with patch.object(dist, "init_process_group") as init, patch.object(torch.cuda, "set_device"):
        init_process_group(device, 60)
    assert init.call_args.kwargs["backend"] == "nccl"
    assert init.call_args.kwargs["device_id"] == device
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"


def test_a_limit_on_open_files_that_cannot_be_raised_matters_where_it_is_too_low(gloo: GlooPool) -> None:
    assert gloo.run(1, limits_that_cannot_be_raised, 1) == ["no error"]
    (message,) = gloo.run(1, limits_that_cannot_be_raised, 4000)
    assert "the limit of " in message
    assert " cannot be raised: not in this sandbox; start fewer ranks" in message


def limits_that_cannot_be_raised(ranks: int) -> str:
    error = PermissionError("not in this sandbox")
    with (
        patch("resource.setrlimit", side_effect=error),
        patch("resource.getrlimit", lambda _: (1024, resource.RLIM_INFINITY)),
    ):
        try:
            raise_file_limit(ranks)
        except ConfigError as told:
            return str(told)
    return "no error"


def limit_address_space() -> None:
    """By 64 MiB more than is in use: eight stacks of threads."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))


def limit_threads() -> None:
    """As ulimit -u does for users who are not root: Python's words and C++'s."""
    start = threading.Thread.start

    def start_three(thread: threading.Thread) -> None:
        if threading.active_count() > 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_three  # type: ignore[method-assign]


@pytest.mark.parametrize("limit", [limit_address_space, limit_threads])
def test_too_few_threads_are_one_message_before_groups_are_made(tmp_path: Path, limit: Callable[[], None]) -> None:
    options = ("--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path))
    found = run_command("torchtrain.train", *options, hook=limit)
    assert found.returncode == 2, found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert re.search(
        r"error: a rank may need \d+ threads, and the system gives it \d; ulimit -u .* is .*: raise them", found.stderr
    )


TOO_LITTLE = [
    RuntimeError("can't start new thread"),
    RuntimeError("Resource temporarily unavailable"),  # std::thread, as of gloo
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),  # fork
    MemoryError(),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libc10.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", TOO_LITTLE, ids=repr)
def test_a_limit_that_is_reached_later_is_one_message(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert cli.run_command(fail) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    what = "memory" if error in TOO_LITTLE[3:] else "threads or processes"
    assert f"no more {what}" in told
    assert "; ulimit -u (processes and threads of this user) is " in told


def test_other_errors_are_not_taken_for_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    for other in (
        RuntimeError("Connection closed by peer"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable", "/nfs/file"),
        ImportError("No module named torch"),
        allocation,  # the size of the model is the matter (docs/estimate.md)
    ):
        assert limit_error(other) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 30, resource.RLIM_INFINITY))
    assert "ulimit -v (address space, in KiB) is 8,388,608" in str(limit_error(allocation))
