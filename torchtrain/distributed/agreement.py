"""Broadcast or gather results and errors of Python functions, so that ranks stay in sync.

A file system may show ranks different states at the same time, and may fail on only one rank.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from torchtrain.errors import TorchtrainError

T = TypeVar("T")

ROUND_SECONDS = 1.0  # between broadcasts while there is no answer yet


def broadcast_from_rank0(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``ask()`` on rank 0 and broadcast the result. A TorchtrainError of it is raised on all ranks. Collective."""
    answers = [_answer(ask) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(answers, group=group, group_src=0)
    return _value(answers[0])


def broadcast_from_rank0_untimed(ask: Callable[[], T]) -> T:
    """``broadcast_from_rank0`` for an ``ask()`` that may take longer than the timeout of collectives."""
    future: Future[Any] = Future()

    def answer() -> None:
        try:
            future.set_result(_answer(ask))
        except BaseException as error:
            future.set_exception(error)

    is_first = dist.get_rank() == 0
    if is_first:
        threading.Thread(target=answer, daemon=True).start()  # a daemon: Ctrl-C does not wait for it
    done_and_answer: list[Any] = [False, None]
    while not done_and_answer[0]:
        if is_first and wait([future], ROUND_SECONDS).done:
            done_and_answer = [True, future.result()]
        dist.broadcast_object_list(done_and_answer)
    value: T = _value(done_and_answer[1])
    return value


def gather_from_all_ranks(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``ask()`` on each rank and gather the results. A TorchtrainError of any is raised on all. Collective."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, _answer(ask), group=group)
    return [_value(answer) for answer in answers]


def _answer(ask: Callable[[], T]) -> T | TorchtrainError:
    try:
        return ask()
    except TorchtrainError as error:
        return error


def _value(answer: T | TorchtrainError | None) -> T:
    if isinstance(answer, TorchtrainError):
        raise answer
    return answer  # type: ignore[return-value]
