"""Whether ranks call the same collectives in the same order. Where they do not, a cluster waits for ever."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from torchtrain.planning.operations import Operation

Call = tuple[str, int]  # operation, bytes


def disagreements(operations: Mapping[int, Sequence[Operation]]) -> list[str]:
    """What does not match, in words, one line for each group and pair; empty where all ranks agree.

    ``operations``: of each rank that was rehearsed, in the order in which its host issues them. The ranks of a group
    must call the same collectives, and but for all-to-all over the same number of bytes; what one rank sends another
    must receive, in order.
    """
    calls: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    sent: dict[tuple[int, int], list[Call]] = defaultdict(list)
    received: dict[tuple[int, int], list[Call]] = defaultdict(list)
    for rank, own in operations.items():
        for operation in own:
            if operation.peer is None and len(operation.ranks) > 1:
                for member in operations.keys() & set(operation.ranks):
                    calls[operation.ranks][member]  # one that calls nothing has a sequence, too
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
    """All collectives and messages of a rank, by the axis of their group and not by its members.

    These are the same on ranks that differ only in their places on the mesh, but for sizes of all-to-all.
    """
    return [
        (f"{o.name} on {o.axis}", 0 if o.name == "alltoall_base" else o.bytes) for o in operations if len(o.ranks) > 1
    ]


def difference(name: str, calls: Sequence[Call], other_name: str, others: Sequence[Call]) -> str:
    """The first call in which two sequences differ, in words, or an empty string."""
    for i, (call, other) in enumerate(zip_longest(calls, others)):
        if call != other:
            one, two = (f"{c[0]} of {c[1]} bytes" if c else "nothing" for c in (call, other))
            return f"call {i} of a group: {name} has {one}, {other_name} {two}"
    return ""
