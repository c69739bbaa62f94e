"""Requests to stop: signals and the wall-clock limit. Ranks agree on them once per step (``StepCheck``)."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from torchtrain.distributed.process_group import all_reduce
from torchtrain.environment import LOST_CONNECTION
from torchtrain.errors import HangError, StoppedError
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.logging import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# The same request can arrive twice: from SLURM directly, and forwarded by torchrun.
DUPLICATE_SECONDS = 3.0
WARNING_SECONDS = 3600.0  # a SIGUSR1 earlier than this before SLURM's time limit is not SLURM's warning
POLL_SECONDS = 0.2
EXIT_SECONDS = 10.0  # for all processes of a SLURM job to exit, and for the job to be requeued


def _is_stopped_by_hangup() -> bool:
    """Whether SIGHUP, as when a terminal is closed, stops this rank; not where nohup protects the run.

    A rank of torchrun is in a session of its own: a SIGHUP there comes from torchrun, which kills the rank after it.
    """
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or "TORCHELASTIC_RUN_ID" in os.environ


class StopRequest:
    """Whether this rank was asked to stop, and when it must exit. A context manager, entered on the main thread.

    The wall-clock limit counts from the construction. Signals are handled from the first entry to the last exit;
    entries may be nested, because a run in stages has one request for all its trainers. So a signal between two stages
    is not lost.

    The first SIGTERM, SIGUSR1, SIGHUP or SIGINT (Ctrl-C) is a request to stop, and so is the time
    ``stop_grace_seconds`` before the wall-clock limit. A second signal ends the process immediately.

    Signals are handled even while the main thread waits in a collective, where Python does not run signal handlers: the
    interpreter writes the number of each signal to a socket (``signal.set_wakeup_fd``), which a thread reads.
    """

    def __init__(self, config: FaultsConfig) -> None:
        self.config = config
        self.signal_name: str | None = None
        self.agreed = False
        """Whether any rank was asked to stop; identical on all ranks."""
        self._signal_time, self._grace_end = 0.0, float("inf")
        self._response = "stopping before the next step, with %.0f s for a save"
        self._entries = 0
        limit = config.wall_clock_limit_minutes
        self._clock_deadline = time.monotonic() + 60 * limit if limit else float("inf")

    def __enter__(self) -> "StopRequest":
        self._entries += 1
        if self._entries > 1:
            return self
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._signals = (*SIGNALS, signal.SIGHUP) if _is_stopped_by_hangup() else SIGNALS
        # Set before the handlers, which do nothing, so that no signal is lost in between.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in self._signals}
        threading.Thread(target=self._read, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._entries -= 1
        if self._entries:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()  # ends the thread

    def _read(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            if received[0] not in self._signals:
                continue
            name, now = signal.Signals(received[0]).name, time.monotonic()
            if self.signal_name is None:
                seconds = self._grace_seconds(name)
                self._signal_time, self._grace_end = now, now + seconds
                self.signal_name = name
                logger.warning(f"%s received: {self._response}; a second signal stops immediately", name, seconds)
            elif now - self._signal_time > DUPLICATE_SECONDS:
                os._exit(128 + received[0])
        reader.close()

    @contextmanager
    def during_export(self, saved: bool) -> Iterator[None]:
        """A context manager for the export after the last step, which a request to stop does not abort.

        When the grace period of the request is over, the process exits with code 75, and the next start of the run
        exports.

        Args:
            saved: whether a checkpoint contains the weights, so that the next start can export them. If not, the export
                has no time limit.

        Raises:
            StoppedError: the export failed after a request to stop, for example because other ranks have exited.
        """
        self._response = "completing the export to hf/, for which %.0f s are left"
        ended = threading.Event()
        late = "asked to stop, and the export to hf/ exceeds the grace period: start the run again to export"

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
                if saved and (self.pending or self.agreed):
                    raise StoppedError(late) from error
                raise
            finally:
                ended.set()

    @contextmanager
    def explaining_lost_ranks(self) -> Iterator[None]:
        """A context manager for training: after a request to stop, a rank may leave while others wait for it.

        Raises:
            StoppedError: a collective has failed since another rank has left, and the run was asked to stop.
        """
        try:
            yield
        except (RuntimeError, HangError) as error:
            lost = LOST_CONNECTION.search(str(error.__cause__ if isinstance(error, HangError) else error))
            if lost and (self.pending or self.agreed):
                raise StoppedError("asked to stop, and another rank has left before this one") from error
            raise

    @property
    def pending(self) -> bool:
        """Whether this rank was asked to stop, or is about to reach the wall-clock limit."""
        return self.signal_name is not None or self.seconds_left <= self.config.stop_grace_seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the process is expected to be killed; infinite without a request or a wall-clock limit."""
        return min(self._grace_end, self._clock_deadline) - time.monotonic()

    def _grace_seconds(self, name: str) -> float:
        """Time between the signal ``name`` and the kill that is expected to follow it."""
        seconds = float(self.config.stop_grace_seconds)
        end = os.environ.get("SLURM_JOB_END_TIME")  # in seconds since the epoch (train.slurm)
        if name == "SIGUSR1" and end and end.isdecimal():
            left = float(end) - time.time() - EXIT_SECONDS
            seconds = max(seconds, left) if left < WARNING_SECONDS else seconds
        return seconds

    def may_wait(self, began: float) -> bool:
        """Whether to keep waiting for an operation that began at ``began``, in seconds of ``time.monotonic()``.

        An operation may take at least ``stop_grace_seconds``, even if the grace period of the request is over: a
        process that has not been killed by then may not be killed at all.
        """
        grace_seconds = self.config.stop_grace_seconds
        return not self.pending or max(self.seconds_left, began + grace_seconds - time.monotonic()) > 0

    def agree(self, group: dist.ProcessGroup | None) -> bool:
        """Whether ``pending`` is true on any rank of ``group``; sets ``agreed`` on all of them. Collective."""
        flag = torch.tensor(float(self.pending))
        all_reduce(flag, group)
        self.agreed = bool(flag > 0)
        return self.agreed
