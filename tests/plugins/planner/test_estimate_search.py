"""A search of torchtrain.estimate on several cores, each layout in a process of its own."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import count
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forkserver import context

from torchtrain.config.parse import parse
from torchtrain.errors import ConfigError
from torchtrain.logging import logger
from torchtrain.plugins.planner import search

OPTIONS = ["--job.config_file", "train_configs/debug_model.toml", "--training.seq_len", "64"]
OPTIONS += ["--model.shape.n_layers", "2", "--training.local_batch_size", "4", "--training.global_batch_size", "8"]
OPTIONS += ["--estimate.world_size", "2", "--estimate.search", "--estimate.search_seconds", "1000"]


def processes_of_search() -> list[Any]:
    return [process for process in multiprocessing.active_children() if isinstance(process, SpawnProcess)]


def searched(monkeypatch: pytest.MonkeyPatch, cores: int, after: Callable[[int], None]) -> search.SearchResult:
    """Search among some small layouts; ``after`` is called after each log line, with the number of lines before."""
    other = context().Process(target=time.sleep, args=(600,), daemon=True)
    other.start()
    for name, value in (("LOCAL_BATCHES", (2,)), ("MODES", ("none",)), ("cores_of_process", lambda: cores)):
        monkeypatch.setattr(search, name, value)
    counter = count()
    handler = logging.Handler()
    handler.emit = lambda _: after(next(counter))  # type: ignore[method-assign]
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        return search.search(parse(OPTIONS), lambda: None)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        assert other.is_alive()  # a search ends only its own processes
        other.kill()
        other.join()
        assert processes_of_search() == []


@pytest.mark.slow
def test_search_on_two_cores_finds_what_it_finds_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    two = searched(monkeypatch, 2, lambda _: processes.append(len(processes_of_search())))
    assert max(processes) == 2
    assert processes[0] == 0  # the first layout may be the only one
    one = searched(monkeypatch, 1, lambda _: None)
    assert len(processes) > 3
    seconds = r"\d+ s of CPU time"
    assert re.sub(seconds, "", two.table) == re.sub(seconds, "", one.table)
    assert (two.best, two.is_complete) == (one.best, one.is_complete) == (one.best, True)


@pytest.mark.slow
def test_search_ends_with_the_best_so_far_if_one_of_its_processes_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(number: int) -> None:
        if number == 1:
            processes_of_search()[0].kill()

    found = searched(monkeypatch, 2, kill)
    assert "skipped because a process of the search was killed, perhaps for lack of memory" in found.table
    assert found.is_complete


def test_error_of_a_search_that_ended_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimates(*_: object) -> Iterator[tuple[int, SimpleNamespace, float]]:
        yield 0, SimpleNamespace(fits=False), 1.0
        raise BrokenProcessPool

    monkeypatch.setattr(search, "estimates_within", estimates)
    monkeypatch.setattr(search, "format_layout", lambda *_: "")
    early = r"none of the 1 most promising of \d+ .*; \d+ others were skipped because a process of"
    with pytest.raises(ConfigError, match=early):
        search.search(parse(OPTIONS), lambda: None)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_a_search_with_one_message(tmp_path: Path) -> None:
    """A terminal sends SIGINT to all processes of the search, whatever they do at that moment."""
    command = [sys.executable, "-m", "torchtrain.estimate", *OPTIONS, "--estimate.output", str(tmp_path / "best.toml")]
    # A background process of a shell script ignores SIGINT, and its children inherit that.
    begin = (
        "import signal, os, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    for lines in (1, 3):  # while the processes start, and while they estimate
        with subprocess.Popen(
            [sys.executable, "-c", begin, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            assert process.stdout is not None
            log = [process.stderr.readline() for _ in range(lines)]
            os.killpg(process.pid, signal.SIGINT)
            table, rest = process.stdout.read(), process.stderr.read()
        assert process.returncode == 130, rest
        assert [line for line in [*log, *rest.splitlines()] if not re.match(r"\S+ layout \d+ of \d+: ", line)] == []
        assert "skipped because of Ctrl-C\n" in table
        assert parse(["--job.config_file", str(tmp_path / "best.toml")])
