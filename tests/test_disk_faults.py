"""Full, failing and hanging disks during real runs: no checkpoint is lost, and errors are not mistaken for damage."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from data_samples import write_tokens
from disk_faults import DiskFaults
from forked_command import checked_command, run_command
from forked_run import CONFIG as RUN_CONFIG
from forked_run import TINY, ForkedRun, different_tensors, finish, saved_tensors
from gloo_pool import GlooPool
from json_tokenizers import save_tokenizer
from tokenizers import Tokenizer, normalizers
from torch import Tensor

from torchtrain import files
from torchtrain.checkpoint import manager as manager_module
from torchtrain.checkpoint.local_storage import LocalStorage, saved_steps, step_folder
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.resume import GROUP_TIMEOUT, ResumePoint, find_resume_point
from torchtrain.checkpoint.storage import NewCheckpoint, WriterLease
from torchtrain.checkpoint.weights import find_weights, load_weights
from torchtrain.cli import run_command as run_in_this_process
from torchtrain.distributed.connections import new_gloo_group
from torchtrain.errors import CheckpointError, StorageError
from torchtrain.files import with_retries
from torchtrain.models.llama import Transformer

STEPS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump folder of a finished run of one rank, which must not be changed."""
    folder = tmp_path_factory.mktemp("finished")
    finish(folder, ranks=1)
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    return folder


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def run_ends_with(code: int, folder: Path, *options: str, ranks: int = 1) -> str:
    run = ForkedRun(folder, *options, ranks=ranks)
    assert run.wait() == [code] * ranks, run.output()
    return run.output()


@pytest.mark.slow  # test_checkpoint.py has it within one process, and a test below with files of the right size
def test_run_with_only_damaged_checkpoints_does_not_start_over(copied: Path) -> None:
    before = checkpoint_names(copied)
    for file in copied.glob("checkpoint/step-*/__0_0.distcp"):
        os.truncate(file, 100)
    for _ in range(2):  # the second start must find the same files as the first
        output = run_ends_with(2, copied, "--training.steps", "10")
        assert "none of these is a valid checkpoint" in output
        assert "step-8/__0_0.distcp has 100 bytes" in output
        assert "use another job.dump_folder" in output
    assert checkpoint_names(copied) == before


CONFIG = CheckpointConfig(enable=True, interval=1)


class Numbers:
    """A state with one tensor."""

    def __init__(self) -> None:
        self.numbers = torch.arange(8.0) * (1 + dist.get_rank())

    def state_dict(self) -> dict[str, Tensor]:
        return {f"numbers.{dist.get_rank()}": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        pass


def make_manager(folder: Path, start: ResumePoint) -> CheckpointManager:
    return CheckpointManager(CONFIG, LocalStorage(str(folder / "checkpoint")), {"state": Numbers()}, "", start)


def save_two_checkpoints(folder: Path) -> None:
    manager = make_manager(folder, find_resume_point(CONFIG, LocalStorage(str(folder / "checkpoint")), ""))
    for step in (1, 2):
        manager.maybe_save(step, last=True)
    manager.close()


class FailingStorage(LocalStorage):
    """A storage in which rank 1 cannot create a file."""

    error: Exception

    def new_checkpoint(self, step: int, lease: WriterLease) -> NewCheckpoint:
        staged = super().new_checkpoint(step, lease)
        if dist.get_rank() == 1:
            staged.create = Mock(side_effect=self.error)  # type: ignore[method-assign]
        return staged


def results_of_failed_saves(folder: Path, error: Exception, mode: Literal["disabled", "async"]) -> list[object]:
    """Of two failed saves and a good one, of the same step again: exit code of the error that is raised, whether a save
    is still due, and whether one is a minute later."""
    config = replace(CONFIG, interval_minutes=1, max_failed_saves=2, async_mode=mode)
    storage = FailingStorage(str(folder / "checkpoint"))
    storage.error = error
    start = find_resume_point(config, storage, "")
    manager = CheckpointManager(config, storage, {"state": Numbers()}, "", start)
    found: list[object] = []
    for number, step in enumerate((1, 2, 2), 1):
        if number == 3:
            manager.storage = LocalStorage(str(folder / "checkpoint"))
        manager.clock.agreed = True
        code = 0
        try:
            manager.maybe_save(step)
            manager.wait()
        except CheckpointError as raised:
            code = raised.exit_code
        time_after = time.monotonic() + 60
        with patch.object(manager_module, "time", SimpleNamespace(monotonic=lambda now=time_after: now)):
            found.append((code, manager.clock.agreed, manager.clock.pending))
    manager.close()
    return [*found, saved_steps(folder / "checkpoint")]


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("error", "code"), [(StorageError("no answer"), 74), (OSError(errno.EROFS, "read-only"), 2)])
def test_save_that_fails_on_another_rank_has_its_exit_code_and_restarts_the_clock(
    gloo: GlooPool, tmp_path: Path, error: Exception, code: int, mode: str
) -> None:
    expected = [(0, False, True), (code, False, True), (0, False, True), [2]]
    assert gloo.run(2, results_of_failed_saves, tmp_path, error, mode) == [expected] * 2


