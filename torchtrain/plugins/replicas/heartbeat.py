"""The heartbeat of a replica, which stops when others have waited too long for it in a step.

That of torchft continues for as long as the process lives, and the lighthouse waits for each replica with a heartbeat.
"""

import threading
import time
from contextlib import suppress
from typing import Any

INTERVAL_SECONDS = 0.1
POLL_SECONDS = 0.25
DISCARDED, TIMED_OUT = "discarded", "timed out"  # keys in the store of a quorum


class Heartbeat:
    """Tells the lighthouse that this replica lives, unless it hangs in a step.

    A replica cannot know by itself whether it is slow or hangs. The others know: they have waited for it in a
    collective for ``limit_seconds``. They say so in the store of the quorum, which is read in a thread.

    Args:
        client: a torchft client of the lighthouse.
        replica: the id of this replica there.
        limit_seconds: ``replicas.collective_timeout_seconds``.
    """

    def __init__(self, client: Any, replica: str, limit_seconds: float) -> None:
        self._client, self._replica, self._limit_seconds = client, replica, limit_seconds
        self._quorum: _Quorum | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._send, name="replica_heartbeat", daemon=True).start()

    def begin_step(self, store: Any) -> None:
        """Others may wait for this replica from now on.

        Args:
            store: that of the current quorum.
        """
        if self._quorum is None or self._quorum.store is not store:
            self._forget_quorum()
            self._quorum = _Quorum(store, self._limit_seconds)
        self._quorum.begin_step()

    def end_step(self) -> None:
        """This replica has done its part of the step, or gives it up."""
        if self._quorum is not None:
            self._quorum.end_step()

    def notice_failure(self) -> None:
        """This replica knows that the step will be discarded."""
        if self._quorum is not None:
            self._quorum.has_failed = True

    def discard_step(self, timed_out: bool) -> None:
        """Tell the others that this replica has discarded the step, and asks for another quorum.

        Args:
            timed_out: whether it has waited for one of them for ``limit_seconds``.
        """
        self._forget_quorum(TIMED_OUT if timed_out else DISCARDED)

    def close(self) -> None:
        """Stop: this replica leaves."""
        self._closed.set()
        self._forget_quorum()

    def _forget_quorum(self, message: str | None = None) -> None:
        if self._quorum is not None:
            self._quorum.end(message)
        self._quorum = None

    def _send(self) -> None:
        while not self._closed.is_set():
            quorum = self._quorum
            if quorum is None or not quorum.is_late:
                # A lighthouse that does not answer is an error of the next request for a quorum.
                with suppress(Exception):
                    self._client.heartbeat(self._replica)
            self._closed.wait(INTERVAL_SECONDS)


class _Quorum:
    """Reads and writes what the members of a quorum say about its end, in a thread: the machine with the store may be
    lost, so that an access does not return."""

    def __init__(self, store: Any, limit_seconds: float) -> None:
        self.store, self._limit_seconds = store, limit_seconds
        self.has_failed = False
        self._steps = 0
        self._in_step = False
        self._late_in = 0  # step
        self._message: str | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="replica_quorum", daemon=True).start()

    @property
    def is_late(self) -> bool:
        """Whether others no longer wait for this replica, which is still in the step."""
        return self._in_step and self._late_in == self._steps

    def begin_step(self) -> None:
        self._steps += 1
        self._in_step, self.has_failed = True, False

    def end_step(self) -> None:
        self._in_step = False

    def end(self, message: str | None) -> None:
        self._message = message
        self._ended.set()

    def _run(self) -> None:
        found: dict[str, float] = {}
        with suppress(RuntimeError):  # the replica with the store has died
            while not self._ended.wait(POLL_SECONDS):
                step = self._steps
                for key in (DISCARDED, TIMED_OUT):
                    if key not in found and self.store.check([key]):
                        found[key] = time.monotonic()
                # One that knows of the discarded step has all the time that a slow replica has. Of one that does not,
                # this time has passed when others have timed out.
                has_timed_out = TIMED_OUT in found and not self.has_failed
                if found and (has_timed_out or time.monotonic() - min(found.values()) > self._limit_seconds):
                    self._late_in = step
            if self._message is not None:
                self.store.set(self._message, "")
