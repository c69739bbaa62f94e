"""How long a step takes: a roofline for each operation, and the order in which streams and ranks wait."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtrain.config.schema import JobConfig
from torchtrain.planning.hardware import Efficiency, Gpu
from torchtrain.planning.operations import Operation

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WAITING_COPY = "copy_to_host_and_wait"
TWICE = ("allreduce", "all_reduce")  # a reduction and a gathering


@dataclass
class StepTime:
    """Seconds of one rank's step."""

    seconds: float = 0.0
    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What the device computes."""
    waiting: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By axis, what it waits for collectives and messages that nothing hides."""


Arrivals = dict[tuple[int, int], list[float]]
"""By sender and receiver, when each message is there."""


@dataclass(frozen=True)
class Clock:
    """Durations on ``gpu``, in the machines of ``config``."""

    gpu: Gpu
    efficiency: Efficiency
    config: JobConfig

    def compute(self, operation: Operation) -> float:
        """The longer of computing and of moving bytes."""
        gpu, efficiency = self.gpu, self.efficiency
        if operation.dtype in FLOAT8:
            peak = gpu.flops_float8 * efficiency.float8
        elif operation.dtype in (torch.bfloat16, torch.float16):
            peak = gpu.flops_bfloat16 * efficiency.matrices
        else:
            peak = gpu.flops_float32 * efficiency.matrices
        if "attention" in operation.name:
            peak *= efficiency.attention / efficiency.matrices
        on_host = self.config.training.enable_cpu_offload and operation.phase == "update"
        moving = operation.bytes / ((gpu.host_memory_bytes if on_host else gpu.memory_bytes) * efficiency.memory)
        return max(operation.flops * operation.share / peak, moving, efficiency.kernel_seconds)

    def communicate(self, operation: Operation) -> float:
        """A ring through all ranks, in which each machine's cards carry what leaves it (NCCL's bus bandwidth)."""
        gpu, efficiency, ranks = self.gpu, self.efficiency, operation.ranks
        if operation.axis == "host":
            return operation.bytes / (gpu.host_bytes * efficiency.link)
        if len(ranks) < 2:
            return 0.0
        nodes = Counter(rank // self.config.estimate.gpus_per_node for rank in ranks)
        rate = gpu.link_bytes * efficiency.link
        if len(nodes) > 1:
            rate = min(rate, min(nodes.values()) * gpu.network_bytes * efficiency.network)
        share = 1.0 if operation.peer is not None else (len(ranks) - 1) / len(ranks)
        times = 2 if operation.name in TWICE else 1
        return efficiency.collective_seconds + times * share * operation.bytes / rate


def replay(traces: Mapping[int, Sequence[Operation]], clock: Clock) -> dict[int, StepTime]:
    """Times of the ranks whose operations are ``traces``, which send to and receive from each other."""
    arrivals: Arrivals = defaultdict(list)
    times = {rank: StepTime() for rank in traces}
    unfinished = {rank: run(rank, trace, clock, arrivals, times[rank]) for rank, trace in traces.items()}
    while unfinished:  # each goes on until it waits for a message that is not sent yet
        sent = sum(map(len, arrivals.values()))
        ended = [rank for rank, progress in unfinished.items() if next(progress, None) is None]
        for rank in ended:
            del unfinished[rank]
        if not ended and sum(map(len, arrivals.values())) == sent:
            raise AssertionError(f"ranks {sorted(unfinished)} wait for messages that nobody sends")
    longest = max(time.seconds for time in times.values())
    for time in times.values():
        time.waiting["end of the step"] += longest - time.seconds
        time.seconds = longest
    return times


def run(rank: int, trace: Sequence[Operation], clock: Clock, arrivals: Arrivals, time: StepTime) -> Iterator[bool]:
    """Fill in the ``time`` of one rank; yield where a message is waited for that is not sent yet.

    It has two streams, one for computation and one for FSDP's collectives; the host issues to both.
    """
    device = host = stream = copied_out = reduced = 0.0
    gathered: dict[str, float] = {}
    received: Counter[int] = Counter()

    def wait(until: float, axis: str) -> float:
        time.waiting[axis] += max(0.0, until - device)
        return max(device, until)

    for operation in trace:
        host += clock.efficiency.launch_seconds
        if operation.name == "wait":
            device = wait(gathered.get(operation.module, 0.0), "shard")
            continue
        if operation.phase == "update" and stream > device:
            device = wait(stream, "shard")
        seconds = clock.communicate(operation) if operation.axis else clock.compute(operation)
        if not operation.axis:
            device = wait(host, "host") + seconds
            time.by_phase[operation.phase] += seconds
            if operation.name == "split_with_sizes_copy":
                copied_out = device
        elif operation.peer is not None and operation.name == "send":
            arrivals[rank, operation.peer].append(max(device, host) + seconds)
        elif operation.peer is not None:
            sent = arrivals[operation.peer, rank]
            while len(sent) <= received[operation.peer]:
                yield True
            device = wait(sent[received[operation.peer]], "pipeline")
            received[operation.peer] += 1
        elif operation.axis == "host":  # between the gathering or the reduction, and so on their stream
            stream = max(stream, host) + seconds
            if operation.name == WAITING_COPY:
                host = max(host, stream)
        elif operation.fsdp and "gather" in operation.name:
            stream = max(stream, host, copied_out) + seconds
            gathered[operation.module] = stream
        elif operation.fsdp:
            if operation.axis == "shard":
                device = wait(reduced, "shard")  # one reduction under way at a time
            stream = max(stream, host, device) + seconds
            reduced = stream
        else:
            if operation.axis == "tensor" and clock.config.parallelism.enable_async_tensor_parallel:
                seconds *= 1 - clock.efficiency.async_tensor
            device = wait(max(device, host) + seconds, operation.axis)
    time.seconds = wait(stream, "shard")
