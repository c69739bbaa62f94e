"""Which rank computes wrong, given the hashes that several ranks have computed of the same things.

Ranks are data-parallel ranks, counted from 0 and in a ring: rank r is followed by rank (r + 1) % ranks. A hash is any
value that can be compared.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SURE = 3
"""So many ranks that agree are right. Two may have the same fault."""
VOTES = 5
"""So many ranks compute a microbatch whose hashes differ: three outvote two that have the same fault."""

Hashes = Sequence[Sequence[Any]]
"""``hashes[distance][rank]`` is what ``rank`` has computed of the microbatch of the rank ``distance`` before it."""


@dataclass
class Verdict:
    """Ranks that compute wrong, or may.

    Attributes:
        wrong: those that compute wrong.
        suspects: ranks at least one of which does, where none can be named.
        odd: those of the suspects that differ from two others, which agree.
    """

    wrong: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    odd: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.wrong or self.suspects)

    def suspect(self, votes: Mapping[int, Any]) -> None:
        """Suspect all ranks of ``votes``: their hashes of one microbatch."""
        self.suspects |= votes.keys()
        value, count = Counter(votes.values()).most_common(1)[0]
        if count == len(votes) - 1 > 1:
            self.odd |= {rank for rank in votes if votes[rank] != value}

    def doubt(self, shard_groups: Sequence[Sequence[int]]) -> None:
        """Move the ranks of a group that are all wrong to ``suspects``.

        The ranks of such a group gather their weights from each other: if one of them has sent others in one forward
        than in the next, all of them seem to compute wrong.
        """
        for group in map(set, shard_groups):
            if len(group) > 1 and group <= self.wrong:
                self.wrong -= group
                self.suspects |= group


def differing(hashes: Hashes) -> list[int]:
    """The ranks whose microbatch has another hash on the next rank."""
    own, repeated = hashes[:2]
    return [rank for rank, value in enumerate(own) if value != repeated[(rank + 1) % len(own)]]


def votes_on(rank: int, hashes: Hashes) -> dict[int, Any]:
    """The hashes of the microbatch of ``rank``, by the rank that has computed it."""
    by_distance = [(rank + distance) % len(of_all) for distance, of_all in enumerate(hashes)]
    return {of: of_all[of] for of, of_all in zip(by_distance, hashes, strict=True)}


def vote(hashes: Hashes) -> Verdict:
    """Name the ranks that differ from ``SURE`` others that agree; where there are none, suspect all that have voted."""
    verdict = Verdict()
    for rank in differing(hashes):
        votes = votes_on(rank, hashes)
        value, count = Counter(votes.values()).most_common(1)[0]
        if count >= SURE:
            verdict.wrong |= {of for of in votes if votes[of] != value}
        else:
            verdict.suspect(votes)
    return verdict


def contradictions(hashes: Hashes, again: Hashes) -> Verdict:
    """Name the ranks that contradict themselves; where there are none, suspect all that have voted.

    ``again``: what the same ranks have computed a second time.
    """
    verdict = Verdict()
    for rank in differing(hashes):
        votes, second = votes_on(rank, hashes), votes_on(rank, again)
        wrong = {of for of in votes if votes[of] != second[of]}
        verdict.wrong |= wrong
        if not wrong:
            verdict.suspect(votes)
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
