"""From what the ledgers saw to what a user asks: does it fit, where does memory go, how fast is it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Degrees, resolve_degrees
from torchtrain.errors import ConfigError
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.planning.allocator import peak_reserved
from torchtrain.planning.fake_run import RankRecord, ranks_of_each_kind, rehearse
from torchtrain.planning.hardware import GIB, Efficiency, Gpu
from torchtrain.planning.timing import Clock, StepTime, replay

INTERVAL = 0.15  # of throughput, either way: docs/estimate.md compares with published runs


@dataclass(frozen=True)
class Estimate:
    """What a run would need. ``records`` and ``times`` are of one rank of each kind."""

    gpu: Gpu
    degrees: Degrees
    records: Sequence[RankRecord]
    times: Mapping[int, StepTime]
    global_tokens: int
    steps: int
    model_flops_per_token: int

    @property
    def world_size(self) -> int:
        degrees = self.degrees
        return degrees.pipeline * degrees.batch * degrees.context * degrees.tensor

    @property
    def peak_reserved_gib(self) -> float:
        return max(reserved_gib(record) for record in self.records)

    @property
    def fits(self) -> bool:
        return self.peak_reserved_gib <= self.gpu.memory_gib

    @property
    def step_seconds(self) -> float:
        return max(time.seconds for time in self.times.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.global_tokens / self.step_seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (PaLM, https://arxiv.org/abs/2204.02311): of the bfloat16 peak."""
        return self.model_flops_per_token * self.tokens_per_second_per_gpu / self.gpu.flops_bfloat16

    @property
    def days(self) -> float:
        return self.steps * self.step_seconds / 86400

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        busiest = max(self.records, key=lambda record: flops(record))
        return {
            "ranks": [rank_dict(record) for record in self.records],
            "fits": self.fits,
            "memory_gib": self.gpu.memory_gib,
            "flops_per_step_per_rank": flops(busiest),
            "model_flops_per_token": self.model_flops_per_token,
            "collectives": [
                {"axis": axis, "op": op, "phase": phase, "count": count, "bytes": size}
                for (axis, op, phase), (count, size) in collectives(busiest).items()
            ],
            "step_seconds": self.step_seconds,
            "step_seconds_range": [self.step_seconds * (1 - INTERVAL), self.step_seconds * (1 + INTERVAL)],
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "days": self.days,
            "gpu_hours": self.days * 24 * self.world_size,
        }


def reserved_gib(record: RankRecord) -> float:
    return peak_reserved(record.ledger.allocations) / GIB


def flops(record: RankRecord) -> int:
    """Of matrix products and attention, with what is computed again, in the second step."""
    return sum(operation.flops for operation in record.ledger.steps[-1].operations)


def rank_dict(record: RankRecord) -> dict[str, Any]:
    first, second = (step.peak for step in record.ledger.steps)
    assert first is not None
    assert second is not None
    by_kind = {f"{kind}_gib": size / GIB for kind, size in second.by_kind.items()}
    gradients = max((sizes[1] for sizes in record.ledger.steps[-1].timeline), default=0)
    return {
        **by_kind,
        "rank": record.rank,
        "parameters_gib": record.parameter_bytes / GIB,
        "gradients_gib": gradients / GIB,
        "optimizer_gib": record.ledger.steps[-1].kept.get("optimizer", 0) / GIB,
        "peak_active_gib": second.bytes / GIB,
        "peak_reserved_gib": reserved_gib(record),
        "first_step_peak_active_gib": first.bytes / GIB,
        "peak_at": f"{second.phase} {second.module}".strip(),
    }


def collectives(record: RankRecord) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Number and bytes of the collectives of the second step, by axis, operation and phase."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for operation in record.ledger.steps[-1].operations:
        if operation.axis:
            key = operation.axis, operation.name, operation.phase
            count, size = found.get(key, (0, 0))
            found[key] = count + 1, size + operation.bytes
    return found


def flops_by_phase(record: RankRecord) -> Counter[str]:
    work: Counter[str] = Counter()
    for operation in record.ledger.steps[-1].operations:
        work[operation.phase] += operation.flops
    return work


def world_size_of(config: JobConfig) -> int:
    """``estimate.world_size``, or as many ranks as the degrees need."""
    if config.estimate.world_size:
        return config.estimate.world_size
    parallelism, size = config.parallelism, 1
    for key in ("pipeline", "tensor", "context"):
        size *= getattr(parallelism, f"{key}_parallel_degree")
    shard = parallelism.data_parallel_shard_degree
    if shard == -1:
        raise ConfigError(
            "estimate.world_size is not set, and parallelism.data_parallel_shard_degree = -1 takes all ranks that the "
            "others leave; say how many there are, such as --estimate.world_size 8"
        )
    return size * parallelism.data_parallel_replicate_degree * shard


def estimate(
    config: JobConfig,
    shape: TransformerConfig,
    global_batch_size: int,
    gpu: Gpu,
    efficiency: Efficiency | None = None,
) -> Estimate:
    """Rehearse one rank of each kind, and time them together. ``config`` must be one that ``build.check_run`` passes."""
    degrees = resolve_degrees(config.parallelism, world_size_of(config))
    records = [
        rehearse(
            config,
            shape,
            degrees,
            rank,
            rows=global_batch_size // degrees.batch,
            document_start=0 if config.data.document_mask else None,
            capability=gpu.capability,
        )
        for rank in ranks_of_each_kind(degrees)
    ]
    asynchronous = config.parallelism.enable_async_tensor_parallel
    clock = Clock(gpu, config.estimate.gpus_per_node, efficiency or Efficiency(), asynchronous)
    return Estimate(
        gpu,
        degrees,
        records,
        replay({record.rank: record.ledger.steps[-1].operations for record in records}, clock),
        global_batch_size * config.training.seq_len,
        config.training.steps,
        flops_per_token(shape, config.training.seq_len),
    )
