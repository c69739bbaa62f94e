"""A pseudo-terminal that a forked process writes its log to, and what it shows."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Callable
from functools import partial


def use_terminal(path: str) -> None:
    """A hook of a forked process: its standard error becomes the terminal ``path``."""
    os.dup2(os.open(path, os.O_RDWR | os.O_NOCTTY), 2)


class Terminal:
    """A terminal of ``columns``; pass ``hook`` to the process, and call ``close`` when it has ended."""

    def __init__(self, columns: int) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.hook: Callable[[], None] = partial(use_terminal, os.ttyname(self.slave))
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
        os.close(self.slave)
        self._thread.join(timeout=30)
        os.close(self.master)
        return re.sub(r"\x1b\[[0-9;]*m", "", self._content.decode().replace("\r\n", "\n"))
