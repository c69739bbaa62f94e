"""A fork server that has imported torch. The processes of all tests are forked from it, and can have disk faults."""

import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from unittest.mock import patch

from disk_faults import COMPILER, DiskFaults


class Server:
    """Starts the fork server; ``disk`` is None without a C compiler."""

    def __init__(self, folder: Path) -> None:
        self.disk = DiskFaults(folder) if COMPILER else None
        context().set_forkserver_preload(["preload"])
        environment = self.disk.environment if self.disk else {}
        # Before Python 3.11.9 the server does not inherit sys.path.
        with patch.dict(os.environ, environment | {"PYTHONPATH": os.pathsep.join(sys.path)}):
            forkserver.ensure_running()


def context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


def context_of(options: Sequence[str]) -> BaseContext:
    """Where a run with these options starts processes: CUDA does not work in the fork of a process that has asked for
    the number of GPUs, as the fork server has.
    """
    return multiprocessing.get_context("spawn") if "--job.device=cuda" in options else context()


def free_port() -> int:
    """A free port below the ephemeral range of Linux, so that no other process is assigned it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return port
