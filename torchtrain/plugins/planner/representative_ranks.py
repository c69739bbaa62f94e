"""Middle ranks and microbatches of a pipeline: simulate some of them, and derive steps by reordering their actions.

Middle ranks whose stages have the same numbers of layers run the same operations, in different orders. The one that
needs the most memory is simulated: the first of them, which has the most microbatches in flight, or with a split
backward the last, whose backwards of weights come the latest.

A schedule repeats the same actions once the pipeline is full. Of many microbatches those are simulated that fill the
pipeline, those of one repetition, and those that empty it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from torchtrain.parallelisms.pipeline_llama import Pipeline
from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE, Operation
from torchtrain.plugins.planner.recorder import Action, StepRecord
from torchtrain.plugins.planner.torch_internals import SINCE_2_15

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


def repetition(schedule: str, ranks: int) -> int:
    """Number of microbatches after which ``schedule`` repeats its actions while the pipeline is full; 0: not known.

    With several stages a rank, the parameters that are gathered for an action depend on the actions around it.
    """
    if SINCE_2_15 and schedule != "1F1B":  # their buffers live as long as their messages
        return 0
    return {"1F1B": 1, "ZBVZeroBubble": 1, "Interleaved1F1B": ranks, "InterleavedZeroBubble": ranks}.get(schedule, 0)


def representative_microbatches(count: int, ranks: int, schedule: str) -> int:
    """Return how many of the ``count`` microbatches in one run of ``schedule`` are simulated."""
    period = repetition(schedule, ranks)
    if not period or count % period:
        return count
    # ZBV begins with 2 ranks - 1 forwards of the first stage, before the first backward of it ends.
    few = 2 * ranks + 2 if schedule == "ZBVZeroBubble" else max(ranks, period) + 3 * period
    return min(count, few)


def first_of_repetition(name: str, schedule: str, ranks: int) -> int:
    """Return the first simulated microbatch whose computation ``name`` represents others; those before it do not.

    As many microbatches follow as are in a ``repetition``; those after it represent the last ones.
    """
    if schedule == "ZBVZeroBubble":
        return {"FORWARD": 2 * ranks - 1, "BACKWARD_WEIGHT": ranks - 1}.get(name, 2)
    # Without a split backward, the forwards of each repetition run beside the backwards of the one before.
    return (1 if name == "FULL_BACKWARD" else 2) * repetition(schedule, ranks)


def represented_microbatch(action: Action, count: int, simulated: int, schedule: str, ranks: int) -> int:
    """Return which of ``simulated`` microbatches represents that of ``action``, of ``count`` microbatches.

    The first and the last microbatches represent themselves.
    """
    microbatch = action.microbatch
    if count == simulated:
        return microbatch
    period, first = repetition(schedule, ranks), first_of_repetition(action.name, schedule, ranks)
    last = simulated - first - period
    if microbatch < first:
        return microbatch
    if microbatch >= count - last:
        return microbatch - count + simulated
    return first + (microbatch - first) % period


def pipeline_actions(pipeline: Pipeline, count: int) -> Mapping[int, Sequence[Action]]:
    """Return the actions of each pipeline rank in one run of the schedule with ``count`` microbatches."""
    ranks, schedule = pipeline.mesh.size(), pipeline.schedule
    if isinstance(schedule, PipelineScheduleMulti) and schedule._n_microbatches != count:
        schedule = type(schedule)([*pipeline.pipeline_stages], n_microbatches=count, loss_fn=pipeline._loss)
    table = getattr(schedule, "pipeline_order_with_comms", None)
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
    """Return the actions of a rank in ``Schedule1F1B``, which has no table, for ``count`` microbatches."""
    warmup = min(count, ranks - rank)  # forwards before the first backward
    actions: list[Action] = []
    for i in range(count + warmup):
        if (done := i - warmup) >= 0:
            actions += [Action("RECV_B", 0, done, 1), Action("FULL_BACKWARD", 0, done), Action("SEND_B", 0, done, -1)]
        if i < count:
            actions += [Action("RECV_F", 0, i, -1), Action("FORWARD", 0, i), Action("SEND_F", 0, i, 1)]
    actions.append(Action("REDUCE_GRAD", 0, 0))
    return [action for action in actions if not action.peer or 0 <= rank + action.peer < ranks]


def derive_step(
    step: StepRecord, simulated: int, derived: int, actions: Sequence[Action], ranks: Sequence[int], schedule: str
) -> StepRecord:
    """Derive the operations of one pipeline rank from a simulated step of another or the same, of as few microbatches.

    Args:
        step: record of the pipeline rank ``simulated``.
        derived: the pipeline rank to derive.
        actions: actions of ``derived`` in one run of the schedule, with all microbatches.
        ranks: global rank of each pipeline rank.
        schedule: name of the schedule.
    """
    count = 1 + max(action.microbatch for action in actions)
    few = 1 + max(action.microbatch for action in step.chunks.values())
    shift = ranks[derived] - ranks[simulated]
    operations = [shift_ranks(operation, shift) for operation in step.operations]
    record = StepRecord(operations[: step.microbatches[0]])
    for start, stop in pairwise([*step.microbatches, len(operations)]):
        record.microbatches.append(len(record.operations))
        before, computations, messages, after = split_by_action(operations, step.chunks, range(start, stop))
        templates = {
            action: action._replace(microbatch=represented_microbatch(action, count, few, schedule, len(ranks)))
            for action in actions
            if not action.peer
        }
        # A backward of inputs of the first stage has no operations, unless it waits for a message by itself.
        templates = {
            action: template
            for action, template in templates.items()
            if template in computations or template.name != "BACKWARD_INPUT"
        }
        states, simulated_states = gradient_states(templates), gradient_states(computations)
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
            if action not in templates:
                continue
            template = templates[action]
            if action in states:
                template = with_gradient_state(template, states[action], simulated_states)
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
