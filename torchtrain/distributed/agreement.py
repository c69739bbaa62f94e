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


def broadcast_from_rank0(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``ask()`` on rank 0 and broadcast the result. A TorchtrainError of it is raised on all ranks. Collective."""
    answers = [_answer(ask) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(answers, group=group, group_src=0)
    return _value(answers[0])


def gather_from_all_ranks(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``ask()`` on each rank and gather the results. A TorchtrainError of any is raised on all. Collective."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, _answer(ask), group=group)
    return [_value(answer) for answer in answers]


def on_all_ranks(call: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Run ``call()`` on each rank; returns the result of this rank. It may take longer than the timeout. Collective.

    An error of one rank ends all: while ranks are busy, they exchange every ``ROUND_SECONDS`` who has failed. So the
    other ranks do not wait for a rank that has failed, and rank 0 can report its error. ``call`` runs in a thread.

    Raises:
        TorchtrainError: on all ranks. If only some have failed, the message names the first of them and its host.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
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


def on_rank0(call: Callable[[], T], group: dist.ProcessGroup) -> T:
    """``broadcast_from_rank0`` of a ``call()`` that may take longer than the timeout, as in ``on_all_ranks``."""
    answer = on_all_ranks(lambda: _answer(call) if dist.get_rank(group) == 0 else None, group)
    return broadcast_from_rank0(lambda: _value(answer), group)


@dataclass(frozen=True)
class _Failure:
    """An error, as ranks send it to each other."""

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
    """Raise the first of ``failures``, which are those of all ranks, if there is one. ``own``: the error of this rank.

    An error that is no TorchtrainError, whose traceback matters, is raised as it is on its own rank.
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


def _answer(ask: Callable[[], T]) -> T | TorchtrainError:
    try:
        return ask()
    except TorchtrainError as error:
        return error


def _value(answer: T | TorchtrainError | None) -> T:
    if isinstance(answer, TorchtrainError):
        raise answer
    return answer  # type: ignore[return-value]
