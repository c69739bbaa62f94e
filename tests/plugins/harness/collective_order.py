"""Check that all ranks issue the same collectives in the same order; on a cluster a mismatch is a deadlock."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE, Operation

Call = tuple[str, int]  # operation, bytes


def disagreements(operations: Mapping[int, Sequence[Operation]]) -> list[str]:
    """Describe where the ranks disagree, one line for each process group and each pair of ranks; empty if they agree.

    ``operations``: those of each simulated rank, in the order in which its host issues them. The ranks of a group must
    call the same collectives, with the same number of bytes (except all-to-all). Each message that a rank sends must be
    received by its peer, in the same order and with the same size.
    """
    calls: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    sent: dict[tuple[int, int], list[Call]] = defaultdict(list)
    received: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for rank, own in operations.items():
        for operation in own:
            if operation.name == WAIT_FOR_MESSAGE:
                continue
            if operation.peer is None and len(operation.ranks) > 1:
                for member in operations.keys() & set(operation.ranks):
                    calls[operation.ranks][member]  # creates an empty sequence for a member that calls nothing
                size = 0 if operation.name == "alltoall_base" else operation.bytes
                calls[operation.ranks][rank].append((operation.name, size))
            elif operation.peer in operations:
                assert operation.peer is not None
                message = ("message", operation.bytes)
                if operation.name == "send":
                    sent[rank, operation.peer].append(message)
                else:
                    received[operation.peer, rank].append(message)
    found = []
    for members in calls.values():
        first, *others = sorted(members)
        found += [difference(f"rank {first}", members[first], f"rank {rank}", members[rank]) for rank in others]
    for pair in sorted(sent.keys() | received.keys()):
        found.append(difference(f"sent by rank {pair[0]}", sent[pair], f"received by rank {pair[1]}", received[pair]))
    return [line for line in found if line]


def calls_of(operations: Sequence[Operation]) -> list[Call]:
    """All collectives and messages of a rank, with the mesh axis of their group instead of its members.

    Ranks that differ only in their coordinates on the mesh have equal sequences; sizes of all-to-all are left out.
    """
    return [
        (f"{o.name} on {o.axis}", 0 if o.name == "alltoall_base" else o.bytes) for o in operations if len(o.ranks) > 1
    ]


def difference(name: str, calls: Sequence[Call], other_name: str, others: Sequence[Call]) -> str:
    """Describe the first call in which two sequences differ; an empty string if they are equal."""
    for i, (call, other) in enumerate(zip_longest(calls, others)):
        if call != other:
            one, two = (f"{c[0]} of {c[1]} bytes" if c else "nothing" for c in (call, other))
            return f"call {i} of a group: {name} has {one}, {other_name} {two}"
    return ""
