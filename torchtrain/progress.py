"""Progress of work that takes more than ten seconds: a bar in a terminal, otherwise a line in the log each minute."""

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from tqdm import tqdm

from torchtrain.logging import is_dumb_terminal, logger, terminal_width

T = TypeVar("T")

DELAY_SECONDS = 10
SECONDS_PER_LINE = 60


class Stderr:
    """stderr, whose errors are suppressed, so that a closed terminal does not end the work."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class ProgressBar(tqdm):  # type: ignore[misc]
    """A bar for ``total`` bytes, or only their number and rate if the total is None; ``update`` counts some.

    ``set_postfix_str`` adds words to it. It is shown by processes whose log has messages, so by one rank of a run, and
    disappears at the end.
    """

    monitor_interval = 0  # without tqdm's thread

    def __init__(self, what: str, total: int | None) -> None:
        self._has_terminal = terminal_width() is not None and not is_dumb_terminal()
        amount = "{percentage:.0f}% of {total_fmt}B" if total else "{n_fmt}B"
        left = ", {remaining} left" if total else ""
        bar = "|{bar}|" if self._has_terminal and total else ""
        what = what.replace("{", "{{").replace("}", "}}")  # the name of a file may have braces
        super().__init__(
            total=total,
            bar_format=f"{what}: {amount}{bar}, {{rate_fmt}}{left}{{postfix}}",
            unit="B",
            unit_scale=True,
            delay=DELAY_SECONDS,
            mininterval=0.1 if self._has_terminal else SECONDS_PER_LINE,
            miniters=1,
            dynamic_ncols=True,
            leave=False,
            file=Stderr(),
            disable=not logger.isEnabledFor(logging.INFO),
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self._has_terminal:
            super().display(msg, pos)
        elif msg is None:  # otherwise the bar is removed
            logger.info("%s", self)


ProgressBar.set_lock(threading.RLock())  # by default one for several processes


def progress(items: Iterable[tuple[T, int]], what: str, total: int | None) -> Iterator[T]:
    """The ``items``, given with their sizes in bytes; shows how many bytes of ``total`` are done."""
    with ProgressBar(what, total) as bar:
        for item, size in items:
            yield item
            bar.update(size)
