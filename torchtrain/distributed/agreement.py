"""Broadcast or gather results and errors of Python functions, so that ranks stay in sync.

A file system may show ranks different states at the same time, and may fail on only one rank.

| | within the timeout of collectives | however long it takes, in a thread |
| --- | --- | --- |
| on rank 0, its result for all | ``broadcast_from_rank0`` | ``on_rank0`` |
| on each rank | ``gather_from_all_ranks``: the results of all | ``on_all_ranks``: its own result |

The functions in the middle expect no other errors than TorchtrainErrors: with another one, the other ranks wait until
their timeout. Those on the right raise any error of one rank on all.
"""

import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from torchtrain.errors import StorageError, TorchtrainError

T = TypeVar("T")

ROUND_SECONDS = 1.0  # between exchanges of ``on_all_ranks`` while a rank is busy
STORE_WAIT_SECONDS = 3600.0  # for a result of rank 0 through a store; its requests to other services may be retried
STORE_POLL_SECONDS = 1.0
ERROR_READ_SECONDS = 10.0  # for which rank 0, which may host the store, waits until all ranks have read its error


class Request(Protocol):
    """A request of any rank for an action of all ranks after the step, such as a save when its interval has passed."""

    agreed: bool
    """Whether any rank has made the request; identical on all ranks."""

    @property
    def pending(self) -> bool:
        """Whether this rank makes the request."""


def broadcast_from_rank0(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``function`` on rank 0 and broadcast its result; a TorchtrainError is raised on all ranks. Collective."""
    results = [_result_or_error(function) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(results, group=group, group_src=0)
    return _unwrap(results[0])


def gather_from_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``function`` on each rank and gather the results by rank. Collective.

    A TorchtrainError of any rank is raised on all ranks.
    """
    results: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(results, _result_or_error(function), group=group)
    return [_unwrap(result) for result in results]


def on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call ``function`` on each rank, and return the result of this rank. Collective.

    It may take longer than the timeout of collectives. An error of one rank is raised on all ranks: every
    ``ROUND_SECONDS`` the ranks exchange which of them have failed, so that none waits for a rank that has failed, and
    rank 0 can report the error. ``function`` runs in a thread.

    Raises:
        TorchtrainError: on all ranks. If only some have failed, the message names the first of them and its host.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a daemon: Ctrl-C does not wait for it
    states: list[tuple[bool, _Failure | None]] = [(False, None)] * dist.get_world_size(group)
    while not all(is_done for is_done, _ in states):
        is_done = bool(wait([future], ROUND_SECONDS).done)
        error = future.exception() if is_done else None
        dist.all_gather_object(states, (is_done, error and _Failure.of(error)), group=group)
        _raise_failure([failure for _, failure in states], error)
    return future.result()


def on_rank0(function: Callable[[], T], group: dist.ProcessGroup) -> T:
    """``broadcast_from_rank0`` for a function that may take longer than the timeout, as in ``on_all_ranks``."""
    result = on_all_ranks(lambda: _result_or_error(function) if dist.get_rank(group) == 0 else None, group)
    return broadcast_from_rank0(lambda: _unwrap(result), group)


def broadcast_through_store(function: Callable[[], T], store: Any, key: str, rank: int, world_size: int) -> T:
    """``broadcast_from_rank0`` before process-group initialization. Use each ``key`` once. Collective.

    ``function`` may take longer than the timeout of the store.

    Args:
        store: the store of the rendezvous.

    Raises:
        TorchtrainError: on all ranks, if ``function`` fails.
        StorageError: rank 0 has ended, or has no result after ``STORE_WAIT_SECONDS``.
    """
    own: Exception | None = None
    result: Any = None
    failure: _Failure | None = None
    if rank == 0:
        try:
            result = function()
        except Exception as error:
            own, failure = error, _Failure.of(error)
        store.set(key, pickle.dumps((result, failure)))
        if failure is not None and world_size > 1:
            with suppress(dist.DistError):  # another rank has ended
                store.wait([f"{key}: error was read"], timedelta(seconds=ERROR_READ_SECONDS))
    else:
        try:
            result, failure = pickle.loads(_wait_for_key(store, key))
            if failure is not None and store.add(f"{key}: readers", 1) == world_size - 1:
                store.set(f"{key}: error was read", "")
        except dist.DistError as error:
            raise StorageError(f"rank 0 cannot be reached: {str(error).splitlines()[0]}") from None
    _raise_failure([failure], own)
    return cast(T, result)


def _wait_for_key(store: Any, key: str) -> bytes:
    # Not store.wait, which Ctrl-C does not interrupt, and which logs a warning after each timeout.
    began, pause = time.monotonic(), STORE_POLL_SECONDS / 64
    while not store.check([key]):
        if time.monotonic() - began > STORE_WAIT_SECONDS:
            raise StorageError(f"rank 0 has sent no result for {STORE_WAIT_SECONDS:g} s")
        time.sleep(pause)
        pause = min(2 * pause, STORE_POLL_SECONDS)
    return bytes(store.get(key))


@dataclass(frozen=True)
class _Failure:
    """An error of a rank, in the form that ranks exchange."""

    kind: type[TorchtrainError]
    message: str
    exit_code: int
    host: str

    @staticmethod
    def of(error: BaseException) -> "_Failure":
        if isinstance(error, TorchtrainError):
            return _Failure(type(error), str(error), error.exit_code, socket.gethostname())
        return _Failure(TorchtrainError, repr(error), TorchtrainError.exit_code, socket.gethostname())


def _raise_failure(failures: Sequence[_Failure | None], own: BaseException | None) -> None:
    """Raise the first of ``failures``, which are indexed by rank, if there is one. ``own``: the error of this rank.

    An error that is not a TorchtrainError is raised unchanged on its own rank, because its traceback matters.
    """
    if own is not None and not isinstance(own, TorchtrainError):
        raise own
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if not failed:
        return
    rank, first = failed[0]
    message = first.message
    if len(failed) < len(failures) or any(failure.message != message for _, failure in failed):
        others = f" ({len(failed)} of {len(failures)} ranks have failed)" if len(failed) > 1 else ""
        message = f"rank {rank} on host {first.host}: {message}{others}"
    error = first.kind(message)
    error.exit_code = first.exit_code
    raise error from own


def _result_or_error(function: Callable[[], T]) -> T | TorchtrainError:
    try:
        return function()
    except TorchtrainError as error:
        return error


def _unwrap(result: T | TorchtrainError | None) -> T:
    """Return a result of ``_result_or_error``, or raise it if it is an error."""
    if isinstance(result, TorchtrainError):
        raise result
    return result  # type: ignore[return-value]
