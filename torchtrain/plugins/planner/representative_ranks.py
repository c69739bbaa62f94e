"""Middle ranks of a pipeline: simulate one of them, and derive the steps of the others by reordering its actions.

Middle ranks whose stages have the same numbers of layers run the same operations, in different orders. The first of
them is simulated. It has the most microbatches in flight, so the others do not need more memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torchtrain.parallelisms.pipeline_llama import Pipeline
from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE, Operation
from torchtrain.plugins.planner.recorder import Action, StepRecord

COMPUTATIONS = ("FORWARD", "FULL_BACKWARD")
# The operation of each message, and whether its peer is the rank of the next stage (or of the previous one). All
# messages have the same size, so as actions they have stage 0 and microbatch 0.
MESSAGES = {
    "SEND_F": ("send", True),
    "RECV_F": ("recv", False),
    "SEND_B": ("send", False),
    "RECV_B": ("recv", True),
}


def representative_pipeline_ranks(stages: Sequence[int], ranks: int, schedule: str) -> list[int]:
    """Return, for each pipeline rank, the pipeline rank that is simulated in its place, which may be itself.

    The first and the last rank are always simulated, because they have the embedding and the output layer.

    Args:
        stages: number of layers of each stage.
        ranks: number of pipeline ranks.
        schedule: name of the pipeline schedule. Ranks are only represented by others if its order is known.
    """
    firsts: dict[tuple[int, ...], int] = {}
    known = schedule in ("1F1B", "Interleaved1F1B")
    return [
        firsts.setdefault(tuple(stages[rank::ranks]), rank) if known and 0 < rank < ranks - 1 else rank
        for rank in range(ranks)
    ]


def pipeline_actions(pipeline: Pipeline | None, count: int) -> Mapping[int, Sequence[Action]]:
    """Return the actions of each pipeline rank in one run of the schedule with ``count`` microbatches."""
    if pipeline is None:
        return {}
    ranks, table = pipeline.mesh.size(), getattr(pipeline.schedule, "pipeline_order_with_comms", None)
    if table is None:
        return {rank: actions_1f1b(rank, ranks, count) for rank in range(ranks)}
    return {
        rank: [
            (name, 0, 0) if name in MESSAGES else (name, action.stage_index // ranks, action.microbatch_index)
            for action in actions
            if (name := action.computation_type.name) in (*COMPUTATIONS, *MESSAGES)
        ]
        for rank, actions in table.items()
    }


def actions_1f1b(rank: int, ranks: int, count: int) -> list[Action]:
    """Return the actions of a middle rank in ``Schedule1F1B``, which has no table, for ``count`` microbatches."""
    warmup = min(count, ranks - rank)  # forwards before the first backward
    actions: list[Action] = []
    for i in range(count + warmup):
        if i >= warmup:
            actions += [("RECV_B", 0, 0), ("FULL_BACKWARD", 0, i - warmup), ("SEND_B", 0, 0)]
        if i < count:
            actions += [("RECV_F", 0, 0), ("FORWARD", 0, i), ("SEND_F", 0, 0)]
    return actions


def derive_step(
    step: StepRecord, simulated: int, derived: int, actions: Sequence[Action], ranks: Sequence[int]
) -> StepRecord:
    """Derive the operations of one pipeline rank from the simulated step of another.

    Args:
        step: record of the pipeline rank ``simulated``.
        derived: the pipeline rank to derive.
        actions: actions of ``derived`` in one run of the schedule.
        ranks: global rank of each pipeline rank.
    """
    shift = ranks[derived] - ranks[simulated]
    operations = [shift_ranks(operation, shift) for operation in step.operations]
    record = StepRecord(operations[: step.microbatches[0]])
    for start, stop in pairwise([*step.microbatches, len(operations)]):
        record.microbatches.append(len(record.operations))
        before, by_action, after = split_by_action(operations, step.chunks, range(start, stop), ranks[derived])
        record.operations += before
        for action in actions:
            record.operations += by_action[action]
        record.operations += after
    return record


WITHIN_STAGE = ("stage", "batch", "shard", "replicate", "context", "tensor")


def shift_ranks(operation: Operation, shift: int) -> Operation:
    """Add ``shift`` to the ranks of ``operation``, unless its group spans all stages."""
    if operation.peer is not None:
        return replace(operation, peer=operation.peer + shift)
    if operation.axis in WITHIN_STAGE:
        return replace(operation, ranks=tuple(rank + shift for rank in operation.ranks))
    return operation


def split_by_action(
    operations: Sequence[Operation], chunks: Mapping[int, Action], run: range, own_rank: int
) -> tuple[list[Operation], dict[Action, list[Operation]], list[Operation]]:
    """Split one run of the schedule into the operations before its first action, of each action, and after the last.

    Args:
        operations: all operations of the step.
        chunks: the computations of the pipeline, by the index in ``operations`` at which they begin.
        run: indices in ``operations`` of this run.
        own_rank: global rank whose operations these are.
    """
    before: list[Operation] = []
    after: list[Operation] = []
    by_action: dict[Action, list[Operation]] = {}
    message_names = {meaning: name for name, meaning in MESSAGES.items()}
    current = before
    for i in run:
        operation = operations[i]
        if i in chunks:
            # Operations since the last message, such as unsharding parameters, belong to this computation.
            current = after if current is after else []
            by_action[chunks[i]], after = current, []
        if operation.name == WAIT_FOR_MESSAGE:  # belongs to the computation after it
            current = after
        if operation.peer is not None and operation.name != WAIT_FOR_MESSAGE:
            by_action[message_names[operation.name, operation.peer > own_rank], 0, 0] = [operation]
            current = after
        else:
            current.append(operation)
    return before, by_action, after
