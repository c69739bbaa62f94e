"""Requests to stop, by a signal or by the wall-clock limit. Ranks agree on them once a step (``NonFiniteGuard``)."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torchtrain.config.schema import FaultsConfig
from torchtrain.distributed.process_group import all_reduce
from torchtrain.errors import StoppedError
from torchtrain.logging import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One request can arrive twice: from SLURM itself, and passed on by torchrun.
ECHO_SECONDS = 3.0
WARNING_SECONDS = 3600.0  # SLURM's warning comes at most so long before the limit; an earlier SIGUSR1 is none
POLL_SECONDS = 0.2
EXIT_SECONDS = 10.0  # in which all processes of a SLURM job end and it is requeued


class StopRequest:
    """Whether this rank was asked to stop, and by when it must end. A context manager; enter it on the main thread.

    The first SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) is noted, and so is the time ``stop_grace_seconds`` before the
    wall-clock limit. A second signal ends the process at once. Signals are seen while the main thread waits in a
    collective, where Python's own handlers would not run: the interpreter writes their numbers to a socket, which a
    thread reads.
    """

    def __init__(self, config: FaultsConfig) -> None:
        self.config = config
        self.signal_name: str | None = None
        self.agreed = False
        """Whether all ranks know that one of them was asked."""
        self._signal_time, self._grace_end = 0.0, float("inf")
        self._response = "stopping after this step, with %.0f s for a save"
        limit = config.wall_clock_limit_minutes
        self._clock_deadline = time.monotonic() + 60 * limit if limit else float("inf")

    def __enter__(self) -> "StopRequest":
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # Before the handlers, which ignore a signal: none is lost in between.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread

    def _read(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            if received[0] not in SIGNALS:
                continue
            name, now = signal.Signals(received[0]).name, time.monotonic()
            if self.signal_name is None:
                seconds = self._grace_seconds(name)
                self._signal_time, self._grace_end = now, now + seconds
                self.signal_name = name
                logger.warning(f"%s received: {self._response}; a second signal stops at once", name, seconds)
            elif now - self._signal_time > ECHO_SECONDS:
                os._exit(128 + received[0])
        reader.close()

    @contextmanager
    def during_export(self, saved: bool) -> Iterator[None]:
        """A context for the export after the last step, which a request to stop does not break off.

        When the time that the request leaves is over, the process ends with exit code 75, and the next start of the run
        exports. ``saved``: whether that start would find the weights. If not, the export may take as long as it takes.

        Raises:
            StoppedError: the export failed after a request, as it does where other ranks have ended.
        """
        self._response = "completing the export to hf/, for which %.0f s are left"
        ended = threading.Event()
        late = "asked to stop, and the export to hf/ does not end in time: start the run again to export"

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                if self.seconds_left <= 0:
                    logger.warning(late)
                    os._exit(StoppedError().exit_code)

        with self:
            if saved:
                threading.Thread(target=watch, name="export", daemon=True).start()
            try:
                yield
            except RuntimeError as error:
                if saved and self.pending:
                    raise StoppedError(late) from error
                raise
            finally:
                ended.set()

    @property
    def pending(self) -> bool:
        """Whether this rank knows of a reason to stop."""
        return self.signal_name is not None or self.seconds_left <= self.config.stop_grace_seconds

    @property
    def seconds_left(self) -> float:
        """Time until whoever asked is expected to kill the process; infinite where nobody did."""
        return min(self._grace_end, self._clock_deadline) - time.monotonic()

    def _grace_seconds(self, name: str) -> float:
        """Time from the signal ``name`` on until the process is expected to be killed."""
        seconds = float(self.config.stop_grace_seconds)
        end = os.environ.get("SLURM_JOB_END_TIME")  # in seconds since the epoch (train.slurm)
        if name == "SIGUSR1" and end and end.isdecimal():
            left = float(end) - time.time() - EXIT_SECONDS
            seconds = max(seconds, left) if left < WARNING_SECONDS else seconds
        return seconds

    def may_wait(self, began: float) -> bool:
        """Whether to go on waiting for what began at ``began``, by ``time.monotonic()``.

        At least ``stop_grace_seconds`` are allowed from then on, even after the stop's own grace: a process that was
        not killed by then may live longer.
        """
        grace_seconds = self.config.stop_grace_seconds
        return not self.pending or max(self.seconds_left, began + grace_seconds - time.monotonic()) > 0

    def agree(self, group: dist.ProcessGroup | None) -> bool:
        """Whether any rank of ``group`` knows of a reason to stop. Collective; all of them know it then."""
        flag = torch.tensor(float(self.pending))
        all_reduce(flag, group)
        self.agreed = bool(flag > 0)
        return self.agreed
