"""Faults that happen on clusters, injected into runs of two ranks: the final state is that of an uninterrupted run."""

import json
import os
import random
import re
import resource
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import crash_test
import psutil
import pytest
import torch
from disk_faults import DiskFaults
from forked_command import start_command
from forked_run import (
    CONFIG,
    TIMEOUT_SECONDS,
    TINY,
    ForkedRun,
    finish,
    patched_loss,
    saved_tensors,
    slow_steps,
)
from forkserver import context

from torchtrain.checkpoint.format import read_manifest, verify
from torchtrain.checkpoint.local_storage import LocalCheckpoint, saved_steps, step_folder
from torchtrain.distributed.mesh import local
from torchtrain.errors import HangError, StoppedError
from torchtrain.fault_tolerance import stop_request, watchdog
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.logging import logger

MICROBATCHES = 2  # per rank and step: global batch 4, local batch 1, 2 ranks
STEPS = 8


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dump folder of an uninterrupted run, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(folder, "--checkpoint.interval", "1")
    return folder


def assert_same_checkpoint(folder: Path, uninterrupted: Path, step: int = STEPS) -> None:
    """Assert that both runs have saved the same tensors at ``step``."""
    ours, theirs = (saved_tensors(f, step) for f in (folder, uninterrupted))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def assert_all_complete(folder: Path) -> None:
    for step in saved_steps(folder / "checkpoint"):
        checkpoint = LocalCheckpoint(step_folder(folder / "checkpoint", step))
        verify(checkpoint, read_manifest(checkpoint).files)


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line.get("event") != "start"]


def steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return max((json.loads(line)["step"] for line in file.read_text().splitlines()), default=0) if file.exists() else 0


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_run_killed_at_random_ends_like_an_uninterrupted_run(tmp_path: Path, uninterrupted: Path, kills: int) -> None:
    rng = random.Random(0)
    for kill in range(kills):
        run = ForkedRun(tmp_path, hook=slow_steps)
        start = steps_done(tmp_path)
        run.wait_for(lambda: steps_done(tmp_path) > min(start, STEPS - 4))  # noqa: B023
        time.sleep(rng.random() * 0.2)
        run.kill(*([0], [0, 1], [1], [1])[kill])
        run.end()
        assert_all_complete(tmp_path)
    finish(tmp_path)
    assert_same_checkpoint(tmp_path, uninterrupted)
    assert not list(tmp_path.glob("checkpoint/*.damaged"))


@pytest.mark.slow
def test_killed_run_of_one_rank_ends_like_an_uninterrupted_run(tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    finish(uninterrupted, ranks=1)
    run = ForkedRun(killed, ranks=1, hook=slow_steps)
    run.wait_for(lambda: bool(saved_steps(killed / "checkpoint")))
    run.end()
    assert STEPS not in saved_steps(killed / "checkpoint")
    assert "resumed from" in finish(killed, ranks=1)
    assert_same_checkpoint(killed, uninterrupted)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner: Any, name: str) -> None:
    """Make this process die when ``owner.name`` is called for the checkpoint of step 6."""
    original = getattr(owner, name)

    def dying(writer: Any, *args: Any) -> Any:
        if "step-6" in str(getattr(writer, "partial", writer)):
            die()
        return original(writer, *args)

    setattr(owner, name, dying)


def die_in_data() -> None:
    from torchtrain.checkpoint.local_storage import LocalNewCheckpoint

    original = LocalNewCheckpoint.create

    def dying(self: Any, name: str) -> Any:
        if "step-6" in str(self.partial) and "__1_0" in name:
            (self.partial / name).write_bytes(b"the beginning")
            die()
        return original(self, name)

    LocalNewCheckpoint.create = dying  # type: ignore[method-assign]


def die_before_manifest() -> None:
    from torchtrain.checkpoint.local_storage import LocalNewCheckpoint

    die_at(LocalNewCheckpoint, "commit")


def die_before_rename() -> None:
    from torchtrain.checkpoint import local_storage

    die_at(local_storage, "fsync_folder")


