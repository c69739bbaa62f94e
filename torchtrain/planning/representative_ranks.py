"""Ranks in the middle of a pipeline, whose stages do what those of another rank do, in an order of their own.

The rank that is rehearsed in the place of others is the first of its kind: it has the most microbatches under way, so
none of the others needs more memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torchtrain.parallelisms.pipeline_llama import Pipeline
from torchtrain.planning.ledger import Action, StepRecord
from torchtrain.planning.operations import Operation

COMPUTES = ("FORWARD", "FULL_BACKWARD")
# What is said to or heard from the rank of the next stage, or else of the stage before: (operation, next). Messages are
# all alike: as actions they have 0 and 0.
MESSAGES = {
    "SEND_F": ("send", True),
    "RECV_F": ("recv", False),
    "SEND_B": ("send", False),
    "RECV_B": ("recv", True),
}


def first_of_each_kind(stages: Sequence[int], ranks: int, schedule: str) -> list[int]:
    """For each rank of a pipeline, the one that is rehearsed in its place, or itself.

    ``stages``: their numbers of layers. The ends have an embedding or an output, and so do not stand for others.
    """
    firsts: dict[tuple[int, ...], int] = {}
    known = schedule in ("1F1B", "Interleaved1F1B")
    return [
        firsts.setdefault(tuple(stages[rank::ranks]), rank) if known and 0 < rank < ranks - 1 else rank
        for rank in range(ranks)
    ]


def orders_of(pipeline: Pipeline | None, count: int) -> Mapping[int, Sequence[Action]]:
    """By rank of the pipeline, what it does in one run of ``count`` microbatches."""
    if pipeline is None:
        return {}
    ranks, table = pipeline.mesh.size(), getattr(pipeline.schedule, "pipeline_order_with_comms", None)
    if table is None:
        return {rank: one_forward_one_backward(rank, ranks, count) for rank in range(ranks)}
    return {
        rank: [
            (name, 0, 0) if name in MESSAGES else (name, action.stage_index // ranks, action.microbatch_index)
            for action in actions
            if (name := action.computation_type.name) in (*COMPUTES, *MESSAGES)
        ]
        for rank, actions in table.items()
    }


def one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Action]:
    """As ``Schedule1F1B`` does it on a rank that is at neither end, for ``count`` microbatches."""
    ahead = min(count, ranks - rank)  # forwards before the first backward
    found: list[Action] = []
    for i in range(count + ahead):
        if i >= ahead:
            found += [("RECV_B", 0, 0), ("FULL_BACKWARD", 0, i - ahead), ("SEND_B", 0, 0)]
        if i < count:
            found += [("RECV_F", 0, 0), ("FORWARD", 0, i), ("SEND_F", 0, 0)]
    return found


def stand_in(step: StepRecord, first: int, number: int, order: Sequence[Action], ranks: Sequence[int]) -> StepRecord:
    """The operations of pipeline rank ``number``, from ``step`` of ``first``.

    ``order``: what it does in a run. ``ranks``: of the pipeline, as numbered in the world.
    """
    shift = ranks[number] - ranks[first]
    operations = [shifted(operation, shift) for operation in step.operations]
    found = StepRecord(operations[: step.microbatches[0]])
    for start, stop in pairwise([*step.microbatches, len(operations)]):
        found.microbatches.append(len(found.operations))
        head, parts, tail = parts_of(operations, step.chunks, range(start, stop), ranks[number])
        for part in (head, *(parts[action] for action in order), tail):
            found.operations += part
    return found


WITHIN_STAGE = ("stage", "batch", "shard", "replicate", "context", "tensor")


def shifted(operation: Operation, shift: int) -> Operation:
    """``operation`` with ``shift`` added to its ranks, except in groups that span all stages."""
    if operation.peer is not None:
        return replace(operation, peer=operation.peer + shift)
    if operation.axis in WITHIN_STAGE:
        return replace(operation, ranks=tuple(rank + shift for rank in operation.ranks))
    return operation


def parts_of(
    operations: Sequence[Operation], chunks: Mapping[int, Action], run: range, own: int
) -> tuple[list[Operation], dict[Action, list[Operation]], list[Operation]]:
    """The operations of one run of the schedule: before its first action, for each action, and after the last one."""
    head: list[Operation] = []
    tail: list[Operation] = []
    parts: dict[Action, list[Operation]] = {}
    directions = {meaning: name for name, meaning in MESSAGES.items()}
    current = head
    for i in run:
        operation = operations[i]
        if i in chunks:
            # What came since the last message, such as gathering parameters, belongs to this computation.
            current = tail if current is tail else []
            parts[chunks[i]], tail = current, []
        if operation.peer is not None:
            parts[directions[operation.name, operation.peer > own], 0, 0] = [operation]
            current = tail
        else:
            current.append(operation)
    return head, parts, tail
