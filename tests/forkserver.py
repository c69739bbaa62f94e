"""One server with torch loaded, from which the processes of all tests are forked; their disk can be made to fail."""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

from disk_faults import COMPILER, DiskFaults

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torchtrain.build", "torchtrain.train_step"]


class Server:
    """Started once; ``disk`` is None where there is no C compiler."""

    def __init__(self, folder: Path) -> None:
        self.disk = DiskFaults(folder) if COMPILER else None
        context().set_forkserver_preload(PRELOAD)
        with patch.dict(os.environ, self.disk.environment if self.disk else {}):
            forkserver.ensure_running()


def context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")