@pytest.mark.parametrize(
    "moments",
    [
        [die_in_data],  # of rank 1; test_writer_lease.py kills one rank at each operation
        pytest.param([die_in_data, die_before_manifest, die_before_rename], marks=pytest.mark.slow),
    ],
    ids=["one", "three"],
)
def test_run_killed_during_saves_ends_like_an_uninterrupted_run(
    tmp_path: Path, uninterrupted: Path, moments: list[Any]
) -> None:
    for moment in moments:
        run = ForkedRun(tmp_path, hook=moment)
        run.wait_for(lambda: any(process.exitcode is not None for process in run.processes))  # noqa: B023
        run.end()
        assert list((tmp_path / "checkpoint").glob("step-6.*.partial")), moment
        assert saved_steps(tmp_path / "checkpoint") == [2, 4], moment
        assert_all_complete(tmp_path)
    finish(tmp_path)
    assert_same_checkpoint(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    "signals",
    [
        [(signal.SIGUSR1, [1])],
        pytest.param([(signal.SIGTERM, [0, 1]), (signal.SIGUSR1, [1])], marks=pytest.mark.slow),
    ],
    ids=["one", "two"],
)
def test_signals_save_the_step_at_which_they_stop(
    tmp_path: Path, uninterrupted: Path, signals: list[tuple[signal.Signals, list[int]]]
) -> None:
    for number, ranks in signals:
        before = steps_done(tmp_path)
        run = ForkedRun(tmp_path, "--checkpoint.interval", "100", hook=slow_steps)
        run.wait_for(lambda: steps_done(tmp_path) > before)  # noqa: B023
        run.kill(*ranks, number=number)
        assert run.wait() == [StoppedError.exit_code] * 2, run.output()
        stopped_at = steps_done(tmp_path)
        assert before < stopped_at < STEPS
        assert saved_steps(tmp_path / "checkpoint")[-1] == stopped_at
    finish(tmp_path)
    assert_same_checkpoint(tmp_path, uninterrupted)


def start_torchrun(module: str, forked_ranks: dict[str, str], folder: Path, *options: str) -> tuple[BaseProcess, Path]:
    """Start a run of two ranks under torchrun or our launcher (``module``); returns its process and its log."""
    config = folder / "test.toml"
    config.write_text(CONFIG)
    ranks = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "3")
    script = str(Path(__file__).parent / "harness" / "tiny_train.py")
    run = ("--job.config_file", str(config), "--job.dump_folder", str(folder), *options)
    [process], [_, log] = start_command(folder, module, *ranks, script, *run, environment=forked_ranks)
    return process, log


