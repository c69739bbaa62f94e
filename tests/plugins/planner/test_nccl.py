"""The planner's model of collectives, beside what NCCL logs of its own (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=TUNING)."""

import itertools

import pytest

from torchtrain.plugins.planner.nccl import LL, LL128, SIMPLE, Communicator


def test_latencies_are_those_that_nccl_logs() -> None:
    # NCCL 2.29.7 on two machines with one GPU each: latency in microseconds by protocol.
    two = Communicator(2, 2, 2.4e9, 10)
    assert [two.ring_latency(protocol, 1) for protocol in (LL, LL128, SIMPLE)] == pytest.approx([11.6, 22.5, 22.4])
    assert [two.ring_latency(protocol, 2) for protocol in (LL, LL128, SIMPLE)] == pytest.approx([16.6, 31.0, 36.4])
    assert [two.tree_latency(protocol) for protocol in (LL, LL128, SIMPLE)] == pytest.approx([16.8, 31.0, 36.4])
    # On two machines with eight GPUs each
    many = Communicator(16, 2, 1e11, 9)
    assert [many.tree_latency(protocol) for protocol in (LL, LL128, SIMPLE)] == pytest.approx([25.2, 48.5, 92.4])
    assert [many.ring_latency(protocol, 2) for protocol in (LL128, SIMPLE)] == pytest.approx([75.2, 131.6])


def test_small_messages_use_the_protocol_of_low_latency() -> None:
    node = Communicator(8, 1, 337e9, 9)
    assert node.all_gather(8) == pytest.approx((6.6 + 7 * 0.6) * 1e-6, rel=1e-3)
    assert node.all_reduce(8) == pytest.approx((6.6 + 14 * 0.6) * 1e-6, rel=1e-3)
    size = 64 * 2**20
    simple = (8.4 + 7 * 3.4) * 1e-6 + size * 7 / 8 / 337e9
    assert node.all_gather(size) == pytest.approx(simple)
    # A log of NCCL 2.29.7 has 17.6 us and 3.6 GB/s for PAT on two machines of one GPU, whose rings have 2.4 GB/s.
    two = Communicator(2, 2, 2.4e9, 10)
    assert two.all_gather(48_000) == pytest.approx(17.6e-6 + 48_000 / 3.6e9)


def test_rings_cost_more_with_each_machine_and_trees_with_the_logarithm() -> None:
    sizes = [Communicator(8 * machines, machines, 300e9, 9) for machines in (2, 8, 16, 128)]
    # A hop in a machine takes 3.4 us, one between machines 14 us.
    expected = [8.4 + machines * 7 * 3.4 + (machines - 1) * 14 for machines in (2, 8, 16, 128)]
    found = [c.ring_latency(SIMPLE, 1) for c in sizes]
    assert found == pytest.approx(expected)
    trees = [c.tree_latency(LL) for c in sizes]
    assert [b - a for a, b in itertools.pairwise(trees)] == pytest.approx([20.0, 10.0, 30.0])
    assert all(a.all_gather(4 * 10**8) < b.all_gather(4 * 10**8) for a, b in itertools.pairwise(sizes))