@contextmanager
def short_retry_delays() -> Iterator[None]:
    """Divide the delays between read attempts by ten."""
    faster_time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10), monotonic=time.monotonic)
    with patch.object(files, "time", faster_time):
        yield


def use_short_retry_delays() -> None:
    short_retry_delays().__enter__()


@short_retry_delays()
def resume(folder: Path) -> str:
    try:
        manager = make_manager(folder, find_resume_point(CONFIG, LocalStorage(str(folder / "checkpoint")), ""))
    except StorageError as error:
        return f"{error.exit_code}: {error}"
    manager.states["state"].numbers.zero_()
    try:
        step = manager.resume()
        assert torch.equal(manager.states["state"].numbers, Numbers().numbers)
        return str(step)
    except StorageError as error:
        return f"{error.exit_code}: {error}"
    finally:
        manager.close()


@short_retry_delays()
def load(folder: Path) -> str:
    manager = make_manager(folder, ResumePoint(new_gloo_group(GROUP_TIMEOUT)))
    try:
        manager.load(2)
        return "loaded"
    except StorageError as error:
        return f"{error.exit_code}: {error}"
    finally:
        manager.close()


@pytest.mark.parametrize(
    ("operation", "pattern", "error", "message"),
    [
        # The second of two ranks verifies this file alone.
        ("open", "step-2/__0_0.distcp", errno.EACCES, "2: .*/step-2/__0_0.distcp cannot be read: Permission denied"),
        ("read", "step-2/__0_0.distcp", errno.EIO, "74: .*/step-2/__0_0.distcp cannot be read: Input/output error"),
        pytest.param(
            *("stat", "step-2/__0_0.distcp", errno.ESTALE),
            "74: .*/step-2/__0_0.distcp cannot be read: Stale file handle",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("open", "step-2/manifest.json", errno.EMFILE),
            "74: .*/manifest.json cannot be read: Too many open files",
            marks=pytest.mark.slow,
        ),
        ("list", "", errno.EIO, "74: .*/checkpoint cannot be read: Input/output error"),
    ],
)
def test_read_error_is_not_damage_and_is_retried(
    gloo: GlooPool, disk: DiskFaults, tmp_path: Path, operation: str, pattern: str, error: int, message: str
) -> None:
    gloo.run(2, save_two_checkpoints, tmp_path)
    before = checkpoint_names(tmp_path)
    disk.fail(operation, tmp_path / "checkpoint" / pattern, error)
    for found in gloo.run(2, resume, tmp_path):
        assert re.match(message, found), found
    assert checkpoint_names(tmp_path) == before
    disk.heal()
    disk.fail(operation, tmp_path / "checkpoint" / pattern, error, times=1)
    assert gloo.run(2, resume, tmp_path) == ["2", "2"]  # a transient error is retried


