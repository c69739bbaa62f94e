"""A pseudo-terminal that a forked process writes its log to, and what it shows."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Mapping
from functools import partial


def use_terminal(path: str, environment: Mapping[str, str]) -> None:
    """A hook of a forked process: its standard error becomes the terminal ``path``, with variables of a terminal."""
    os.dup2(os.open(path, os.O_RDWR | os.O_NOCTTY), 2)
    for name in ("TERM", "NO_COLOR", "CI"):
        os.environ.pop(name, None)
    os.environ.update(environment)


def use_terminal_for_all(path: str, environment: Mapping[str, str]) -> None:
    """As ``use_terminal``, and standard output becomes the terminal, too."""
    use_terminal(path, environment)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)


class Terminal:
    """A terminal of ``columns``; pass ``hook`` to the process, and call ``close`` when it has ended.

    ``hook_of_all`` is for a command, which writes its results to standard output.

    ``variables``: those of the environment that change what a terminal shows, such as ``NO_COLOR``.
    """

    def __init__(self, columns: int, **variables: str) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {"TERM": "xterm-256color", **variables}
        self.hook: Callable[[], None] = partial(use_terminal, os.ttyname(self.slave), environment)
        self.hook_of_all: Callable[[], None] = partial(use_terminal_for_all, os.ttyname(self.slave), environment)
        self._content = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self.master, 1 << 16)
            except OSError:  # Linux: all writers have closed the terminal
                return
            if not piece:
                return
            self._content += piece

    def close(self) -> str:
        """Close the terminal; returns its text without colors."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.close_raw())

    def close_raw(self) -> str:
        """Close the terminal; returns its text with escape sequences."""
        os.close(self.slave)
        self._thread.join(timeout=30)
        os.close(self.master)
        return self._content.decode().replace("\r\n", "\n")
