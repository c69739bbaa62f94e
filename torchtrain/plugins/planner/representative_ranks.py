"""Middle ranks of a pipeline: simulate one of them, and derive the steps of the others by reordering its actions.

Middle ranks whose stages have the same numbers of layers run the same operations, in different orders. The one that
needs the most memory is simulated: the first of them, which has the most microbatches in flight, or with a split
backward the last, whose backwards of weights come the latest.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torchtrain.parallelisms.pipeline_llama import Pipeline
from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE, Operation
from torchtrain.plugins.planner.recorder import Action, StepRecord

COMPUTATIONS = ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "REDUCE_GRAD")
MESSAGES = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}  # the stage of the peer minus the own one


def representative_pipeline_ranks(stages: Sequence[int], ranks: int, schedule: str) -> list[int]:
    """Return, for each pipeline rank, the pipeline rank that is simulated in its place, which may be itself.

    The first and the last rank are always simulated, because they have the embedding and the output layer.

    Args:
        stages: number of layers of each stage.
        ranks: number of pipeline ranks.
        schedule: name of the pipeline schedule.
    """
    v_shaped, split_backward = schedule == "ZBVZeroBubble", "ZeroBubble" in schedule
    representatives = list(range(ranks))
    if schedule == "GPipe":  # has no table of actions
        return representatives
    by_layers: dict[tuple[int, ...], int] = {}
    middle = range(1, ranks - 1)
    for rank in reversed(middle) if split_backward else middle:
        layers = (stages[rank], stages[-1 - rank]) if v_shaped else tuple(stages[rank::ranks])
        representatives[rank] = by_layers.setdefault(layers, rank)
    return representatives


def pipeline_actions(pipeline: Pipeline | None, count: int) -> Mapping[int, Sequence[Action]]:
    """Return the actions of each pipeline rank in one run of the schedule with ``count`` microbatches."""
    if pipeline is None:
        return {}
    ranks, table = pipeline.mesh.size(), getattr(pipeline.schedule, "pipeline_order_with_comms", None)
    if table is None:
        return {rank: actions_1f1b(rank, ranks, count) for rank in range(ranks)}

    def convert(rank: int, action: Any) -> Action:
        name, stage = action.computation_type.name, action.stage_index
        peer = pipeline.rank_of[stage + MESSAGES[name]] - rank if name in MESSAGES else 0
        return Action(name, stage // ranks, action.microbatch_index or 0, peer)

    return {
        rank: [
            convert(rank, action) for action in actions if action.computation_type.name in (*COMPUTATIONS, *MESSAGES)
        ]
        for rank, actions in table.items()
    }


def actions_1f1b(rank: int, ranks: int, count: int) -> list[Action]:
    """Return the actions of a middle rank in ``Schedule1F1B``, which has no table, for ``count`` microbatches."""
    warmup = min(count, ranks - rank)  # forwards before the first backward
    actions: list[Action] = []
    for i in range(count + warmup):
        if (done := i - warmup) >= 0:
            actions += [Action("RECV_B", 0, done, 1), Action("FULL_BACKWARD", 0, done), Action("SEND_B", 0, done, -1)]
        if i < count:
            actions += [Action("RECV_F", 0, i, -1), Action("FORWARD", 0, i), Action("SEND_F", 0, i, 1)]
    return [*actions, Action("REDUCE_GRAD", 0, 0)]


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
        before, computations, messages, after = split_by_action(operations, step.chunks, range(start, stop))
        states, simulated_states = gradient_states(actions), gradient_states(computations)
        received: dict[tuple[str, int, int], int] = {}  # index of each message by direction, stage and microbatch
        record.operations += before
        for action in actions:
            direction = "F" if action.name in ("FORWARD", "RECV_F") else "B"
            key = direction, action.stage, action.microbatch
            if action.peer:
                peer = ranks[derived + action.peer]
                record.operations.append(messages["send" if action.name.startswith("SEND") else "recv", peer])
                if action.name.startswith("RECV"):
                    received[key] = record.received[peer]
                    record.received[peer] += 1
                continue
            template = with_gradient_state(action, states[action], simulated_states) if action in states else action
            for operation in computations[template]:
                if operation.name == WAIT_FOR_MESSAGE and operation.peer is not None:
                    operation = replace(operation, message=record.received[operation.peer] - received[key] - 1)
                record.operations.append(operation)
        record.operations += after
    return record


def gradient_states(actions: Iterable[Action]) -> dict[Action, tuple[bool, bool]]:
    """Return for each action of a split backward whether it reduces gradients, and whether it adds them to others.

    A backward of weights accumulates unsharded gradients. FSDP reduces them in the stage's next backward of inputs.
    """
    states: dict[Action, tuple[bool, bool]] = {}
    unsharded, sharded = set[int](), set[int]()  # stages that have such gradients
    for action in actions:
        stage = action.stage
        if action.name == "BACKWARD_WEIGHT":
            states[action] = False, stage in unsharded
            unsharded.add(stage)
        elif action.name == "BACKWARD_INPUT":
            states[action] = stage in unsharded, stage in unsharded & sharded
            if stage in unsharded:
                unsharded.remove(stage)
                sharded.add(stage)
    return states


def with_gradient_state(
    action: Action, state: tuple[bool, bool], simulated: Mapping[Action, tuple[bool, bool]]
) -> Action:
    """Return the simulated action that represents ``action``, which has ``state`` (``gradient_states``).

    If the action itself has another state in the simulated rank, that is one of another microbatch of the same stage.
    If none has the state, whether gradients are reduced comes before whether they are added to others.
    """
    candidates = [a for a in simulated if (a.name, a.stage) == (action.name, action.stage)]
    return min(candidates, key=lambda a: (simulated[a] != state, simulated[a][0] != state[0], a != action))


WITHIN_STAGE = ("stage", "batch", "shard", "replicate", "context", "tensor")


def shift_ranks(operation: Operation, shift: int) -> Operation:
    """Add ``shift`` to the ranks of ``operation``, unless its group spans all stages."""
    if operation.peer is not None:
        return replace(operation, peer=operation.peer + shift)
    if operation.axis in WITHIN_STAGE:
        return replace(operation, ranks=tuple(rank + shift for rank in operation.ranks))
    return operation


def split_by_action(
    operations: Sequence[Operation], chunks: Mapping[int, Action], run: range
) -> tuple[list[Operation], dict[Action, list[Operation]], dict[tuple[str, int], Operation], list[Operation]]:
    """Split one run of the schedule by its actions.

    Args:
        operations: all operations of the step.
        chunks: the computations of the pipeline, by the index in ``operations`` at which they begin.
        run: indices in ``operations`` of this run.

    Returns:
        The operations before the first action; those of each computation; a message by name and peer, since all have
        the same size; and the operations after the last action.
    """
    before: list[Operation] = []
    after: list[Operation] = []
    computations: dict[Action, list[Operation]] = {}
    messages: dict[tuple[str, int], Operation] = {}
    current = before
    for i in run:
        operation = operations[i]
        if i in chunks:
            # Operations since the last message, such as unsharding parameters, belong to this computation.
            current = after if current is after else []
            computations[chunks[i]], after = current, []
        if operation.name == WAIT_FOR_MESSAGE:  # belongs to the computation after it
            current = after
        if operation.peer is not None and operation.name != WAIT_FOR_MESSAGE:
            messages[operation.name, operation.peer] = operation
            current = after
        else:
            current.append(operation)
    return before, computations, messages, after
