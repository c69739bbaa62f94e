"""Commands exit with their code, whatever PyTorch's threads are doing while the interpreter is finalized."""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from forked_command import checked_command, start_command
from forked_run import NO_REPORT
from forkserver import context

ROOT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 120
TRAIN = [
    *("torchtrain.train", "--job.config_file", "train_configs/debug_model.toml", "--training.seq_len", "32"),
    *("--model.shape.dim", "16", "--model.shape.n_layers", "1", "--model.shape.n_heads", "2"),
    *("--model.shape.n_kv_heads", "2", "--model.shape.ffn_dim", "32", "--training.steps", "2"),
    *("--training.local_batch_size", "1", "--metrics.no_enable_tensorboard"),
    *NO_REPORT,
]

# The time limit is reached within the first steps.
STOP = [
    *("--faults.wall_clock_limit_minutes", "1.0001", "--faults.stop_grace_seconds", "60", "--training.steps", "500"),
]


def start_thread_in_torch() -> None:
    """Start a thread that is nearly always in C++ and then needs the GIL, like the threads of a busy gloo group."""

    def wait() -> None:
        while True:
            with suppress(RuntimeError):
                dist.HashStore().wait(["nothing"], timedelta(milliseconds=10))

    threading.Thread(target=wait, daemon=True).start()


def _run_and_finalize(arguments: Sequence[str], hook: Callable[[], object], log: Path) -> None:
    """Run ``python -m arguments`` including the finalization of the interpreter, which other forked tests skip."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    sys.argv[1:] = arguments[1:]
    hook()
    sys.modules.pop(arguments[0], None)
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        ctypes.pythonapi.Py_Exit(error.code)
    except BaseException:
        traceback.print_exc()
        ctypes.pythonapi.Py_Exit(1)


def exit_code(arguments: Sequence[str], log: Path, hook: Callable[[], object] = start_thread_in_torch) -> int | None:
    process = context().Process(target=_run_and_finalize, args=(arguments, hook, log))
    process.start()
    process.join(TIMEOUT_SECONDS)
    process.kill()
    return process.exitcode


def crash() -> None:
    start_thread_in_torch()
    patch("torchtrain.trainer.TrainStep", side_effect=ZeroDivisionError("injected")).start()


@pytest.mark.parametrize(
    ("options", "code", "message", "hook"),
    [
        ([], 0, "done: step 2 of 2", start_thread_in_torch),
        (STOP, 75, "stopped as requested: step ", start_thread_in_torch),
        (["--checkpoint.load_step", "7"], 2, "checkpoint.load_step = 7 cannot be loaded", start_thread_in_torch),
        ([], 1, "ZeroDivisionError: injected", crash),
    ],
    ids=["complete", "stopped", "error", "crash"],
)
def test_thread_that_needs_the_gil_does_not_abort_the_exit_of_a_run(
    tmp_path: Path, options: list[str], code: int, message: str, hook: Callable[[], object]
) -> None:
    log = tmp_path / "log"
    found = exit_code([*TRAIN, "--job.dump_folder", str(tmp_path / "run"), *options], log, hook)
    assert message in log.read_text()
    assert found == code, log.read_text()


def use_the_store_late() -> None:
    """Rank 1 uses the store, which rank 0 hosts, one second after its groups were destroyed."""
    destroy = dist.destroy_process_group

    def destroy_and_use_store(*group: dist.ProcessGroup) -> None:
        store = dist.distributed_c10d._get_default_store()
        destroy(*group)
        if not group:
            time.sleep(1)
            store.set("late", "answer")
            sys.stdout.write(f"the late {store.get('late').decode()}\n")

    if os.environ["RANK"] == "1":
        dist.destroy_process_group = destroy_and_use_store


def test_rank_that_hosts_the_store_exits_last(tmp_path: Path) -> None:
    found = checked_command(*TRAIN, "--job.dump_folder", str(tmp_path), ranks=2, hook=use_the_store_late)
    assert found.stdout == "the late answer\n"
    assert "before the others" not in found.stderr


def die_when_done() -> None:
    from torchtrain import trainer

    if os.environ["RANK"] == "1":
        trainer.destroy_process_group = lambda: os._exit(9)


def test_rank_that_dies_at_the_end_does_not_fail_the_others(tmp_path: Path) -> None:
    options = [*TRAIN, "--job.dump_folder", str(tmp_path / "run")]
    ranks, (_, errors) = start_command(tmp_path, *options, ranks=2, hook=die_when_done)
    for rank in ranks:
        rank.join(TIMEOUT_SECONDS)
    assert [rank.exitcode for rank in ranks] == [0, 9], errors.read_text()
    assert "a rank exited before the other ranks had finished: " in errors.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (2, {}),
        (4, {"data_parallel_replicate_degree": 2}),
        (4, {"tensor_parallel_degree": 2}),
        (4, {"context_parallel_degree": 2}),
        (8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
    ],
)
def test_runs_of_the_shell_launcher_exit_with_their_code(tmp_path: Path, ranks: int, degrees: dict[str, int]) -> None:
    """With the launcher, and a new interpreter for each rank."""
    layout = [word for name, degree in degrees.items() for word in (f"--parallelism.{name}", str(degree))]
    if ranks == 8:
        layout += ["--model.shape.n_layers", "4", "--training.local_batch_size", "2"]
    script, environment = str(ROOT / "run_llama_train.sh"), {**os.environ, "NGPU": str(ranks), "PYTHON": sys.executable}
    for number, (options, code) in enumerate([([], 0)] * 4 + [(STOP, 75)]):
        folder = ["--job.dump_folder", str(tmp_path / str(number))]
        command = [script, *TRAIN[3:], *layout, *options, *folder]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == code, found.stderr


def test_rank_that_loses_another_one_waits_for_the_signal_that_has_ended_it() -> None:
    program = """
import torchtrain.cli
def lose():
    print("lost", flush=True)
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
torchtrain.cli.run_command(lose)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "lost\n"
    process.terminate()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in errors
