"""Process groups: number of connections, limits on open files, threads and memory, and timeouts."""

import errno
import math
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import GROUP_TIMEOUT
from torchtrain.config.schema import JobConfig, JobSection, TrainingConfig
from torchtrain.datasets.options import DataConfig
from torchtrain.distributed.connections import ENOUGH_FILES, OTHER_FILES, new_gloo_group, raise_file_limit
from torchtrain.distributed.options import CommConfig
from torchtrain.distributed.process_group import Rendezvous, init_process_group, set_timeout
from torchtrain.environment import limit_error
from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.fault_tolerance.watchdog import REPORT_SECONDS, Watchdog
from torchtrain.files import unreadable
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.torch_internals import all_groups
from torchtrain.trainer import Trainer

RANKS = 16


def connections_of_a_group(lazy: bool) -> int:
    """Return the connections that one more group adds, after each collective that is used on such groups."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    before = len(psutil.Process().net_connections("tcp"))
    group = new_gloo_group(timedelta(seconds=60))
    added = len(psutil.Process().net_connections("tcp")) - before
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, "some words", group=group)
    dist.broadcast_object_list(values, src=0, group=group)
    dist.gather_object("some words", values if dist.get_rank() == 0 else None, dst=0, group=group)
    dist.scatter_object_list([None], values if dist.get_rank() == 0 else None, src=0, group=group)
    dist.all_reduce(torch.ones(100), dist.ReduceOp.MAX, group=group)
    dist.barrier(group)
    assert len(psutil.Process().net_connections("tcp")) - before == added  # all connections exist from the start
    del os.environ["TORCH_GLOO_LAZY_INIT"]
    return added


def test_number_of_lazy_connections_is_that_of_docs_cluster(gloo: GlooPool) -> None:
    first, *others = gloo.run(RANKS, connections_of_a_group, True)
    listening = 1  # the listening socket of a group is not a connection
    assert first - listening <= RANKS - 1
    assert max(others) - listening <= 2 * math.log2(RANKS) + 2
    eager = gloo.run(4, connections_of_a_group, False)
    assert {connections - listening for connections in eager} == {3}


def test_missing_network_interface_raises_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nosuch0")
    with pytest.raises(ConfigError, match=r"'lo,nosuch0' in the environment is not a network interface of .*, which "):
        init_process_group(torch.device("cpu"), 60)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (None, "0: 3"),
        (StorageError("the store does not respond"), "74: the store does not respond"),
        (ConfigError("access is denied"), "2: access is denied"),
        (unreadable("a folder", PermissionError(13, "denied")), "2: a folder cannot be read: denied"),
        (ValueError("a bug"), "2: ValueError('a bug')"),
    ],
)
def test_result_or_error_of_rank_0_reaches_all_ranks_after_the_timeout(error: Exception | None, found: str) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # documented
    store.set_timeout(timedelta(seconds=0.1))

    def on_rank0() -> int:
        time.sleep(0.4)
        if error is not None:
            raise error
        return 3

    def agree(rank: int) -> str:
        rendezvous = object.__new__(Rendezvous)
        rendezvous.store, rendezvous.rank, rendezvous.size = store, rank, 3
        try:
            return f"0: {rendezvous.agree('key', on_rank0)}"
        except TorchtrainError as raised:
            return f"{raised.exit_code}: {raised}"
        except ValueError as raised:
            return f"ValueError: {raised}"

    with ThreadPoolExecutor(3) as ranks:
        first, *others = ranks.map(agree, range(3))
    assert [other.partition(", in ")[0] for other in others] == [found] * 2
    assert first.partition(", in ")[0] == ("ValueError: a bug" if isinstance(error, ValueError) else found)


def limits_after(ranks: int, soft: int, hard: int) -> tuple[int, int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, min(hard, before[1])))
    raise_file_limit(ranks)
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def file_limit_error(ranks: int, hard: int) -> str:
    try:
        limits_after(ranks, hard, hard)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_open_file_limit_is_raised_or_a_config_error_names_it(gloo: GlooPool) -> None:
    assert gloo.run(1, limits_after, 4, 1024, 20000) == [(ENOUGH_FILES, 20000)]
    assert gloo.run(1, limits_after, 4096, 1024, 20000) == [(OTHER_FILES + 3 * 4096, 20000)]
    assert gloo.run(1, limits_after, 4, 12000, 20000) == [(12000, 20000)]
    assert gloo.run(1, limits_after, 4, 256, 4096) == [(4096, 4096)]  # the default on macOS is 256
    (message,) = gloo.run(1, file_limit_error, 1024, 2048)
    assert "1024 ranks may need 3328 open files and connections each, but the hard limit is 2048" in message
    assert "ulimit -n 3328" in message


def test_train_timeout_is_set_on_the_groups_of_the_step_only(gloo: GlooPool) -> None:
    assert gloo.run(2, timeouts_after_the_first_step) == [(7.0, 3600.0)] * 2


def timeouts_after_the_first_step() -> tuple[float, float]:
    longer = new_gloo_group(timedelta(hours=1))
    set_timeout(7, longer=[longer])
    world = dist.group.WORLD
    assert world is not None
    return tuple(  # type: ignore[return-value]
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in (world, longer)
    )


def test_slow_first_step_of_any_rank_raises_the_timeout_of_all(gloo: GlooPool, tmp_path: Path) -> None:
    """Also if the host only issues the step, and the device is slow."""
    (slow, configured), other_rank = gloo.run(2, watchdog_timeouts_after_a_slow_step_of_rank_0, tmp_path)
    assert 3 * 0.4 <= slow < 60
    assert configured == 60
    assert other_rank == (slow, configured)


def watchdog_timeouts_after_a_slow_step_of_rank_0(folder: Path) -> tuple[float, float]:
    device_seconds = 0.4 if dist.get_rank() == 0 else 0
    watchdog = Watchdog(folder, dist.get_rank(), 2, 100, doing=str, synchronize=lambda: time.sleep(device_seconds))
    with watchdog.watch("step 1"):
        pass
    timeouts = []
    for configured_seconds in (1, 60):
        watchdog.set_timeout_after_first_step(configured_seconds, torch.device("cpu"))
        with watchdog.watch("a later step"):  # waits for no device
            watchdog.synchronize = lambda: pytest.fail("waited for the device")
        timeouts.append(watchdog.timeout_seconds)
    return timeouts[0], timeouts[1]


def test_groups_of_a_new_trainer_have_the_init_timeout_and_one_thread(gloo: GlooPool, tmp_path: Path) -> None:
    timeouts = {70.0 + REPORT_SECONDS, GROUP_TIMEOUT.total_seconds()}
    assert gloo.run(2, groups_of_a_new_run, tmp_path) == [(timeouts, {1})] * 2


def groups_of_a_new_run(folder: Path) -> tuple[set[float], set[int]]:
    """The timeouts, in seconds, and the numbers of worker threads of the process groups of a trainer."""
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
    options = [group._get_backend(cpu).options for group in all_groups()]
    trainer.checkpointer.close()
    return {group._timeout.total_seconds() for group in options}, {group._threads for group in options}


def test_pool_of_ranks_keeps_the_files_of_its_stores_until_the_ranks_have_ended() -> None:
    pool = GlooPool()
    try:
        pool.run(1, write_to_the_store_after_the_call)
    finally:
        pool.close()
    assert not Path(pool.folder.name).exists()


def write_to_the_store_after_the_call() -> None:
    """As a store does when its group is freed, which may be long after the call; but often, and to new files."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    folder = Path(store.path).parent

    def write() -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            (folder / str(time.monotonic_ns())).touch()

    threading.Thread(target=write, daemon=True).start()


