"""Signals to the whole process group at random moments of each command: a documented code, no traceback, no process."""

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from forked_command import run_command

from torchtrain.datasets import tokenizers

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TEXTS = 4000
COMMANDS = {
    "prepare": ["--data.path", "{}/texts.jsonl", "--prepare.output", "{}/out", "--prepare.processes", "8"],
    "train": ["--job.config_file", "train_configs/debug_model.toml", "--training.steps", "10"],
    "launch": ["--nproc-per-node", "2", "-m", "torchtrain.train"],
}
COMMANDS["train"] += ["--job.dump_folder", "{}/run"]
COMMANDS["launch"] += COMMANDS["train"]  # which leaves SIGUSR1 to the ranks, which are in sessions of their own
SECONDS = {"prepare": 2.0, "train": 12.0, "launch": 15.0}
END_SECONDS = 200  # for two steps and a save beside other load


def processes_of(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                state, _, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(owner) == group and state != "Z":
                found.append(int(folder.name))
    return found


def interrupt(module: str, words: list[str], number: int, seconds: float) -> tuple[int, str]:
    """Start a command, send a signal to its process group after ``seconds``; returns its exit code and its log."""
    command = [sys.executable, "-X", "faulthandler", "-m", f"torchtrain.{module}", *words]
    # A job in the background of a shell ignores SIGINT, and so do its children.
    handle_ctrl_c = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, start_new_session=True, preexec_fn=handle_ctrl_c)
    try:
        time.sleep(seconds)
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            _, log = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # writes the stacks of all threads
            _, log = process.communicate(timeout=END_SECONDS)
            raise AssertionError(f"the command continues after signal {number} at {seconds} s:\n{log}") from None
        deadline = time.monotonic() + 5
        while processes_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_of(process.pid), log
    finally:
        process.kill()
    return process.returncode, log


def check(module: str, words: list[str], random_numbers: random.Random, most_seconds: float) -> None:
    """Send a random signal to a command, at most ``most_seconds`` after its start."""
    number = random_numbers.choice(SIGNALS)
    seconds = random_numbers.uniform(0.05, most_seconds)
    code, log = interrupt(module, words, number, seconds)
    if number == signal.SIGINT and "KeyboardInterrupt" in log and "torchtrain" not in log:
        return  # on a slow machine Python itself had not started, and ends with 1 or a traceback of its own
    # Before the command handles signals they end it; a training run stops in its own way, with 75.
    assert code in (0, 75, 128 + number, -number), (number, seconds, code, log)
    assert "Traceback" not in log, (number, seconds, log)
    assert "out of memory" not in log
    if module == "prepare" and code > 0:
        assert "run the same command again to resume" in log, (number, seconds, log)


def write_texts(folder: Path) -> None:
    words = [f"word{number}" for number in range(500)]
    generator = random.Random(0)
    texts = (" ".join(generator.choices(words, k=300)) for _ in range(TEXTS))
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_prepare_is_interrupted_and_resumed(tmp_path: Path, seed: int) -> None:
    write_texts(tmp_path)
    words = [word.replace("{}", str(tmp_path)) for word in COMMANDS["prepare"]]
    check("prepare", words, random.Random(seed), SECONDS["prepare"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", COMMANDS)
def test_fifty_signals_at_random_moments(module: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    generator = random.Random(module)
    for count in range(50):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "texts.jsonl").symlink_to(tmp_path / "texts.jsonl")
        words = [word.replace("{}", str(folder)) for word in COMMANDS[module]]
        check(module, words, generator, SECONDS[module])


HIDING = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""


def interrupt_import(folder: Path) -> None:
    """SIGINT arrives in an import that hides the exception, as that of torch does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell started the tests in the background
    (folder / "hiding.py").write_text(HIDING)
    sys.path.insert(0, str(folder))
    tokenizers.load_tokenizer = lambda _: import_module("hiding")  # type: ignore[assignment]


def test_interrupt_in_an_import_that_hides_it_ends_the_command(tmp_path: Path) -> None:
    write_texts(tmp_path)
    words = [word.replace("{}", str(tmp_path)) for word in COMMANDS["prepare"]]
    result = run_command("torchtrain.prepare", *words, hook=partial(interrupt_import, tmp_path))
    assert result.returncode == -signal.SIGINT, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("stopped by Ctrl-C") == 1