@pytest.mark.parametrize(
    ("operation", "path", "error", "message"),
    [
        ("mkdir", "away/run", errno.EIO, "away/run' cannot be used"),
        ("mkdir", "away/run", errno.ENOTCONN, "away/run' cannot be used"),  # a mount whose server is unreachable
        ("create", "away/run/checkpoint/*", errno.EIO, "json cannot be written"),
    ],
)
def test_file_system_error_at_start_is_reported_as_such(
    disk: DiskFaults, tmp_path: Path, operation: str, path: str, error: int, message: str
) -> None:
    disk.fail(operation, tmp_path / path, error)
    output = run_ends_with(74, tmp_path / "log", "--job.dump_folder", str(tmp_path / "away/run"))
    assert f"{message}: {os.strerror(error)}. Start again when the file system responds" in output


@pytest.mark.parametrize(("error", "code"), [pytest.param(errno.EACCES, 2, marks=pytest.mark.slow), (errno.EIO, 74)])
def test_every_command_reports_a_path_that_cannot_be_accessed(
    disk: DiskFaults, tmp_path: Path, error: int, code: int
) -> None:
    path = tmp_path / "shut"
    disk.fail("stat", f"{path}*", error)
    commands = [
        ["train", "--checkpoint.initial_load_path", path],
        ["prepare", "--data.path", path, "--prepare.output", tmp_path / "out"],
    ]
    check_errors_of_a_path(path, commands, error, code)


def check_errors_of_a_path(path: Path, commands: list[list[Any]], error: int, code: int) -> None:
    """Each of ``commands`` reports an access to ``path`` that fails with ``error``."""
    for command, *options in commands:
        found = run_command(f"torchtrain.{command}", *map(str, options), hook=use_short_retry_delays)
        assert found.returncode == code, found.stderr
        (line,) = (line for line in found.stderr.splitlines() if not line.endswith("importing PyTorch"))
        assert f"error: {path}" in line
        failed = "read" if command == "prepare" else "used"  # prepare tries to read its input again
        assert f" cannot be {failed}: {os.strerror(error)}" in line


def test_failed_read_of_tensors_is_retried(gloo: GlooPool, disk: DiskFaults, tmp_path: Path) -> None:
    gloo.run(2, save_two_checkpoints, tmp_path)
    disk.fail("read", f"{tmp_path}/*/__1_0.distcp", errno.EIO, times=1)
    assert gloo.run(2, load, tmp_path) == ["loaded"] * 2
    disk.fail("read", f"{tmp_path}/*/__1_0.distcp", errno.EIO)
    for found in gloo.run(2, load, tmp_path):
        assert found.startswith("74: ")
        assert "Input/output error" in found


@pytest.mark.parametrize(
    ("file", "times"),
    [
        ("__0_0.distcp", -1),
        ("__1_0.distcp", 1),
        pytest.param("__0_0.distcp", 1, marks=pytest.mark.slow),
        pytest.param("__1_0.distcp", -1, marks=pytest.mark.slow),
    ],
)
def test_flipped_bit_is_read_again_or_the_previous_checkpoint_is_loaded(
    gloo: GlooPool, disk: DiskFaults, tmp_path: Path, file: str, times: int
) -> None:
    """A bit that flips once is read again; if it flips at every read, all ranks load the checkpoint before."""
    gloo.run(2, save_two_checkpoints, tmp_path)
    disk.fail("flip", tmp_path / "checkpoint/step-2" / file, times=times)
    assert gloo.run(2, resume, tmp_path) == (["2", "2"] if times == 1 else ["1", "1"])
    left = ["step-1", "step-2"] if times == 1 else ["step-1", "step-2.damaged"]
    assert [name for name in checkpoint_names(tmp_path) if name.startswith("step-")] == left


def flip_each(file: Path) -> None:
    """Damage each tensor of ``file`` in place."""
    content = bytearray(file.read_bytes())
    for at in range(50, len(content), 50):
        content[at] ^= 4
    file.write_bytes(content)


