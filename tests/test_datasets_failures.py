"""Failures while reading data are raised as the same error on all ranks at the same step."""

import _thread
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data_samples import DOCUMENTS, make_loader, take, write_jsonl
from forked_run import ForkedRun, logged_losses
from gloo_pool import GlooPool

from torchtrain.datasets.data_source import Stream, Tokens
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.order import Mixture
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks, on_all_ranks, on_rank0
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import CheckpointError, DataError, StorageError, TorchtrainError


class Windows(Stream):
    """A stream of constant windows; ``fail_at`` raises, ``end_at`` ends it, ``pause_at`` takes a minute, and each other
    window ``pause`` seconds."""

    state = np.empty((1, 0), dtype=np.int64)

    def __init__(self, fail_at: int = -1, end_at: int = 10**9, pause: float = 0.0, pause_at: int = -1):
        self.fail_at, self.end_at, self.pause, self.pause_at = fail_at, end_at, pause, pause_at

    def fill(
        self,
        rows: Sequence[int],
        windows: Sequence[Tokens],
        windows_drawn: Sequence[int],
        sizes: object = None,  # noqa: ARG002
    ) -> list[int]:
        return [self.fill_one(window, drawn) for _, window, drawn in zip(rows, windows, windows_drawn, strict=True)]

    def fill_one(self, window: Tokens, index: int) -> int:
        time.sleep(60 if index // 2 == self.pause_at else self.pause)
        if index // 2 == self.fail_at:
            raise OSError("the disk is gone")
        if index // 2 >= self.end_at:
            return 0
        window[:] = index
        return len(window)


def make_stream_loader(
    stream: Windows, row: int, prefetch: int = 4, drop_last: bool = True, timeout: timedelta | None = None
) -> DataLoader:
    loader = DataLoader(
        [stream],
        Mixture([1.0]),
        range(row, row + 1),
        seq_len=4,
        global_batch_size=2,
        prefetch=prefetch,
        drop_last=drop_last,
        device=torch.device("cpu"),
    )
    loader.connect(dist.new_group(backend=gloo_backend(), timeout=timeout))
    return loader


def read_until_failure(prefetch: int) -> tuple[int, str, str]:
    """The number of batches, and the error that ended them; rank 1's stream fails at batch 3."""
    rank = dist.get_rank()
    # So slow that the second batch is not ready when the first is returned, or the ranks might agree on it before.
    loader = make_stream_loader(Windows(fail_at=3 if rank == 1 else -1, pause=0.5), rank, prefetch)
    steps = 0
    try:
        for _ in loader:
            steps += 1
            time.sleep(3 if prefetch else 0)  # so that the background thread is ahead
    except (DataError, OSError) as error:
        return steps, type(error).__name__, str(error)
    return steps, "", ""


@pytest.mark.parametrize("prefetch", [0, 4])
def test_failure_on_one_rank_is_raised_on_all_at_the_same_step(gloo: GlooPool, prefetch: int) -> None:
    others, failed = gloo.run(2, read_until_failure, prefetch)
    assert failed[1:] == ("OSError", "the disk is gone")  # the original error
    assert others[1:] == ("DataError", "rank 1 cannot continue: the disk is gone")
    # Immediately: the failure is known before the batches that were read ahead are used.
    assert others[0] == failed[0] == (3 if prefetch == 0 else 1)


def read_to_the_end(drop_last: bool) -> tuple[int, list[int]]:
    """Read all batches; rank 1's stream is longer than rank 0's."""
    rank = dist.get_rank()
    batches = list(make_stream_loader(Windows(end_at=2 + rank * 3), rank, drop_last=drop_last))
    return len(batches), [int((batch.labels != -100).sum()) for batch in batches]


def test_all_ranks_end_at_the_same_step(gloo: GlooPool) -> None:
    assert gloo.run(2, read_to_the_end, True) == [(2, [4, 4])] * 2
    # To the last token: rank 0 continues with masked rows.
    assert gloo.run(2, read_to_the_end, False) == [(5, [4, 4, 0, 0, 0]), (5, [4] * 5)]


def wait_for_a_slow_rank() -> list[float]:
    rank = dist.get_rank()
    loader = make_stream_loader(Windows(pause=0.5 * rank), rank, prefetch=0)
    return [loader.wait_seconds for _ in zip(range(2), loader, strict=False)]


def test_waiting_for_another_rank_does_not_count_as_waiting_for_data(gloo: GlooPool) -> None:
    fast, slow = gloo.run(2, wait_for_a_slow_rank)
    assert [seconds for seconds in slow if not (seconds >= 0.5)] == []
    assert min(fast) < 0.5


def wait_beyond_the_timeout(silent: bool) -> str:
    """Rank 1's first batch, or the request of its main thread, is later than the group's timeout of two seconds."""
    rank = dist.get_rank()
    loader = make_stream_loader(Windows(pause=0 if silent else 5 * rank), rank, timeout=timedelta(seconds=2))
    if silent and rank == 1:
        time.sleep(5)
        return ""
    try:
        return str(next(loader).tokens.tolist())
    except RuntimeError as error:
        return str(error)


def test_late_data_do_not_time_out(gloo: GlooPool) -> None:
    assert gloo.run(2, wait_beyond_the_timeout, False) == ["[[0, 0, 0, 0]]", "[[1, 1, 1, 1]]"]


@dataclass
class OwnRequest:
    pending: bool
    agreed: bool = False


def stop_while_a_batch_is_late() -> tuple[int, bool, int]:
    """Rank 1's third batch takes a minute, and rank 0 is asked to stop meanwhile."""
    rank = dist.get_rank()
    stop = OwnRequest(pending=False)
    loader = make_stream_loader(Windows(pause_at=2 if rank == 1 else -1), rank)
    loader.stop = stop
    batches = 0
    for _ in loader:
        batches += 1
        stop.pending = rank == 0
    return batches, stop.agreed, int(loader.state_dict()["rows"][0, 0])


def test_request_to_stop_does_not_wait_for_a_late_batch(gloo: GlooPool) -> None:
    assert gloo.run(2, stop_while_a_batch_is_late) == [(2, True, 2)] * 2


def fifth_batch_is_late() -> Any:
    original = DataLoader._read

    def read(loader: DataLoader) -> Any:
        time.sleep(60 if loader.drop_last and loader._step == 4 else 0)  # not for validation
        return original(loader)

    return patch.object(DataLoader, "_read", read)


def test_run_that_waits_for_data_saves_when_it_is_asked_to_stop(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, "--checkpoint.interval", "100", hook=fifth_batch_is_late)
    run.wait_for(lambda: len(logged_losses(tmp_path)) == 4)
    os.kill(run.processes[1].pid or 0, signal.SIGTERM)
    assert run.wait() == [75, 75], run.output()
    assert (tmp_path / "checkpoint/step-4").is_dir()
    assert "stopped as requested: step 4 of 8" in run.output()


def test_silent_rank_times_out(gloo: GlooPool) -> None:
    assert "Timed out waiting 2000ms" in gloo.run(2, wait_beyond_the_timeout, True)[0]


def test_closed_loader_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    loader = make_loader(DataConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), prefetch=3))
    take(loader, 2)
    assert "data" in [thread.name for thread in set(threading.enumerate()) - before]
    loader.close()
    assert "data" not in [thread.name for thread in set(threading.enumerate()) - before]


