"""One server with torch loaded, from which the processes of all tests are forked; their disk can be made to fail."""

import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

from disk_faults import COMPILER, DiskFaults


class Server:
    """Started once; ``disk`` is None where there is no C compiler."""

    def __init__(self, folder: Path) -> None:
        self.disk = DiskFaults(folder) if COMPILER else None
        context().set_forkserver_preload(["preload"])
        environment = self.disk.environment if self.disk else {}
        # Before Python 3.11.9 the server does not take over sys.path.
        with patch.dict(os.environ, environment | {"PYTHONPATH": os.pathsep.join(sys.path)}):
            forkserver.ensure_running()


def context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port