def test_a_gloo_group_has_one_worker_thread(gloo: GlooPool) -> None:
    assert gloo.run(2, threads_of_a_group, "") == [2, 2]  # the other one waits for messages
    assert gloo.run(2, threads_of_a_group, "lo,lo") == [3, 3]  # of each interface


def threads_of_a_group(interfaces: str) -> int:
    before = psutil.Process().num_threads()
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME=interfaces):
        new_gloo_group(timedelta(seconds=60))
    return psutil.Process().num_threads() - before


def test_no_group_is_made_of_pytorchs_gloo() -> None:
    root = Path(__file__).parents[1]
    for path in (path for folder in ("torchtrain", "tests", "scripts") for path in (root / folder).rglob("*.py")):
        found = re.findall(r"(?:init_process_group\(|backend=)[\"']gloo[\"'].*", path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(root)} must use gloo_backend(): {found}"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="gloo_threads.c")
def test_ranks_do_not_die_of_overlapping_collectives() -> None:
    """With PyTorch's two threads per group they do: "malloc(): unaligned tcache chunk detected"."""
    script = Path(__file__).parents[1] / "scripts/faults/gloo_threads.py"
    done = subprocess.run([sys.executable, str(script), "--calls", "8"], capture_output=True, text=True)
    pytorch, ours = done.stdout.splitlines()
    assert ours == "gloo_single_thread: 8 calls; a rank died in 0, and hung in 0"
    assert "died in 0," not in pytorch, "gloo_backend is no longer needed"


