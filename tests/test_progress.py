"""Progress of what takes more than ten seconds, in a terminal and in a log."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_log import captured_log

from torchtrain import progress
from torchtrain.datasets.local_files import identify
from torchtrain.logging import logger


@pytest.fixture(autouse=True)
def shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", -1)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(progress, "terminal_width", lambda: None)
    with captured_log() as messages:
        yield messages


def test_log_has_a_line_for_each_part_and_no_bar(lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.progress([("a", 1_500_000), ("b", 500_000)], "hashing", 2_000_000)) == ["a", "b"]
    assert [line.partition(",")[0] for line in lines] == [f"hashing: {n}% of 2.00MB" for n in (0, 75, 100)]
    assert capsys.readouterr().err == ""


def test_amount_without_a_total(lines: list[str]) -> None:
    with progress.ProgressBar("reading data.path = 'a/{2024}.txt'", None) as bar:
        bar.update(3_000_000)
    assert lines[-1].startswith("reading data.path = 'a/{2024}.txt': 3.00MB, ")


def test_terminal_has_a_bar_that_disappears(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(progress, "terminal_width", lambda: 80)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    list(progress.progress([("a", 3), ("b", 1)], "hashing", 4))
    assert re.search(r"hashing: 0% of 4.00B\\|", screen.getvalue())
    assert screen.getvalue().rpartition("\r")[2].strip() == ""
    assert lines == []


def test_nothing_is_shown_before_ten_seconds_or_by_other_ranks(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(progress, "DELAY_SECONDS", 10)
    list(progress.progress([("a", 1)], "hashing", 1))
    monkeypatch.setattr(progress, "DELAY_SECONDS", -1)
    logger.setLevel(logging.ERROR)  # as init_logging does
    list(progress.progress([("a", 1)], "hashing", 1))
    assert lines == []


def test_hashing_counts_the_bytes_that_are_read(tmp_path: Path, lines: list[str]) -> None:
    for name, size in (("a.txt", 3 << 20), ("b.txt", 1 << 20)):
        (tmp_path / name).write_bytes(b"x" * size)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    identify(files, verify_bytes=0)  # of files above 1 MiB, only parts are read
    assert lines[-1].startswith("hashing the data: 100% of 1.25MB")
    identify(files, whole=True)
    assert lines[-1].startswith("hashing the data: 100% of 4.19MB")