def wait_for_step(process: BaseProcess, log: Path, folder: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while steps_done(folder) < step:
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow  # test_launch.py has the launcher's part, and the test above that of the ranks
def test_sigterm_to_the_launcher_saves_the_step_at_which_it_stops(
    forked_ranks: dict[str, str], tmp_path: Path, uninterrupted: Path
) -> None:
    process, log = start_torchrun("torchtrain.launch", forked_ranks, tmp_path, "--checkpoint.interval", "100")
    wait_for_step(process, log, tmp_path, 3)
    process.terminate()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 128 + signal.SIGTERM, log.read_text()
    stopped_at = steps_done(tmp_path)
    assert saved_steps(tmp_path / "checkpoint") == [stopped_at], log.read_text()
    assert stopped_at < STEPS
    finish(tmp_path)
    assert_same_checkpoint(tmp_path, uninterrupted)


def test_torchrun_restarts_a_killed_rank(forked_ranks: dict[str, str], tmp_path: Path, uninterrupted: Path) -> None:
    process, log = start_torchrun("torch.distributed.run", forked_ranks, tmp_path)
    wait_for_step(process, log, tmp_path, 3)
    ranks = [child for child in psutil.Process(process.pid).children() if "tiny_train.py" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    ranks[1].kill()
    process.join(TIMEOUT_SECONDS)
    assert process.exitcode == 0, log.read_text()
    assert "resumed from" in log.read_text()
    assert_same_checkpoint(tmp_path, uninterrupted)


@pytest.mark.slow  # the next test has a limit, and others stop two ranks
def test_wall_clock_limit_stops_in_time_and_saves(tmp_path: Path) -> None:
    run = ForkedRun(
        tmp_path,
        *("--training.steps", "100000", "--checkpoint.interval", "100000"),
        *("--faults.wall_clock_limit_minutes", "0.1", "--faults.stop_grace_seconds", "3"),
        hook=slow_steps,
    )
    assert run.wait() == [StoppedError.exit_code] * 2, run.output()
    assert saved_steps(tmp_path / "checkpoint")[-1] == steps_done(tmp_path)


def advance_clock_after_opening_data() -> Any:
    from torchtrain import trainer

    build, clock = trainer.build_loaders, time.monotonic

    def slow(*arguments: Any) -> Any:
        found = build(*arguments)
        time.monotonic = lambda: clock() + 3600
        return found

    return patch.object(trainer, "build_loaders", slow)


def test_wall_clock_limit_includes_the_time_of_opening_data(tmp_path: Path) -> None:
    options = ("--faults.wall_clock_limit_minutes", "30")
    run = ForkedRun(tmp_path, *options, ranks=1, hook=advance_clock_after_opening_data)
    assert run.wait() == [StoppedError.exit_code], run.output()
    assert saved_steps(tmp_path / "checkpoint") == [2]  # the host reads the agreement one step later


def test_stop_is_saved_if_the_grace_period_ends_before_the_step(tmp_path: Path, uninterrupted: Path) -> None:
    # For example while the first step compiles.
    options = ("--faults.stop_grace_seconds", "1", "--checkpoint.interval", "100")
    run = ForkedRun(tmp_path, *options, hook=first_step_takes_4_seconds)
    run.wait_for(lambda: "the first loss" in run.output())
    run.kill(number=signal.SIGINT)
    assert run.wait() == [StoppedError.exit_code] * 2, run.output()
    assert saved_steps(tmp_path / "checkpoint") == [2]  # the ranks agree one step later
    assert_same_checkpoint(tmp_path, uninterrupted, step=2)


def slow_commit() -> Any:
    """A commit that does not end on rank 0, which alone gets a signal."""
    from torchtrain.checkpoint.local_storage import LocalNewCheckpoint

    def commit(*_: Any) -> str:
        logger.info("the commit begins")
        time.sleep(60)
        return ""

    return patch.object(LocalNewCheckpoint, "commit", commit)


@pytest.mark.parametrize("signaled", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_save_that_exceeds_the_grace_period_is_one_message_and_one_code(tmp_path: Path, signaled: int) -> None:
    options = ("--faults.stop_grace_seconds", "1", "--training.steps", "4", "--checkpoint.interval", "4")
    run = ForkedRun(tmp_path, *options, hook=slow_commit)
    run.wait_for(lambda: "the commit begins" in run.output())
    run.kill(signaled, number=signal.SIGTERM)
    assert run.wait() == [StoppedError.exit_code] * 2, run.output()
    assert run.output().count("error: asked to stop") == 1, run.output()
    assert "Traceback" not in run.output()


def first_step_takes_4_seconds() -> Any:
    def wait(call: int, loss: Any) -> Any:
        if call == 1:
            logger.info("the first loss")
        if call <= MICROBATCHES:
            time.sleep(2)
        return loss

    return patched_loss(wait)


def slow_validation() -> Any:
    from torchtrain.metrics import validation

    original = validation.Validator.held_out

    def slow(*arguments: Any) -> Any:
        for microbatch in original(*arguments):
            time.sleep(0.3)
            yield microbatch

    return patch.object(validation.Validator, "held_out", slow)


def test_stop_ends_a_validation_and_saves_the_step_before(tmp_path: Path, uninterrupted: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("some words that nobody has trained on\n" * 1000)
    options = ["--validation.enable", "--validation.path", str(held_out), "--validation.interval", "4"]
    run = ForkedRun(tmp_path / "run", *options, hook=slow_validation)
    run.wait_for(lambda: steps_done(tmp_path / "run") == 4)
    time.sleep(0.5)
    run.kill(1, number=signal.SIGTERM)
    assert run.wait() == [StoppedError.exit_code] * 2, run.output()
    assert "validation after step 4 is aborted: the run was asked to stop" in run.output()
    assert saved_steps(tmp_path / "run/checkpoint") == [2, 4]
    assert_same_checkpoint(tmp_path / "run", uninterrupted, step=4)


@pytest.mark.slow
def test_interrupted_validation_is_repeated_on_resume(tmp_path: Path) -> None:
    """The validation after a saved step."""
    resume_after_interrupted_validations(tmp_path)


def resume_after_interrupted_validations(tmp_path: Path, *more: str) -> tuple[Path, list[str]]:
    """Returns the folder of the run, and its options. The run in ``tmp_path / "reference"`` was not interrupted."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("some words that nobody has trained on\n" * 40)
    options = ["--validation.enable", "--validation.path", str(held_out), "--validation.interval", "4"]
    options += more
    finish(tmp_path / "reference", *options, ranks=1)
    folder = tmp_path / "run"
    for step, number in ((4, signal.SIGTERM), (STEPS, signal.SIGTERM), (STEPS, signal.SIGKILL)):
        run = ForkedRun(folder, *options, ranks=1, hook=slow_validation)
        run.wait_for(lambda step=step: steps_done(folder) == step and step_folder(folder / "checkpoint", step).exists())
        time.sleep(1)  # so that the validation runs
        run.kill(number=number)
        assert run.wait() == [StoppedError.exit_code if number == signal.SIGTERM else -number], run.output()
        assert [line for line in validations(folder) if line["step"] == step] == []
    assert not (folder / "hf").exists()  # an export
    assert f"training begins with step {STEPS + 1}" not in finish(folder, *options, ranks=1)
    assert validations(folder) == validations(tmp_path / "reference")
    before = (folder / "metrics.jsonl").read_bytes()
    assert "the run is complete" in finish(folder, *options, ranks=1)
    assert before == (folder / "metrics.jsonl").read_bytes()
    return folder, options


def validations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_lines(folder) if "validation_loss" in line]


def test_signal_during_the_installation_of_handlers_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    install, stop = signal.signal, StopRequest(FaultsConfig())

    def install_late(number: int, handler: Any) -> Any:
        before = install(number, handler)
        if number == signal.SIGUSR1 and before == signal.SIG_DFL:
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", install_late)
    with stop:
        deadline = time.monotonic() + 5
        while not stop.pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.signal_name == "SIGUSR1"


@pytest.mark.parametrize(
    ("name", "left", "seconds"),
    [("SIGUSR1", 300, 290), ("SIGUSR1", 20, 30), ("SIGUSR1", 36000, 30), ("SIGTERM", 300, 30)],
)
def test_grace_period_after_a_slurm_warning_lasts_until_the_job_limit(
    monkeypatch: pytest.MonkeyPatch, name: str, left: int, seconds: float
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + left))
    with StopRequest(FaultsConfig()) as stop:
        signal.raise_signal(signal.Signals[name])
        deadline = time.monotonic() + 5
        while not stop.pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.seconds_left == pytest.approx(seconds, abs=3)


@pytest.mark.parametrize(
    ("handler", "by_torchrun", "stops"),
    [(signal.SIG_DFL, False, True), (signal.SIG_IGN, False, False), (signal.SIG_IGN, True, True)],
)
def test_hangup_stops_a_run_but_under_nohup_only_if_torchrun_sends_it(
    handler: signal.Handlers, by_torchrun: bool, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with StopRequest(FaultsConfig()) as stop:
            signal.raise_signal(signal.SIGHUP)
            deadline = time.monotonic() + (5 if stops else 0.3)
            while not stop.pending and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stop.signal_name == ("SIGHUP" if stops else None)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def treat_all_steps_as_long() -> Any:
    from torchtrain.fault_tolerance import step_check

    return patch.object(step_check, "LONG_STEP_SECONDS", 0.0)


def test_stop_is_agreed_on_in_the_same_step_if_steps_are_long(tmp_path: Path, uninterrupted: Path) -> None:
    run = ForkedRun(tmp_path, "--checkpoint.interval", "100", hook=stop_in_third_step)
    assert run.wait() == [StoppedError.exit_code] * 2, run.output()
    assert saved_steps(tmp_path / "checkpoint") == [3]
    assert_same_checkpoint(tmp_path, uninterrupted, step=3)


@contextmanager
def stop_in_third_step() -> Any:
    def send_signal(call: int, loss: Any) -> Any:
        if call == 2 * MICROBATCHES + 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # so that it is received
        return loss

    with treat_all_steps_as_long(), patched_loss(send_signal):
        yield


def test_second_signal_ends_the_run_immediately(tmp_path: Path) -> None:
    run = ForkedRun(tmp_path, hook=slow_from_step_3)
    run.wait_for(lambda: steps_done(tmp_path) >= 2)
    time.sleep(1)  # all ranks are in the step that does not end
    run.kill(number=signal.SIGTERM)
    time.sleep(3.5)
    run.kill(number=signal.SIGTERM)
    assert run.wait() == [128 + signal.SIGTERM] * 2


def slow_from_step_3() -> Any:
    def wait(call: int, loss: Any) -> Any:
        if call > 2 * MICROBATCHES:
            time.sleep(300)
        return loss

    return patched_loss(wait)


def nan_in_step_5_of_rank_1() -> Any:
    def poison(call: int, loss: Any) -> Any:
        return loss * float("nan") if os.environ["RANK"] == "1" and call == 4 * MICROBATCHES + 1 else loss

    return patched_loss(poison)


def inf_from_step_3() -> Any:
    return patched_loss(lambda call, loss: loss * float("inf") if call > 2 * MICROBATCHES else loss)


def test_non_finite_gradients_are_skipped(tmp_path: Path) -> None:
    output = finish(tmp_path, hook=nan_in_step_5_of_rank_1)
    problem = r"step 5 is bad \(loss nan, gradient norm nan\): loss not finite on 1 rank\(s\)"
    assert re.search(f"{problem}; .*the update is skipped", output)
    events = [line for line in metrics_lines(tmp_path) if "event" in line]
    assert [(event["step"], event["event"]) for event in events] == [(5, "bad_step_skip")]
    tensors = saved_tensors(tmp_path, STEPS)
    assert [name for name, tensor in tensors.items() if not tensor.isfinite().all()] == []
    assert tensors["optimizer.norm.weight.step"].item() == STEPS - 1


def nan_in_the_first_two_steps() -> Any:
    return patched_loss(lambda call, loss: loss * float("nan") if call <= 2 * MICROBATCHES else loss)


def test_save_before_the_first_update_has_step_zero(tmp_path: Path) -> None:
    options = ["--optimizer.implementation", "foreach", "--checkpoint.interval", "2", "--training.steps", "4"]
    finish(tmp_path, *options, "--checkpoint.keep_latest_k", "0", hook=nan_in_the_first_two_steps)
    assert saved_tensors(tmp_path, 2)["optimizer.norm.weight.step"].item() == 0
    assert saved_tensors(tmp_path, 4)["optimizer.norm.weight.step"].item() == 2


def test_non_finite_gradients_roll_back_and_skip_the_data(tmp_path: Path, uninterrupted: Path) -> None:
    options = ("--faults.on_nonfinite", "rollback", "--training.steps", str(STEPS - 1))
    finish(tmp_path, *options, hook=nan_in_step_5_of_rank_1)
    steps = [(line["step"], line.get("event")) for line in metrics_lines(tmp_path)]
    assert steps[3:5] == [(4, None), (5, "bad_step_rollback")]
    assert steps[5:8] == [(4, "rolled_back"), (5, None), (6, None)]
    tensors = saved_tensors(tmp_path, STEPS - 1)
    assert tensors["optimizer.norm.weight.step"].item() == STEPS - 1
    # The batch of the bad step is skipped, and no other one.
    assert torch.equal(tensors["loader.rows"], saved_tensors(uninterrupted, STEPS)["loader.rows"])


def nan_in_the_last_step() -> Any:
    """A NaN loss in the first attempt at step 6, on rank 1."""

    def poison(call: int, loss: Any) -> Any:
        return loss * float("nan") if os.environ["RANK"] == "1" and call == 5 * MICROBATCHES + 1 else loss

    return patched_loss(poison)


def test_run_with_a_bad_last_step_stops_without_its_checkpoint(tmp_path: Path) -> None:
    options = ("--faults.on_nonfinite", "stop", "--training.steps", "6")
    run = ForkedRun(tmp_path, *options, hook=nan_in_the_last_step)
    assert run.wait() == [2, 2]
    assert "step 6 is bad" in run.output()
    assert saved_steps(tmp_path / "checkpoint") == [2, 4]


def test_run_with_a_bad_last_step_rolls_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    options = ("--faults.on_nonfinite", "rollback", "--training.steps", "6")
    output = finish(tmp_path, *options, hook=nan_in_the_last_step)
    assert f"rolled back to {tmp_path}/checkpoint/step-4" in output
    assert saved_tensors(tmp_path, 6)["optimizer.norm.weight.step"].item() == 6


def nan_with_state_after_rollback_saved() -> Any:
    from torchtrain.checkpoint.states import flatten
    from torchtrain.trainer import Trainer

    original = Trainer.roll_back

    def roll_back_and_save(run: Trainer) -> None:
        original(run)
        tensors = {name: local(tensor).clone() for name, tensor in flatten(run.checkpointer.states).items()}
        torch.save(tensors, Path(run.checkpointer.storage.folder).parent / f"rolled-back-to-{run.step}.pt")

    Trainer.roll_back = roll_back_and_save  # type: ignore[method-assign]
    return patched_loss(lambda call, loss: loss * float("nan") if call == 4 * 4 + 1 else loss)


def test_rollback_restores_all_states_but_data_and_statistics(tmp_path: Path) -> None:
    check_states_after_a_rollback(tmp_path)


def check_states_after_a_rollback(tmp_path: Path, *more: str, statistics: tuple[str, ...] = ()) -> None:
    """``more``: options of a plugin, which has the states ``statistics`` of all steps."""
    options = ("--ema.enable", "--ema.decay", "0.5", "--faults.spike_threshold", "50", *more)
    hook = nan_with_state_after_rollback_saved
    finish(tmp_path, *options, "--faults.on_nonfinite", "rollback", "--training.steps", "6", ranks=1, hook=hook)
    (file,) = tmp_path.glob("rolled-back-to-*.pt")
    rolled_back = torch.load(file, weights_only=True)
    saved = saved_tensors(tmp_path, int(file.stem.rpartition("-")[2]))
    assert rolled_back.keys() == saved.keys()
    differ = {name for name, tensor in saved.items() if not torch.equal(rolled_back[name], tensor)}
    # The data continue, and the statistics of gradients include one more finite step.
    assert {name.split(".")[0] for name in differ} <= {"loader", "spikes", *statistics}
    assert "loader.rows" in differ
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer", "ema", "loader", "spikes", *statistics}


ONE_RANK = ("--training.global_batch_size", str(MICROBATCHES))  # as many microbatches as each of two ranks has


def spike_in_step_7() -> Any:
    """Multiply the loss of step 7 by 50."""
    return patched_loss(lambda call, loss: loss * 50 if (call - 1) // MICROBATCHES == 6 else loss)


def spike_in_the_second_step() -> Any:
    return patched_loss(lambda call, loss: loss * 50 if (call - 1) // MICROBATCHES == 1 else loss)


def test_spike_is_handled_like_non_finite_numbers_also_after_a_restart(tmp_path: Path) -> None:
    check_spike(tmp_path)


def check_spike(tmp_path: Path, *options: str) -> str:
    """Returns what the event of the spike says of it."""
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    spikes = ("--faults.spike_threshold", "6", "--faults.spike_window", "5", *ONE_RANK, *options)
    finish(uninterrupted, *spikes, ranks=1, hook=spike_in_step_7)
    (event,) = (line for line in metrics_lines(uninterrupted) if line.get("event", "").startswith("bad_step"))
    assert (event["step"], event["event"]) == (7, "bad_step_skip")
    assert "is a spike: the last 5 steps had" in event["problem"]
    assert saved_tensors(uninterrupted, STEPS)["optimizer.norm.weight.step"].item() == STEPS - 1
    finish(resumed, *spikes, "--training.steps", "5", ranks=1)
    finish(resumed, *spikes, ranks=1, hook=spike_in_the_second_step)
    assert_same_checkpoint(resumed, uninterrupted)
    problem: str = event["problem"]
    return problem


@pytest.mark.parametrize("policy", [pytest.param("skip", marks=pytest.mark.slow), "rollback"])
def test_too_many_consecutive_bad_steps_stop_the_run(tmp_path: Path, policy: str) -> None:
    options = ("--faults.on_nonfinite", policy, "--faults.max_bad_steps", "2", *ONE_RANK)
    run = ForkedRun(tmp_path, *options, ranks=1, hook=inf_from_step_3)
    assert run.wait() == [2]
    assert "that is 3 in a row, and faults.max_bad_steps = 2" in run.output()


def fill_disk_of_rank_1_in_steps_3_to_6() -> None:
    """Limit the size of files of rank 1 to a few bytes during these steps, as if its disk were full."""
    from torchtrain.checkpoint.manager import CheckpointManager

    original = CheckpointManager.maybe_save

    def limited(manager: CheckpointManager, step: int, last: bool = False, required: bool = True) -> None:
        full = os.environ["RANK"] == "1" and 3 <= step <= 6
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if full else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        original(manager, step, last, required)
        manager.wait()

    CheckpointManager.maybe_save = limited  # type: ignore[method-assign]


def test_run_continues_after_a_disk_was_full(tmp_path: Path, uninterrupted: Path) -> None:
    output = finish(tmp_path, hook=fill_disk_of_rank_1_in_steps_3_to_6)
    for step in (4, 6):
        assert f"step-{step} could not be written: OSError(27, 'File too large') (rank 1)" in output
    assert saved_steps(tmp_path / "checkpoint") == [2, 8]
    assert_all_complete(tmp_path)
    assert_same_checkpoint(tmp_path, uninterrupted)


def stop_before(method: Any, name: str, call: int = 4) -> Any:
    """Suspend rank 1's process at call number ``call`` of a method, so that it is alive but silent."""

    watchdog.COLLECT_SECONDS = 1
    watchdog.TIMES_FIRST_STEP = 0  # otherwise a slow first step on a busy machine would raise the timeout
    original, calls = getattr(method, name), 0

    def stopped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **options)

    return patch.object(method, name, stopped)


def stop_before_update() -> Any:
    from torchtrain.trainer import TrainStep

    return stop_before(TrainStep, "clip_and_update")


def stop_before_batch() -> Any:
    """Suspend before the batch of step 4, which no rank waits for: it is ready, and rank 1 has said so, in step 3."""
    from torchtrain.datasets.dataloader import DataLoader

    poll = DataLoader._poll

    def poll_until_ready(loader: Any, _: float) -> None:
        poll(loader, 60.0)
        if os.environ["RANK"] == "1":
            loader._reduction[1].wait()

    stack = ExitStack()
    stack.enter_context(patch.object(DataLoader, "_poll", poll_until_ready))
    stack.enter_context(stop_before(DataLoader, "__next__"))
    return stack


def stop_in_a_block() -> Any:
    """Suspend in the second of two blocks, for which FSDP gathers parameters, in step 4."""
    from torchtrain.models.llama.model import TransformerBlock

    return stop_before(TransformerBlock, "forward", 2 * MICROBATCHES * 3 + 1)


def stop_in_a_stage() -> Any:
    """Suspend in the forward of the last stage, for which the first stage waits, in step 4."""
    from torchtrain.models.llama.model import TransformerBlock

    return stop_before(TransformerBlock, "forward", 4 * 3 + 2)


PIPELINE = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")


@pytest.mark.parametrize(
    ("hook", "waits", "options"),
    [
        pytest.param(stop_before_update, r"all_reduce at gradient_reducer\.py", (), marks=pytest.mark.slow),
        pytest.param(
            *(stop_in_a_block, r"(\w+ at model|all_to_all_single at reduce_scatter)\.py", ()), marks=pytest.mark.slow
        ),
        (stop_in_a_stage, r"_wait_batch_p2p at pipeline_llama\.py", PIPELINE),
    ],
    ids=["step", "shards", "pipeline"],
)
def test_hang_report_names_the_waiting_and_the_missing_ranks(
    tmp_path: Path, hook: Any, waits: str, options: Any
) -> None:
    options = ("--comm.train_timeout_seconds", "2", "--checkpoint.no-enable", *options)
    run = ForkedRun(tmp_path, *options, hook=hook, shape=replace(TINY, n_layers=2))
    try:
        run.wait_for(lambda: "is waiting for" in run.output())
    finally:
        run.end()
    check_hang_report(run.logs[0].read_text(), waits, tmp_path)


def check_hang_report(output: str, waits: str, folder: Path) -> None:
    assert "step 4 takes more than 2 s" in output, output
    assert re.search(f"rank 0: waiting in {waits}", output), output
    assert "rank 1: no report" in output, output
    assert "so rank 0 is waiting for rank 1" in output, output
    assert list(folder.glob("hangs/step-4-rank-0.txt"))


def test_the_last_line_after_a_hang_names_the_rank_and_its_host(tmp_path: Path) -> None:
    """And not the traceback of the collective that has timed out on the healthy rank."""
    run = ForkedRun(tmp_path, "--comm.train_timeout_seconds", "2", "--checkpoint.no-enable", hook=stop_before_batch)
    try:
        run.processes[0].join(60)
    finally:
        run.end()
    output = run.logs[0].read_text()
    check_hang_report(output, r"all_reduce at trainer\.py", tmp_path)
    assert run.processes[0].exitcode == HangError.exit_code == 74, output
    assert "Traceback" not in output
    where = f"the stack traces are in {tmp_path}/hangs"
    hang = (
        f"rank 1 on host {socket.gethostname()} hangs in step 4: no report: dead, stopped, or not in this step; {where}"
    )
    assert output.splitlines()[-1].endswith(f"error: {hang}")


def test_ranks_that_wait_for_a_waiting_rank_do_not_hide_the_one_that_hangs(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait for rank 2, which waits for ranks 3 to 8."""

    def waiting(ranks: list[int], other: str = "") -> watchdog.RankStatus:
        begun = {str(ranks): 1, other: 0}
        return watchdog.RankStatus("a.py:1 (b)", "all_reduce", {str(ranks): ["all_reduce", 1, ranks]}, begun, "")

    statuses = {0: waiting([0, 1, 2]), 1: waiting([0, 1, 2]), 2: waiting([2, *range(3, 9)])}
    hosts = [f"node-{rank}" for rank in range(9)]
    watch = watchdog.Watchdog(tmp_path, 0, 9, 5, doing=str, hosts=hosts)
    summary, conclusion = watch._summary("step 2", statuses)
    assert "  so ranks 0-1 are waiting for rank 2\n  so rank 2 is waiting for ranks 3-8" in summary
    on = "ranks 3-8 on hosts node-3, node-4, node-5, node-6 and 2 more hang in step 2"
    assert conclusion.startswith(f"{on}: no report: dead, stopped, or not in this step; the stack traces are in ")
    both = {0: waiting([0, 1], other="[1, 0]"), 1: waiting([1, 0], other="[0, 1]")}
    conclusion = watchdog.Watchdog(tmp_path, 0, 2, 5, doing=str)._summary("step 2", both)[1]
    assert conclusion.startswith("step 2 takes more than 5 s, and ranks 0-1 wait for each other; ")


def test_report_of_a_step_that_was_only_slow_is_not_left_to_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    monkeypatch.setattr(watchdog, "COLLECT_SECONDS", 0)
    with watchdog.Watchdog(tmp_path, 0, 1, 0.1, doing=str) as watch:
        with watch.watch("step 4"):
            wait_until(lambda: reply.exists() and reply.stat().st_size > 0)
            message = json.loads(reply.read_text())["message"]["message"]
            assert message.startswith("HangError: step 4 takes more than 0 s, and no rank waits for another; ")
        assert not reply.exists()

        def fail() -> None:
            with watch.watch("step 5"):
                wait_until(reply.exists)
                raise RuntimeError("of another kind")

        with pytest.raises(RuntimeError, match="of another kind"):
            fail()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hang_reports_are_found_whatever_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "COLLECT_SECONDS", 0)
    monkeypatch.setattr(logger, "propagate", True)
    for rank in (1, 0):
        monkeypatch.setattr(time, "time", lambda: 4e9)  # far ahead of the file system's clock
        with watchdog.Watchdog(tmp_path, rank, 2, 1000, doing=str) as watch:
            watch._report("step 4")
    assert "ranks 0-1: at watchdog.py" in caplog.messages[-1]


def test_rank_with_a_pending_collective_is_not_awaited_by_a_receive() -> None:
    """Rank 1 is in a collective that only the flight recorder shows, and rank 2 has written no report."""
    receiving = watchdog.RankStatus("a.py:1 (b)", "recv", {}, {}, "")
    in_collective = watchdog.RankStatus("a.py:2 (c)", "", {"0": ["all_gather", 7, [1, 2]]}, {"0": 7}, "")
    statuses = {0: receiving, 1: in_collective}
    assert watchdog._awaited(receiving, statuses, 3) == {2}


def test_one_rank_reads_the_hang_reports_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = 200
    monkeypatch.setattr(watchdog, "COLLECT_SECONDS", 0)
    monkeypatch.setattr(logger, "propagate", True)
    waiting = watchdog.RankStatus(
        "a.py:1 (b)", "all_reduce", {"0": ["all_reduce", 7, list(range(ranks))]}, {"0": 7}, ""
    )
    for rank in range(ranks - 1):
        (tmp_path / f"step-4-rank-{rank}.txt").write_text(json.dumps(asdict(waiting)) + "\n")
    monkeypatch.setattr(watchdog, "_current_status", lambda *_: waiting)
    with (
        patch.object(json, "loads", wraps=json.loads) as read,
        patch.object(watchdog, "_awaited", wraps=watchdog._awaited),
    ):
        for rank, reads in ((ranks - 2, 0), (0, ranks - 1)):
            with watchdog.Watchdog(tmp_path, rank, ranks, 1000, doing=str) as watch:
                watch._report("step 4")
            assert read.call_count == reads
        assert watchdog._awaited.call_count == 1  # all ranks wait in the same collective
    (message,) = caplog.messages
    assert message.endswith(f"so ranks 0-{ranks - 2} are waiting for rank {ranks - 1}")


class Forked(ForkedRun):
    """The runs of scripts/faults/crash_test.py, with a smaller model in forked processes."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        # Slow, so that few steps pass while its disk fails: the other run must make all of them, too.
        options_of_run = {"hook": slow_steps} if folder.name == "run" else {}
        super().__init__(folder, *options, **options_of_run)


@pytest.mark.slow  # the next test has several at once, and each has a test of its own
def test_run_with_all_faults_ends_like_an_uninterrupted_run(disk: DiskFaults, tmp_path: Path) -> None:
    data = tmp_path / "validation.txt"
    data.write_text("words that nobody trains on\n" * 5000)
    run, uninterrupted = (
        crash_test.Trial(tmp_path / name, random.Random(0), disk, Forked, data) for name in ("run", "uninterrupted")
    )
    steps = crash_test.disturb(run, [crash_test.kill, *crash_test.FAULTS, crash_test.kill])
    tensors, compared = crash_test.compare(run, uninterrupted, steps)
    assert tensors > 45
    assert compared > 10


def write_time(file: Path) -> None:
    file.write_text(str(time.time()))


@pytest.mark.parametrize("seconds", [0, -86400, 86400])
def test_wall_clock_of_other_processes_can_be_moved(seconds: int, disk: DiskFaults, tmp_path: Path) -> None:
    rule = disk.move_clock(86400)
    disk.heal(rule)
    disk.move_clock(seconds)
    process = context().Process(target=write_time, args=(tmp_path / "now",))
    process.start()
    process.join()
    assert float((tmp_path / "now").read_text()) == pytest.approx(time.time() + seconds, abs=60)


def test_run_stops_one_grace_period_before_the_wall_clock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(stop_request, "time", SimpleNamespace(monotonic=lambda: now))
    stop = StopRequest(FaultsConfig(wall_clock_limit_minutes=10, stop_grace_seconds=60))
    now += 539
    assert not stop.pending
    now += 2
    assert stop.pending
    assert stop.seconds_left == pytest.approx(59)


def test_folder_for_nccl_flight_recorder_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with patch.dict(os.environ):
        os.environ.pop("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", None)
        watchdog.enable_flight_recorder(tmp_path / "run" / "hangs")
        assert Path(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]).parent.is_dir()


def test_hang_report_of_an_earlier_attempt_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "COLLECT_SECONDS", 0)
    monkeypatch.setattr(logger, "propagate", True)
    old = tmp_path / "step-4-rank-0.txt"
    old.write_text(json.dumps(asdict(watchdog.RankStatus("a.py:1 (b)", "", {}, {}, ""))) + "\n")
    os.utime(old, (0, 0))
    with watchdog.Watchdog(tmp_path, 1, 2, 1000, doing=str) as watch:
        watch._report("step 4")
    assert "rank 0: no report" in caplog.messages[-1]
