"""Time of a collective by the model with which NCCL chooses its algorithm and protocol.

The formulas and constants are those that NCCL's authors tuned, in ``src/graph/tuning.cc`` of NCCL 2.30.7
(https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/graph/tuning.cc), for NVLink, InfiniBand and Intel's CPUs. Rings,
trees and PAT are modeled; not collectives in NVSwitches and network switches (NVLS, CollNet), the delay of a network
card, and the corrections for trees of medium sizes.
"""

import math
from dataclasses import dataclass

US = 1e-6  # a microsecond in seconds


@dataclass(frozen=True)
class Protocol:
    """Latencies in microseconds, and fractions of the bus bandwidth, of an NCCL protocol."""

    ring_base: float
    ring_link: float
    """Latency of a hop of a ring between GPUs of one machine."""
    ring_network: float
    """Latency of a hop of a ring between machines that have several ranks each."""
    tree_base: float
    tree_link: float
    tree_network: float
    """Latency of a hop between machines in a tree, and in a ring of one rank per machine."""
    network_overhead: float
    """Least latency of a hop within a machine where the ring leaves it."""
    ring_share: float
    """Fraction of the bus bandwidth that a ring reaches."""
    tree_share: float
    """Fraction that a tree reaches between machines."""
    tree_share_of_machine: float
    """Fraction that a tree reaches within a machine."""


LL = Protocol(6.6, 0.6, 2.7, 6.8, 0.6, 5.0, 1.0, 0.5, 0.92 / 3.8, 0.92 / 3.8)
LL128 = Protocol(14.0, 1.9, 4.0, 14.0, 1.25, 8.5, 1.0, 0.92, 0.92 * 120 / 128, 0.92 * 7 / 9)
SIMPLE = Protocol(8.4, 3.4, 14.0, 8.4, 4.0, 14.0, 3.0, 1.0, 0.92, 0.92)
LL_BANDWIDTH_OF_MACHINE = {8: 87.7e9, 9: 141e9, 10: 282e9}
"""Highest bus bandwidth of LL within a machine, bytes/s, by the major number of the compute capability."""
LL_BANDWIDTH_OF_TWO, LL_BANDWIDTH_OF_MORE = 39e9, 20.4e9
"""Highest bus bandwidth of LL between machines, bytes/s."""
RING_ALL_REDUCE_BETWEEN_MACHINES = 1.4
"""Factor of the latency of an all-reduce in a ring between machines, with Simple, on an A100 or later GPU."""
PAT_BASE, PAT_RANK, PAT_SHARE = 8.0, 2.8, 0.75
PAT_HOPS = 3.5  # by which the latency of a hop is divided


@dataclass(frozen=True)
class Communicator:
    """Ranks that communicate, and the bus bandwidth between them."""

    ranks: int
    machines: int
    bus_bandwidth: float
    """Bytes/s that a large all-gather reaches, as nccl-tests define it."""
    generation: int
    """Major number of the GPU's compute capability."""

    def ring_latency(self, protocol: Protocol, passes: int) -> float:
        """Latency of ``passes`` passes of a ring in microseconds; an all-reduce has two, other collectives one."""
        between = passes * (self.machines - 1)
        within = passes * (self.ranks - 1) - between
        link = max(protocol.ring_link, protocol.network_overhead) if between else protocol.ring_link
        network = protocol.tree_network if self.ranks == self.machines else protocol.ring_network
        return protocol.ring_base + within * link + between * network

    def tree_latency(self, protocol: Protocol) -> float:
        """Latency of an all-reduce in a tree, in microseconds."""
        hops = self.ranks // self.machines - 1
        levels = int(math.log2(self.machines))
        return protocol.tree_base + 2 * (hops * protocol.tree_link + levels * protocol.tree_network)

    def bandwidth(self, protocol: Protocol, share: float) -> float:
        """Bus bandwidth of ``protocol`` in bytes/s, where ``share`` of that of the communicator is reached."""
        bandwidth = share * self.bus_bandwidth
        if protocol is not LL:
            return bandwidth
        between = LL_BANDWIDTH_OF_TWO if self.machines == 2 else LL_BANDWIDTH_OF_MORE
        return min(bandwidth, between if self.machines > 1 else LL_BANDWIDTH_OF_MACHINE[self.generation])

    def all_gather(self, nbytes: int) -> float:
        """Seconds of an all-gather with ``nbytes`` of output, or of a reduce-scatter with as many of input."""
        sent = nbytes * (self.ranks - 1) / self.ranks
        times = [
            self.ring_latency(protocol, 1) * US + sent / self.bandwidth(protocol, protocol.ring_share)
            for protocol in (LL, LL128, SIMPLE)
        ]
        if self.ranks == self.machines:
            latency = PAT_BASE + int(math.log2(self.machines)) * SIMPLE.ring_network / PAT_HOPS + self.ranks * PAT_RANK
            times.append(latency * US + sent / (PAT_SHARE * self.bus_bandwidth))
        return min(times)

    def all_reduce(self, nbytes: int) -> float:
        """Seconds of an all-reduce of ``nbytes``."""
        times = []
        for protocol in (LL, LL128, SIMPLE):
            factor = RING_ALL_REDUCE_BETWEEN_MACHINES if protocol is SIMPLE and self.machines > 1 else 1.0
            sent = 2 * nbytes * (self.ranks - 1) / self.ranks
            ring = factor * self.ring_latency(protocol, 2) * US
            times.append(ring + sent / self.bandwidth(protocol, protocol.ring_share))
            share = protocol.tree_share if self.machines > 1 else protocol.tree_share_of_machine
            times.append(self.tree_latency(protocol) * US + 2 * nbytes / self.bandwidth(protocol, share))
        return min(times)

    def message(self, nbytes: float) -> float:
        """Seconds in which a rank sends ``nbytes`` to another."""
        hop = SIMPLE.ring_network if self.machines > 1 else SIMPLE.ring_link
        return (SIMPLE.ring_base + hop) * US + nbytes / self.bus_bandwidth

    def all_to_all(self, nbytes: float, link_bandwidth: float, network_bandwidth: float) -> float:
        """Seconds in which each rank sends a part of its ``nbytes`` to each rank, itself included.

        Args:
            link_bandwidth, network_bandwidth: bytes/s of one GPU, within its machine and to others.
        """
        share = nbytes / self.ranks
        within = (self.ranks // self.machines - 1) * share
        between = (self.ranks - self.ranks // self.machines) * share
        return self.message(0) + max((within + between) / link_bandwidth, between / network_bandwidth)
