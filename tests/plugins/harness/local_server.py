"""Wait for a server that a test starts as a process of its own."""

import socket
import subprocess
import time
from pathlib import Path

START_SECONDS = 60


def wait_until_it_listens(process: "subprocess.Popen[bytes]", port: int, log: Path | None = None) -> None:
    """Return when ``process`` accepts connections; AssertionError, with its ``log``, if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            output = log.read_text() if log else ""
            assert time.monotonic() < deadline, output
            assert process.poll() is None, output
            time.sleep(0.1)
