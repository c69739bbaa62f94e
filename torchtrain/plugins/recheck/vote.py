"""Which rank computes wrong, given the hashes that several ranks have computed of the same things.

Ranks are data-parallel ranks, counted from 0 and in a ring: rank r is followed by rank (r + 1) % ranks. A hash is any
value that can be compared.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Verdict:
    """``wrong``: ranks that compute wrong. ``suspects``: ranks at least one of which does, where none can be named."""

    wrong: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.wrong or self.suspects)

    def doubt(self, shard_groups: Sequence[Sequence[int]]) -> None:
        """Move the ranks of a group that are all wrong to ``suspects``.

        The ranks of such a group gather their weights from each other: if one of them has sent others in one forward
        than in the next, all of them seem to compute wrong.
        """
        for group in map(set, shard_groups):
            if len(group) > 1 and group <= self.wrong:
                self.wrong -= group
                self.suspects |= group


def differing(own: Sequence[Any], repeated: Sequence[Any]) -> list[int]:
    """The ranks whose microbatch has another hash on the next rank.

    Args:
        own: of each rank, the hash of its own microbatch.
        repeated: of each rank, the hash of the microbatch of the rank before it.
    """
    return [rank for rank, value in enumerate(own) if value != repeated[(rank + 1) % len(own)]]


def vote(own: Sequence[Any], repeated: Sequence[Any], third: Sequence[Any]) -> Verdict:
    """Two against one, for three ranks or more.

    ``third``: of each rank, the hash of the microbatch two ranks before it. See ``differing`` for the others.
    """
    verdict, ranks = Verdict(), len(own)
    for rank in differing(own, repeated):
        following, witness = (rank + 1) % ranks, (rank + 2) % ranks
        if third[witness] == repeated[following]:
            verdict.wrong.add(rank)
        elif third[witness] == own[rank]:
            verdict.wrong.add(following)
        else:
            verdict.suspects |= {rank, following, witness}
    return verdict


def contradictions(own: Sequence[Any], repeated: Sequence[Any], again: Sequence[tuple[Any, Any]]) -> Verdict:
    """Of two ranks, the one that contradicts itself.

    ``again``: of each rank, the hashes that it has computed again, of its own microbatch and of that of the other rank.
    See ``differing`` for the others.
    """
    verdict = Verdict()
    for rank in differing(own, repeated):
        other = 1 - rank
        wrong = {
            of
            for of, before, after in ((rank, own[rank], again[rank][0]), (other, repeated[other], again[other][1]))
            if before != after
        }
        verdict.wrong |= wrong
        if not wrong:
            verdict.suspects |= {0, 1}
    verdict.suspects -= verdict.wrong
    return verdict


def majority(states: Sequence[Any], replicas: Sequence[Sequence[int]]) -> Verdict:
    """Those of ``replicas``, each a list of ranks that must have the same state, that differ from most of the others.

    ``states``: the hash of each rank's state.
    """
    verdict = Verdict()
    for group in replicas:
        (state, count), *others = Counter(states[rank] for rank in group).most_common()
        if others and 2 * count > len(group):
            verdict.wrong |= {rank for rank in group if states[rank] != state}
        elif others:
            verdict.suspects |= set(group)
    return verdict
