"""Ranks that call different collectives than the others of their group are reported."""

from collective_order import disagreements

from torchtrain.plugins.planner.operations import Operation


def call(name: str, size: int, *ranks: int, peer: int | None = None) -> Operation:
    return Operation(name, "forward", "", bytes=size, axis="shard", ranks=ranks, peer=peer)


def test_same_calls_agree_and_calls_of_other_groups_are_ignored() -> None:
    one_rank = call("allgather", 3, 0)
    first = [one_rank, call("allreduce", 4, 0, 1), call("allreduce", 8, 0, 2), call("send", 6, 0, 1, peer=1)]
    second = [call("recv", 6, 0, 1, peer=0), call("allreduce", 4, 0, 1), call("send", 2, 1, 5, peer=5)]
    assert disagreements({0: first, 1: second}) == []


def test_rank_that_calls_nothing_is_reported() -> None:
    assert disagreements({0: [call("allreduce", 4, 0, 1)], 1: []}) == [
        "call 0 of a group: rank 0 has allreduce of 4 bytes, rank 1 nothing"
    ]


def test_messages_of_different_sizes_are_reported() -> None:
    sends = [call("send", size, 0, 1, peer=1) for size in (4, 8)]
    receives = [call("recv", size, 0, 1, peer=0) for size in (4, 16)]
    assert disagreements({0: sends, 1: receives}) == [
        "call 1 of a group: sent by rank 0 has message of 8 bytes, received by rank 1 message of 16 bytes"
    ]


def test_all_to_all_may_have_different_sizes_but_must_be_called() -> None:
    uneven = {rank: [call("alltoall_base", size, 0, 1)] for rank, size in enumerate((4, 8))}
    assert disagreements(uneven) == []
    assert len(disagreements({0: uneven[0], 1: []})) == 1
