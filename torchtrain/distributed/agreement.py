"""Sharing answers and errors between ranks, so that all go on alike, or end alike.

Needed because a file system may show ranks different things at one time, and may fail for one rank alone.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch.distributed as dist

from torchtrain.errors import TorchtrainError

T = TypeVar("T")

ROUND_SECONDS = 1.0  # between broadcasts while the answer is not there yet


def of_first_rank(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``ask()`` gives on the first rank, on all ranks. A TorchtrainError there is raised on all. Collective."""
    answers = [_outcome(ask) if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(answers, group=group, group_src=0)
    assert answers[0] is not None
    return _value(answers[0])


def of_first_rank_in_its_time(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """As ``of_first_rank``, where ``ask()`` may take longer than the time-out of ``group``."""
    first = dist.get_rank(group) == 0
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(_outcome, ask) if first else None
        answers: list[tuple[T | None, TorchtrainError | None] | None] = [None]
        while answers[0] is None:
            if future is not None:
                answers = [future.result() if wait([future], ROUND_SECONDS).done else None]
            dist.broadcast_object_list(answers, group=group, group_src=0)
    return _value(answers[0])


def of_all_ranks(ask: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What ``ask()`` gives on each rank. A TorchtrainError of any of them is raised on all. Collective."""
    outcomes: list[tuple[T | None, TorchtrainError | None]] = [(None, None)] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, _outcome(ask), group=group)
    # Any error counts, whatever the other ranks found.
    for outcome in sorted(outcomes, key=lambda outcome: outcome[1] is None):
        _value(outcome)
    return [_value(outcome) for outcome in outcomes]


def _outcome(ask: Callable[[], T]) -> tuple[T | None, TorchtrainError | None]:
    try:
        return ask(), None
    except TorchtrainError as error:
        return None, error


def _value(outcome: tuple[T | None, TorchtrainError | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
