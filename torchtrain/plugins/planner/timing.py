"""Duration of a training step: a roofline model of each operation, replayed on the streams of communicating ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.plugins.planner.attention import Kernel, attention_fraction, kernel_of
from torchtrain.plugins.planner.hardware import Efficiency, Gpu
from torchtrain.plugins.planner.nccl import Communicator
from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE, Operation
from torchtrain.plugins.planner.options import EstimateConfig

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WAITING_COPY = "copy_to_host_and_wait"
ALL_REDUCES = ("allreduce", "all_reduce")
ALL_TO_ALLS = ("alltoall", "alltoall_base", "all_to_all_single")


@dataclass
class StepTime:
    """Seconds of one rank's step."""

    seconds: float = 0.0
    by_phase: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Computation by phase."""
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The same by phase and ``kind_of`` the kernel, such as "forward, products"."""
    waiting: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Exposed communication: by mesh axis, the time in which the device waits for collectives and messages."""


Arrivals = dict[tuple[int, int], list[float]]
"""Arrival times of all messages by sender and receiver, in seconds since the beginning of the step."""


KINDS = ("products", "attention", "others")  # of kernels


def kind_of(operation: Operation) -> str:
    """Whether a kernel is a matrix product, attention, or another one, which takes as long as its bytes move."""
    return KINDS[1] if operation.head_dim else KINDS[0] if operation.flops else KINDS[2]


@dataclass(frozen=True)
class CostModel:
    """Seconds of each operation on ``gpu``, in machines with ``estimate.gpus_per_node`` GPUs."""

    gpu: Gpu
    efficiency: Efficiency
    config: JobConfig

    def compute(self, operation: Operation) -> float:
        """Roofline model: the maximum of the times to compute, to move the bytes, and to run any kernel."""
        gpu, efficiency = self.gpu, self.efficiency
        matmul = efficiency.matmul_ampere if gpu.capability[0] == 8 else efficiency.matmul
        if operation.dtype in FLOAT8:
            peak, fraction = gpu.flops_float8, efficiency.float8
        elif operation.dtype in (torch.bfloat16, torch.float16):
            peak, fraction = gpu.flops_bfloat16, matmul
        else:
            peak, fraction = gpu.flops_float32, matmul
        if operation.head_dim:
            fraction = self._attention_fraction(operation)
        if gpu.power_limited:
            fraction *= efficiency.power_limited
        on_host = self.config.training.enable_cpu_offload and operation.phase == "update"
        moving = operation.bytes / (
            (gpu.host_memory_bandwidth if on_host else gpu.memory_bandwidth) * efficiency.memory
        )
        return max(operation.flops * operation.share / (peak * fraction), moving, efficiency.kernel_seconds)

    def _attention_fraction(self, operation: Operation) -> float:
        capability = self.gpu.capability
        direction = "backward" if "backward" in operation.name else "forward"
        name = kernel_of(operation.name, self.config.training, capability)
        return attention_fraction(Kernel(name, capability[0], direction, operation.head_dim), operation.keys)

    def communicate(self, operation: Operation) -> float:
        """Time of a collective or message by NCCL's model; the network cards of a machine share a ring's traffic."""
        gpu, efficiency, ranks = self.gpu, self.efficiency, operation.ranks
        if operation.axis == "host":
            return operation.bytes / (gpu.host_bandwidth * efficiency.link)
        if len(ranks) < 2:
            return 0.0
        machines = Counter(rank // section_of(self.config, EstimateConfig).gpus_per_node for rank in ranks)
        link, network = gpu.link_bandwidth * efficiency.link, gpu.network_bandwidth * efficiency.network
        fewest = min(machines.values())
        bus = min(link, fewest * network) if len(machines) > 1 else link
        communicator = Communicator(len(ranks), len(machines), bus, gpu.capability[0])
        if operation.peer is not None:
            return communicator.message(operation.bytes)
        if operation.name in ALL_REDUCES:
            return communicator.all_reduce(operation.bytes)
        if operation.name in ALL_TO_ALLS:
            return communicator.all_to_all(operation.bytes, link, network)
        return communicator.all_gather(operation.bytes)


def replay(traces: Mapping[int, Sequence[Operation]], cost_model: CostModel) -> dict[int, StepTime]:
    """Replay a step on ranks that send messages to each other.

    Args:
        traces: the operations of each global rank; all peers of sends and receives are among the keys.

    Returns:
        The times by rank. All ranks take as long as the slowest.
    """
    arrivals: Arrivals = defaultdict(list)
    times = {rank: StepTime() for rank in traces}
    unfinished = {rank: replay_rank(rank, trace, cost_model, arrivals, times[rank]) for rank, trace in traces.items()}
    while unfinished:  # every rank advances until it waits for a message that has not been sent
        sent = sum(map(len, arrivals.values()))
        ended = [rank for rank, progress in unfinished.items() if next(progress, None) is None]
        for rank in ended:
            del unfinished[rank]
        if not ended and sum(map(len, arrivals.values())) == sent:
            raise AssertionError(f"deadlock: ranks {sorted(unfinished)} wait for messages that no rank sends")
    longest = max(time.seconds for time in times.values())
    for time in times.values():
        time.waiting["end of the step"] += longest - time.seconds
        time.seconds = longest
    return times


def replay_rank(
    rank: int, trace: Sequence[Operation], cost_model: CostModel, arrivals: Arrivals, time: StepTime
) -> Iterator[bool]:
    """Replay one rank: a generator that fills in ``time``, and yields when it needs a message that has not been sent.

    The device has streams for computation, for FSDP's collectives, and for the messages with each peer. The host issues
    operations to all.
    """
    device = host = stream = copied_out = reduced = 0.0
    gathered: dict[str, float] = {}
    messages: dict[int, float] = defaultdict(float)  # end of the last message with each peer
    received: dict[int, list[float]] = defaultdict(list)  # arrival of each message from each peer

    def wait(until: float, axis: str) -> float:
        time.waiting[axis] += max(0.0, until - device)
        return max(device, until)

    for operation in trace:
        host += cost_model.efficiency.launch_seconds
        if operation.name == "wait":  # for parameters that FSDP gathers
            device = wait(gathered.get(operation.module, 0.0), "shard")
            continue
        if operation.name == WAIT_FOR_MESSAGE and operation.peer is not None:
            device = wait(received[operation.peer][-1 - operation.message], "pipeline")
            continue
        if operation.phase == "update" and stream > device:
            device = wait(stream, "shard")
        seconds = cost_model.communicate(operation) if operation.axis else cost_model.compute(operation)
        if not operation.axis:
            device = wait(host, "host") + seconds
            time.by_phase[operation.phase] += seconds
            time.kernels[f"{operation.phase}, {kind_of(operation)}"] += seconds
            if operation.name == "split_with_sizes_copy":
                copied_out = device
        elif operation.peer is not None and operation.name == "send":
            messages[operation.peer] = max(messages[operation.peer], device, host) + seconds
            arrivals[rank, operation.peer].append(messages[operation.peer])
        elif operation.peer is not None:
            sent = arrivals[operation.peer, rank]
            while len(sent) <= len(received[operation.peer]):
                yield True
            messages[operation.peer] = max(messages[operation.peer], sent[len(received[operation.peer])])
            received[operation.peer].append(messages[operation.peer])
        elif operation.axis == "host":  # CPU offload copies on FSDP's stream, in order with its collectives
            stream = max(stream, host) + seconds
            if operation.name == WAITING_COPY:
                host = max(host, stream)
        elif operation.fsdp and "gather" in operation.name:
            stream = max(stream, host, copied_out) + seconds
            gathered[operation.module] = stream
        elif operation.fsdp:
            if operation.axis == "shard":
                device = wait(reduced, "shard")  # FSDP has at most one reduction in flight
            stream = max(stream, host, device) + seconds
            reduced = stream
        else:
            if operation.fused_with_matmul:
                seconds *= 1 - cost_model.efficiency.async_tensor
            device = wait(max(device, host) + seconds, operation.axis)
    time.seconds = wait(stream, "shard")