def test_run_resumes_from_the_newest_checkpoint_that_can_be_loaded(copied: Path) -> None:
    """Damage that is found after half of the tensors were loaded leaves no trace in the weights."""
    before = saved_tensors(copied, 8)
    flip_each(copied / "checkpoint/step-8/__0_0.distcp")
    damaged = bytearray((copied / "checkpoint/step-6/__0_0.distcp").read_bytes())
    damaged[-1500] ^= 1  # in the last tensor
    (copied / "checkpoint/step-6/__0_0.distcp").write_bytes(damaged)
    output = finish(copied, ranks=1)
    assert "checkpoint of step 8 is damaged, and renamed to step-8.damaged" in output
    assert "checkpoint of step 6 is damaged, and renamed to step-6.damaged" in output
    assert "resumed from" in output
    assert {"step-4", "step-6", "step-8", "step-6.damaged", "step-8.damaged"} <= set(checkpoint_names(copied))
    assert different_tensors(saved_tensors(copied, 8), before) == []


@pytest.mark.parametrize("load_step", [-1, pytest.param(4, marks=pytest.mark.slow)])
def test_no_checkpoint_is_renamed_if_none_can_be_loaded(copied: Path, load_step: int) -> None:
    for file in copied.glob("checkpoint/step-*/__0_0.distcp"):
        flip_each(file)
    before = checkpoint_names(copied)
    for _ in range(2):
        output = run_ends_with(2, copied, "--training.steps", "10", "--checkpoint.load_step", str(load_step))
        message = (
            "none of these is a valid checkpoint" if load_step == -1 else "checkpoint.load_step = 4 cannot be loaded"
        )
        assert message in output
        assert "__0_0.distcp does not have the hash that its manifest names" in output
        assert "Traceback" not in output
    assert checkpoint_names(copied) == before


def load_newest_seen_by_this_rank(folder: Path) -> Tensor:
    model = Transformer(TINY)
    load_weights([model], find_weights(step_folder(folder / "checkpoint", STEPS - 2 * dist.get_rank())), TINY)
    return model.tok_embeddings.weight.detach()


def test_ranks_with_different_newest_checkpoints_load_the_same(gloo: GlooPool, finished: Path) -> None:
    first, second = gloo.run(2, load_newest_seen_by_this_rank, finished)
    assert torch.equal(first, second)


def test_missing_file_is_not_retried(tmp_path: Path) -> None:
    attempts = []

    def read() -> str:
        attempts.append(None)
        return (tmp_path / "nothing").read_text()

    with pytest.raises(FileNotFoundError):
        with_retries(read, tmp_path / "nothing")
    assert len(attempts) == 1


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    # The last line may be incomplete.
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()] if file.exists() else []


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[ForkedRun]:
    """A run of one rank that trains until it is stopped."""
    options = ["--training.steps", "100000", "--metrics.enable_tensorboard", "--profiling.enable_profiling"]
    run = ForkedRun(tmp_path, *options, "--checkpoint.interval", "100000", ranks=1)
    yield run
    run.end()


def test_full_disk_loses_metrics_but_does_not_end_the_run(
    disk: DiskFaults, tmp_path: Path, long_run: ForkedRun
) -> None:
    long_run.wait_for(lambda: len(metrics_lines(tmp_path)) > 3)
    for pattern in ("metrics.jsonl", "tensorboard/*", "traces/*"):
        disk.fail("write", f"{tmp_path}/{pattern}", errno.ENOSPC)
        disk.fail("create", f"{tmp_path}/{pattern}", errno.ENOSPC)
    long_run.wait_for(lambda: "profiling: [Errno 28]" in long_run.output())
    lost_from = metrics_lines(tmp_path)[-1]["step"] + 1
    curves = sum(path.stat().st_size for path in tmp_path.glob("tensorboard/*"))
    time.sleep(0.5)
    disk.heal()
    long_run.wait_for(lambda: metrics_lines(tmp_path)[-1]["step"] > lost_from)
    long_run.kill(number=signal.SIGTERM)
    assert long_run.wait() == [75]
    for reporter in ("metrics.jsonl", "TensorBoard", "profiling"):
        warnings = re.findall(
            rf"{reporter}: \[Errno 28\] No space left on device.*; training continues", long_run.output()
        )
        assert len(warnings) == 1
    assert "metrics.jsonl: works again" in long_run.output()
    steps = [line["step"] for line in metrics_lines(tmp_path)]
    gap = [step for step in range(1, steps[-1]) if step not in steps]
    assert gap == list(range(lost_from, lost_from + len(gap)))
    assert len(gap) > 0
    assert sum(path.stat().st_size for path in tmp_path.glob("tensorboard/*")) > curves