class UnreachableHub(Windows):
    def fill(self, *_: object) -> list[int]:  # type: ignore[override]
        raise StorageError("the hub does not answer")


def exit_code_of_a_failure() -> int:
    rank = dist.get_rank()
    try:
        next(make_stream_loader(UnreachableHub() if rank == 1 else Windows(), rank, prefetch=0))
    except TorchtrainError as error:
        return error.exit_code
    return 0


def test_network_failure_ends_all_ranks_with_its_exit_code(gloo: GlooPool) -> None:
    assert gloo.run(2, exit_code_of_a_failure) == [74, 74]


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def call_on_all_ranks(calls: Sequence[Callable[[], int]]) -> str:
    try:
        return str(on_all_ranks(calls[dist.get_rank()], world_group()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail(error: Exception, seconds: float = 0) -> int:
    time.sleep(seconds)
    raise error


def test_results_stay_on_their_rank_and_an_error_of_one_rank_is_raised_on_all(gloo: GlooPool) -> None:
    seven, eight, busy = partial(int, "7"), partial(int, "8"), partial(time.sleep, 60)
    absent, other, bug = DataError("it is absent"), StorageError("no answer"), ValueError("a bug")
    host = socket.gethostname()
    assert gloo.run(2, call_on_all_ranks, [seven, eight]) == ["7", "8"]
    assert (
        gloo.run(2, call_on_all_ranks, [busy, partial(fail, absent)])
        == [f"DataError: rank 1 on host {host}: it is absent"] * 2
    )
    assert (
        gloo.run(2, call_on_all_ranks, [partial(fail, absent), partial(fail, absent, 0.1)])
        == ["DataError: it is absent"] * 2
    )
    assert (
        gloo.run(3, call_on_all_ranks, [seven, partial(fail, other), partial(fail, absent)])
        == [f"StorageError: rank 1 on host {host}: no answer (2 of 3 ranks have failed)"] * 3
    )
    assert gloo.run(2, call_on_all_ranks, [seven, partial(fail, bug)]) == [
        f"TorchtrainError: rank 1 on host {host}: ValueError('a bug')",
        "ValueError: a bug",
    ]


def codes_of_failures(failing: int) -> list[int]:
    """Exit codes of errors that ``failing`` raises, one whose code is not that of its class among them."""
    denied = StorageError("a folder is denied")
    denied.exit_code = 2
    lost = CheckpointError("no answer")
    lost.exit_code = 74
    own_group = world_group()
    functions: list[Callable[[Callable[[], Any]], Any]] = [
        partial(on_all_ranks, group=own_group),
        partial(gather_from_all_ranks, group=own_group),
    ]
    if failing == 0:
        functions += [partial(on_rank0, group=own_group), partial(broadcast_from_rank0, group=own_group)]
    codes = []
    for function in functions:
        for error in (denied, lost, StorageError("no answer"), DataError("no data")):
            try:
                function(partial(fail, error) if dist.get_rank() == failing else int)
            except type(error) as raised:
                codes.append(raised.exit_code)
    return codes


@pytest.mark.parametrize("failing", [0, 1])
def test_exit_code_of_an_error_is_that_of_the_rank_that_failed(gloo: GlooPool, failing: int) -> None:
    assert gloo.run(2, codes_of_failures, failing) == [[2, 74, 74, 2] * (4 if failing == 0 else 2)] * 2


def own_folder(folder: Path) -> None:
    os.chdir(folder / os.environ["RANK"])


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (None, "data.path = 'text.jsonl' does not exist"),
        ([*DOCUMENTS[:-1], "another"], "sees other data ("),
        ([7], "holds int, not text"),
    ],
    ids=["missing", "different", "no text"],
)
def test_a_rank_without_the_data_ends_all_ranks_with_one_message(
    tmp_path: Path, second: list[Any] | None, found: str
) -> None:
    for rank, documents in enumerate((DOCUMENTS, second)):
        (tmp_path / f"{rank}").mkdir()
        if documents is not None:
            write_jsonl(tmp_path / f"{rank}" / "text.jsonl", documents)
    run = ForkedRun(tmp_path / "run", "--data.path", "text.jsonl", hook=partial(own_folder, tmp_path))
    assert run.wait() == [2, 2], run.output()
    assert run.output().count("error:") == 1, run.output()
    message = next(line for line in run.output().splitlines() if "error:" in line)
    assert f"rank 1 on host {socket.gethostname()}" in message
    assert found in message
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_rank_that_cannot_write_a_folder_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    check_folder_that_a_rank_cannot_write(tmp_path, "job.dump_folder", "text.jsonl")


def check_folder_that_a_rank_cannot_write(tmp_path: Path, option: str, path: str) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        write_jsonl(tmp_path / f"{rank}" / "text.jsonl", DOCUMENTS)
    (tmp_path / "1/used").write_text("a file")
    options = ("--data.path", path, f"--{option}", "used")
    run = ForkedRun(tmp_path / "run", *options, hook=partial(own_folder, tmp_path))
    assert run.wait() == [2, 2], run.output()
    assert run.output().count("error:") == 1, run.output()
    assert f"error: rank 1 on host {socket.gethostname()}: {option} = 'used' cannot be used: " in run.output()


def broadcast_and_press_ctrl_c() -> str:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    threading.Timer(1, _thread.interrupt_main).start()
    try:
        on_all_ranks(threading.Event().wait, world_group())  # which does not end
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGINT, before)
    return "ended"


def test_ctrl_c_interrupts_a_broadcast_without_timeout(gloo: GlooPool) -> None:
    assert gloo.run(1, broadcast_and_press_ctrl_c) == ["interrupted"]