def test_cuda_uses_nccl_only_with_its_device_and_lazy_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    device = torch.device("cuda", 0)
    with patch.object(dist, "init_process_group") as init, patch.object(torch.cuda, "set_device"):
        init_process_group(device, 60)
    assert init.call_args.kwargs["backend"] == "nccl"
    assert init.call_args.kwargs["device_id"] == device
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"


def test_fixed_open_file_limit_is_an_error_only_if_it_is_too_low(gloo: GlooPool) -> None:
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
        except ConfigError as config_error:
            return str(config_error)
    return "no error"


def limit_address_space() -> None:
    """Limit the address space to 64 MiB more than is in use: the stacks of eight threads."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))


def limit_threads() -> None:
    """Limit the process to three threads, with the error of ``ulimit -u``, which does not apply to root."""
    start = threading.Thread.start

    def start_three(thread: threading.Thread) -> None:
        if threading.active_count() > 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_three  # type: ignore[method-assign]


@pytest.mark.parametrize("limit", [limit_address_space, limit_threads])
def test_too_few_threads_are_one_error_before_process_group_initialization(
    tmp_path: Path, limit: Callable[[], None]
) -> None:
    options = ("--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path))
    found = run_command("torchtrain.train", *options, hook=limit)
    assert found.returncode == 2, found.stderr
    first, error = found.stderr.splitlines()
    assert "importing PyTorch" in first
    assert "error: " in error
    assert re.search(
        r"error: a rank may need \d+ threads, and the system gives it \d; ulimit -u .* is .*: raise them", found.stderr
    )


LIMIT_ERRORS = [
    RuntimeError("can't start new thread"),
    RuntimeError("Resource temporarily unavailable"),  # std::thread, as in gloo
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),  # fork
    MemoryError(),
    RuntimeError("std::bad_alloc"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libc10.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", LIMIT_ERRORS, ids=repr)
def test_limit_that_is_reached_during_the_run_is_one_error_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert cli.run_command(fail) == 2
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 1
    memory, threads = "this process cannot allocate more memory", "no more threads or processes can be started"
    assert (memory if error in LIMIT_ERRORS[3:] else threads) in output
    assert "; ulimit -u (processes and threads of this user) is " in output


def test_taken_port_of_the_rendezvous_is_an_error_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as other:
        port = str(other.getsockname()[1])
        own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        with pytest.raises(StorageError) as error:
            Rendezvous(5)
        assert str(error.value).startswith(f"MASTER_PORT = {port} is taken on this host, by another job or program")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun has chosen it
        with pytest.raises(StorageError, match=r"^rendezvous failed: "):
            Rendezvous(5)


def test_other_errors_are_not_reported_as_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    for other in (
        RuntimeError("Connection closed by peer"),
        OSError(errno.EAGAIN, "Resource temporarily unavailable", "/nfs/file"),
        ImportError("No module named torch"),
        allocation,  # the model is too large (docs/estimate.md)
    ):
        assert limit_error(other) is None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 30, resource.RLIM_INFINITY))
    assert "ulimit -v (address space, in KiB) is 8,388,608" in str(limit_error(allocation))
