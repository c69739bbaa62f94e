"""Broadcast or gather results and errors of Python functions, so that ranks stay in sync.

A file system may show ranks different states at the same time, and may fail on only one rank.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from torchtrain.errors import TorchtrainError

T = TypeVar("T")

ROUND_SECONDS = 1.0  # between exchanges of ``on_all_ranks`` while a rank is busy


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