def test_full_disk_keeps_the_previous_config_file(disk: DiskFaults, copied: Path) -> None:
    before = (copied / "config.toml").read_text()
    disk.fail("write", f"{copied}/config.toml*", errno.ENOSPC)
    output = finish(copied, "--training.steps", "10", ranks=1)
    assert "config.toml: [Errno 28] No space left on device; training continues without it" in output
    assert (copied / "config.toml").read_text() == before
    assert not list(copied.glob("config.toml.*"))


@contextmanager
def unreadable_code() -> Iterator[None]:
    """Make reading the package's source files fail."""
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.suffix == ".py":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    with patch.object(Path, "read_bytes", read):
        yield


def test_unreadable_source_code_does_not_end_the_run(tmp_path: Path) -> None:
    output = finish(tmp_path, "--training.steps", "2", ranks=1, hook=unreadable_code)
    assert "the first line of metrics.jsonl: [Errno 5] Input/output error" in output
    assert [line["step"] for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())] == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_unwritable_log_does_not_change_the_exit_code() -> None:
    command = [sys.executable, "-m", "torchtrain.train", "--job.config_file", "none.toml"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, stdout=full, timeout=100, check=False).returncode == 2


PRINTS = "import sys; from torchtrain.cli import run_command; sys.exit(run_command(lambda: print('found') or 0))"
# A background process of a shell script ignores SIGINT, and its children inherit that.
WAITS = """import signal, sys, time; from torchtrain.cli import run_command
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run_command(lambda: print(flush=True) or time.sleep(60)))"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_to_a_full_disk_is_a_one_line_error_and_to_no_reader_is_none(buffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does after its lines
    full = os.open("/dev/full", os.O_WRONLY)
    for output in (full, writer):
        result = subprocess.run(
            [sys.executable, "-c", PRINTS],
            env={**os.environ, "PYTHONUNBUFFERED": buffered},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(output)
        if output == full:
            assert result.returncode == 2
            assert len(result.stderr.splitlines()) == 1
            assert result.stderr.endswith("error: the output cannot be written: No space left on device\n")
        else:
            assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


def test_ctrl_c_prints_one_line_and_exits_with_130() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, len(errors.splitlines())) == (130, 1)
    assert errors.endswith("stopped by Ctrl-C\n")


def test_data_read_error_is_not_reported_as_missing_or_damaged(disk: DiskFaults, tmp_path: Path) -> None:
    text, folder = tmp_path / "text.jsonl", tmp_path / "prepared"
    text.write_text('{"text": "some words"}\n' * 40)
    arguments = ("--data.path", str(text), "--prepare.output", str(folder), "--prepare.processes", "1")
    for operation, path, error, options in (
        ("stat", text, errno.EIO, ()),
        ("read", folder / "manifest.json", errno.EIO, ("--prepare.verify",)),
        ("open", folder / "shard-00000.tokens", errno.EMFILE, ("--prepare.verify",)),
    ):
        disk.fail(operation, path, error)
        found = run_command("torchtrain.prepare", *arguments, *options, hook=use_short_retry_delays)
        assert found.returncode == 74
        assert f"error: {path} cannot be read: {os.strerror(error)}, in 4 attempts" in found.stderr
        assert "Traceback" not in found.stderr
        disk.heal()
        if not options:
            disk.fail(operation, path, error, times=1)
            checked_command("torchtrain.prepare", *arguments, hook=use_short_retry_delays)  # retried


def test_incomplete_last_line_does_not_corrupt_the_next(tmp_path: Path) -> None:
    from torchtrain.metrics.options import MetricsConfig
    from torchtrain.metrics.writers import JsonLines, WriterContext

    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "lo')
    JsonLines(WriterContext(MetricsConfig(), tmp_path)).write({"step": 2})
    assert file.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 2}']


def test_failed_saves_leave_no_files_and_a_start_removes_leftovers(disk: DiskFaults, copied: Path) -> None:
    before = checkpoint_names(copied)
    disk.fail("write", f"{copied}/checkpoint/step-*", errno.ENOSPC)
    options = ["--training.steps", "30", "--checkpoint.max_failed_saves", "3"]
    output = run_ends_with(2, copied, *options)
    assert "step-10 could not be written: OSError(28, 'No space left on device') (rank 0)" in output
    assert "that is 3 failed saves in a row" in output
    assert checkpoint_names(copied) == before

    disk.heal()
    left_over = copied / "checkpoint/step-10.7.partial"
    left_over.mkdir()
    (left_over / "__0_0.distcp").write_bytes(bytes(1000))
    old_lease = copied / "checkpoint/generation.json.0123"
    old_lease.write_text("")
    os.utime(old_lease, (0, 0))
    disk.fail("create", f"{copied}/checkpoint/generation.json*", errno.ENOSPC)
    output = run_ends_with(2, copied, *options)
    assert (
        "generation.json cannot be written (No space left on device), so no checkpoint can be saved: free disk space"
        in output
    )
    assert checkpoint_names(copied) == before


def use_configured_timeout() -> None:
    import torchtrain.fault_tolerance.watchdog as watchdog

    watchdog.TIMES_FIRST_STEP = 0  # otherwise a slow first step on a busy machine would raise the timeout


def use_configured_timeout_and_let_rank_1_wait_in_its_polls() -> None:
    """Rank 1 is then in the collective in which ranks poll, whenever their reports are written. Rank 0 is slower: the
    flight recorder keeps 2,000 collectives, and that of the save must be among them."""
    from torchtrain.checkpoint import manager

    use_configured_timeout()
    manager.POLL_SECONDS = 0.0 if os.environ["RANK"] == "1" else 0.02


def test_hanging_save_is_reported_and_a_stop_ends_the_wait(disk: DiskFaults, tmp_path: Path) -> None:
    disk.fail("fsync", f"{tmp_path}/checkpoint/step-4.*/__1_0.distcp", seconds=3600, rank=1)
    options = ["--comm.train_timeout_seconds", "2", "--faults.stop_grace_seconds", "2"]
    run = ForkedRun(tmp_path, *options, hook=use_configured_timeout_and_let_rank_1_wait_in_its_polls)
    run.wait_for(lambda: "so rank 0 is waiting for rank 1" in run.output())
    assert "save of step 6 takes more than 2 s" in run.output()
    assert re.search(
        r"rank 1: at manager\.py:\d+ \(_has_ended_on_all_ranks\); step-4: writes its part since ", run.output()
    ), run.output()
    for rank in range(2):
        report = (tmp_path / f"hangs/save-of-step-6-rank-{rank}.txt").read_text()
        assert json.loads(report.split("\n", 1)[0])["doing"].startswith("step-4: ")
    run.kill(number=signal.SIGTERM)
    assert run.wait() == [75, 75], run.output()
    assert "asked to stop, and the save of step 4 " in run.output()  # the save does not end, or another rank has ended
    assert "it is aborted; the last valid checkpoint is kept" in run.output()
    assert saved_steps(tmp_path / "checkpoint") == [2]
    disk.heal()
    assert "resumed from" in finish(tmp_path, "--training.steps", "4")


def test_unreadable_lease_does_not_supersede_the_run(disk: DiskFaults, copied: Path, finished: Path) -> None:
    disk.fail("read", f"{copied}/checkpoint/generation.json", errno.EIO)
    run = ForkedRun(copied, "--training.steps", "14", "--checkpoint.max_failed_saves", "9", ranks=1)
    try:
        # The start also reads the file, and retries.
        time.sleep(1)
        disk.heal()
        run.wait_for(lambda: "resumed from" in run.output())
        disk.fail("read", f"{copied}/checkpoint/generation.json", errno.EIO)
        run.wait_for(lambda: "could not be written" in run.output())
        disk.heal()
        assert run.wait() == [0], run.output()
    finally:
        run.end()
    assert "generation.json cannot be read: Input/output error" in run.output()
    assert "now saves to" not in run.output()
    assert saved_steps(copied / "checkpoint")[-1] == 14
    finish(finished.parent / "longer", "--training.steps", "14", ranks=1)
    assert different_tensors(saved_tensors(copied, 14), saved_tensors(finished.parent / "longer", 14)) == []


@pytest.mark.parametrize(
    "content", ["", '{"generation": null}', *(pytest.param(text, marks=pytest.mark.slow) for text in ("null", "[]"))]
)
def test_invalid_lease_file_is_replaced(copied: Path, content: str) -> None:
    (copied / "checkpoint/generation.json").write_text(content)
    finish(copied, "--training.steps", "10", ranks=1)
    assert json.loads((copied / "checkpoint/generation.json").read_text())["generation"] == 1


def test_changed_data_are_detected_on_resume(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    documents = [json.dumps({"text": f"document {n} " * 40}) + "\n" for n in range(300)]
    data.write_text("".join(documents))
    options = ["--data.path", str(data), "--training.steps"]
    finish(tmp_path / "run", *options, "4", ranks=1)
    data.write_text("".join(documents[:100]))
    error = run_ends_with(2, tmp_path / "run", *options, "6")
    assert re.search(r"would not continue the same run: data.path = '[\d,]+ tokens, hash \w+' \(checkpoint: '", error)
    assert f"; changed: {data}). Set the checkpoint's value again, put files back, or," in error
    assert "checkpoint.allow_changes = ['data.path'], with which a source that has other content is read from" in error
    data.write_text("".join(documents))  # the same content with another modification time
    assert "resumed from" in finish(tmp_path / "run", *options, "6", ranks=1)
    data.write_text("".join(documents[:200]))
    allowed = finish(tmp_path / "run", *options, "8", "--checkpoint.allow_changes", "data.path", ranks=1)
    assert "config differs from the checkpoint's (changes the run): data.path" in allowed
    assert f"data.path = '{data}' is not in the checkpoint, or had other content: it is read from its start" in allowed
    options[1] = write_tokens(tmp_path / "tokens", str(data))
    assert "resumed from" in finish(tmp_path / "run", *options, "10", ranks=1)  # the same tokens


def test_files_that_differ_from_those_of_a_checkpoint_are_named(tmp_path: Path) -> None:
    for source in ("web", "books"):
        (tmp_path / source).mkdir()
        for name in "abcd":
            (tmp_path / source / f"{name}.txt").write_text(f"{source} {name} " * 300)
    config = tmp_path / "config.toml"

    sources = "".join(f"[[data.sources]]\npath = '{tmp_path / source}'\n" for source in ("web", "books"))
    config.write_text(RUN_CONFIG + sources)
    options = ["--job.config_file", str(config), "--training.steps"]
    finish(tmp_path / "run", *options, "2", ranks=1)
    books = tmp_path / "books"
    (books / "a.txt").unlink()
    (books / "b.txt").write_text("changed")
    (books / "c.txt").rename(books / "e.txt")
    (books / "f.txt").write_text("added")
    error = run_ends_with(2, tmp_path / "run", *options, "4")
    described = (
        f"; data.sources[1] added: {books}/f.txt; removed: {books}/a.txt; changed: {books}/b.txt; renamed: "
        f"{books}/c.txt to {books}/e.txt; in another order from {books}/d.txt on (in the checkpoint {books}/e.txt))"
    )
    assert described in error
    allowed = finish(tmp_path / "run", *options, "4", "--checkpoint.allow_changes", "data.sources", ranks=1)
    assert f"data.sources[1].path = '{books}' is not in the checkpoint, or had other content" in allowed
    assert f"data.sources[0].path = '{tmp_path / 'web'}' is not in the checkpoint" not in allowed


def test_files_that_a_moved_folder_lacks_are_named(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    for name in "abc":
        (before / f"{name}.txt").write_text(f"text {name} " * 300)
    finish(tmp_path / "run", "--data.path", str(before), "--training.steps", "2", ranks=1)
    (table,) = json.loads((tmp_path / "run/checkpoint/step-2/data_files.json").read_text())
    assert (table["folder"], table["count"]) == (f"{before}/", 3)
    assert [name for name, *_ in table["files"]] == ["a.txt", "b.txt", "c.txt"]
    shutil.copytree(before, after)
    (after / "b.txt").unlink()
    error = run_ends_with(2, tmp_path / "run", "--data.path", str(after), "--training.steps", "4")
    assert f"data.path = '{after}' (checkpoint: '{before}'; removed: b.txt)" in error


def test_changed_data_between_the_sampled_blocks_are_detected(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    text = "".join(f"line {n * n % 9973} of the text\n" for n in range(40_000))
    data.write_text(text)
    options = ["--data.path", str(data), "--training.steps"]
    finish(tmp_path / "run", *options, "2", ranks=1)
    assert "resumed from" in finish(tmp_path / "run", *options, "4", "--data.verify_gib", "4e-4", ranks=1)
    assert "resumed from" in finish(tmp_path / "run", *options, "6", ranks=1)
    position = text.index("line", len(text) // 3)
    data.write_text(text[:position] + "LINE" + text[position + 4 :])
    error = run_ends_with(2, tmp_path / "run", *options, "8")
    assert re.search(r"would not continue the same run: data.path = '[\d,]+ tokens, hash \w+' \(checkpoint: '", error)
    assert f"; changed: {data})" in error
    assert "checkpoint.allow_changes = ['data.path']" in error


def enter_deleted_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def test_deleted_working_folder_is_a_one_line_error() -> None:
    found = run_command("torchtrain.train", "--job.config_file", "none.toml", hook=enter_deleted_folder)
    assert found.returncode == 2
    message = "error: the working folder, or the one of TMPDIR, cannot be used: No such file or directory\n"
    assert found.stderr.endswith(message)
    assert len(found.stderr.splitlines()) == 1


def test_file_not_found_error_of_another_library_keeps_its_message() -> None:
    def missing() -> int:
        raise FileNotFoundError("Config file not found: a.yaml")

    with pytest.raises(FileNotFoundError, match=r"not found: a\.yaml"):
        run_in_this_process(missing)


def test_changed_tokenizer_of_the_same_name_is_detected(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    text = tmp_path / "text.txt"
    text.write_text("Words That Are No News\n" * 500)
    options = ["--model.tokenizer_path", str(tokenizer), "--data.path", str(text), "--training.steps"]
    finish(tmp_path / "run", *options, "4", ranks=1)
    library = Tokenizer.from_file(str(tokenizer))
    library.normalizer = normalizers.Lowercase()
    library.save(str(tokenizer))
    error = run_ends_with(2, tmp_path / "run", *options, "6")
    assert "  model.tokenizer_path = 'SHA-256 " in error
    changes = ["data.path", "model.tokenizer_path"]  # the same text has other tokens
    assert f"checkpoint.allow_changes = {changes}" in error
    allowed = finish(tmp_path / "run", *options, "6", "--checkpoint.allow_changes", *changes, ranks=1)
    assert "resumed from" in allowed
