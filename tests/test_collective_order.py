"""Ranks that call other collectives than their group are found."""

from collective_order import disagreements

from torchtrain.planning.operations import Operation


def call(name: str, size: int, *ranks: int, peer: int | None = None) -> Operation:
    return Operation(name, "forward", "", bytes=size, axis="shard", ranks=ranks, peer=peer)


def test_the_same_calls_agree_and_others_do_not_matter() -> None:
    alone = call("allgather", 3, 0)
    first = [alone, call("allreduce", 4, 0, 1), call("allreduce", 8, 0, 2), call("send", 6, 0, 1, peer=1)]
    second = [call("recv", 6, 0, 1, peer=0), call("allreduce", 4, 0, 1), call("send", 2, 1, 5, peer=5)]
    assert disagreements({0: first, 1: second}) == []


def test_a_group_of_which_one_calls_nothing() -> None:
    assert disagreements({0: [call("allreduce", 4, 0, 1)], 1: []}) == [
        "call 0 of a group: rank 0 has allreduce of 4 bytes, rank 1 nothing"
    ]


def test_messages_of_other_sizes() -> None:
    sends = [call("send", size, 0, 1, peer=1) for size in (4, 8)]
    receives = [call("recv", size, 0, 1, peer=0) for size in (4, 16)]
    assert disagreements({0: sends, 1: receives}) == [
        "call 1 of a group: sent by rank 0 has message of 8 bytes, received by rank 1 message of 16 bytes"
    ]


def test_an_all_to_all_may_have_other_sizes_but_must_be_called() -> None:
    uneven = {rank: [call("alltoall_base", size, 0, 1)] for rank, size in enumerate((4, 8))}
    assert disagreements(uneven) == []
    assert len(disagreements({0: uneven[0], 1: []})) == 1
