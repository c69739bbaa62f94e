"""From what the ledgers saw to what a user asks: does it fit, where does memory go, how fast is it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Degrees, resolve_degrees
from torchtrain.errors import ConfigError
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.planning.allocator import peak_reserved
from torchtrain.planning.fake_run import RankRecord, ranks_of_each_kind, rehearse
from torchtrain.planning.hardware import GIB, Efficiency, Gpu
from torchtrain.planning.timing import Clock, replay

INTERVAL = 0.15  # of throughput, either way: docs/estimate.md compares with published runs
REHEARSED = 2  # microbatches of a step, and one more: any others do what the last of them does


@dataclass(frozen=True)
class Figures:
    """What a run would need, of one rank of each kind: numbers in nested dicts and lists, as in the JSON.

    All of them grow evenly with the number of microbatches and of layers, from the second on.
    """

    ranks: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    flops_by_phase: dict[str, float]
    """Of matrix products and attention, a step, with what is computed again; of the rank with the most."""
    seconds: dict[str, float]
    """A step's: by phase what the busiest rank computes, by axis what it waits for, and the whole."""

    def extended(self, more: "Figures", times: float) -> "Figures":
        """``times`` times as far from these to ``more`` as that is."""
        pairs = ((getattr(self, name), getattr(more, name)) for name in self.__dataclass_fields__)
        return Figures(*(extend(first, second, times) for first, second in pairs))


def extend(first: Any, second: Any, times: float) -> Any:
    if isinstance(first, dict):
        return {key: extend(first.get(key, 0), value, times) for key, value in second.items()}
    if isinstance(first, list):
        return [extend(a, b, times) for a, b in zip(first, second, strict=True)]
    return first if isinstance(first, str) or first == second else first + times * (second - first)


@dataclass(frozen=True)
class Estimate:
    """``Figures`` of a run on ``gpu``."""

    gpu: Gpu
    degrees: Degrees
    figures: Figures
    global_tokens: int
    steps: int
    model_flops_per_token: int
    records: Sequence[RankRecord]
    """What was rehearsed."""

    @property
    def world_size(self) -> int:
        degrees = self.degrees
        return degrees.pipeline * degrees.batch * degrees.context * degrees.tensor

    @property
    def peak_reserved_gib(self) -> float:
        return max(float(rank["peak_reserved_gib"]) for rank in self.figures.ranks)

    @property
    def fits(self) -> bool:
        return self.peak_reserved_gib <= self.gpu.memory_gib

    @property
    def step_seconds(self) -> float:
        return self.figures.seconds["step"]

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
        return {
            "ranks": self.figures.ranks,
            "fits": self.fits,
            "memory_gib": self.gpu.memory_gib,
            "flops_per_step_per_rank": sum(self.figures.flops_by_phase.values()),
            "flops_by_phase": self.figures.flops_by_phase,
            "model_flops_per_token": self.model_flops_per_token,
            "collectives": self.figures.collectives,
            "step_seconds": self.step_seconds,
            "step_seconds_range": [self.step_seconds * (1 - INTERVAL), self.step_seconds * (1 + INTERVAL)],
            "seconds": self.figures.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "days": self.days,
            "gpu_hours": self.days * 24 * self.world_size,
        }


def figures_of(records: Sequence[RankRecord], clock: Clock) -> Figures:
    times = replay({record.rank: record.ledger.steps[-1].operations for record in records}, clock)
    work = {record.rank: flops_by_phase(record) for record in records}
    busiest = max(records, key=lambda record: work[record.rank].total())
    time = times[busiest.rank]
    seconds = {"step": time.seconds, **time.by_phase, **{f"waiting for {k}": v for k, v in time.waiting.items()}}
    return Figures([rank_dict(r) for r in records], collectives(busiest), dict(work[busiest.rank]), seconds)


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
        "peak_reserved_gib": peak_reserved(record.ledger.allocations) / GIB,
        "first_step_peak_active_gib": first.bytes / GIB,
        "peak_at": f"{second.phase} {second.module}".strip(),
    }


def collectives(record: RankRecord) -> list[dict[str, Any]]:
    """Number and bytes of the collectives of the second step, by axis, operation and phase."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for operation in record.ledger.steps[-1].operations:
        if operation.axis:
            key = operation.axis, operation.name, operation.phase
            count, size = found.get(key, (0, 0))
            found[key] = count + 1, size + operation.bytes
    return [
        {"axis": axis, "op": op, "phase": phase, "count": count, "bytes": size}
        for (axis, op, phase), (count, size) in sorted(found.items())
    ]


def flops_by_phase(record: RankRecord) -> Counter[str]:
    work: Counter[str] = Counter()
    for operation in record.ledger.steps[-1].operations:
        if operation.flops:
            work[operation.phase] += operation.flops
    return work


def world_size_of(config: JobConfig) -> int:
    """``estimate.world_size``, or as many ranks as the degrees need."""
    if config.estimate.world_size:
        return config.estimate.world_size
    parallelism, size = config.parallelism, 1
    for key in ("pipeline", "tensor", "context"):
        size *= int(getattr(parallelism, f"{key}_parallel_degree"))
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
    split: Sequence[int] = (),
) -> Estimate:
    """Rehearse one rank of each kind, and time them together.

    ``config`` must be one that ``build.check_run`` passes. With ``split``, the layers of each pipeline stage, or of the
    whole model without a pipeline, it is rehearsed with two and with three layers a stage and extended from these, as
    if all stages had as many as the largest: exact where they have, and where the peak of memory stays where it is.
    """
    degrees = resolve_degrees(config.parallelism, world_size_of(config))
    clock = Clock(gpu, config.estimate.gpus_per_node, efficiency or Efficiency(), config)
    rehearsed: list[RankRecord] = []

    def figures(n_layers: int, microbatches: int) -> Figures:
        run = config
        if n_layers != shape.n_layers and len(split) > 1:
            few = (n_layers // len(split),) * len(split)
            run = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_layers_per_stage=few))
        records = [
            rehearse(
                run,
                replace(shape, n_layers=n_layers),
                degrees,
                rank,
                rows=microbatches * config.training.local_batch_size,
                document_start=0 if config.data.document_mask else None,
                capability=gpu.capability,
            )
            for rank in ranks_of_each_kind(degrees)
        ]
        rehearsed[:] = records
        return figures_of(records, clock)

    def extended(n_layers: int) -> Figures:
        count = global_batch_size // degrees.batch // config.training.local_batch_size
        if count <= REHEARSED + 1:
            return figures(n_layers, count)
        return figures(n_layers, REHEARSED).extended(figures(n_layers, REHEARSED + 1), count - REHEARSED)

    if max(split, default=0) <= 3:
        found = extended(shape.n_layers)
    else:
        found = extended(2 * len(split)).extended(extended(3 * len(split)), max(split) - 2)
    return Estimate(
        gpu,
        degrees,
        found,
        global_batch_size * config.training.seq_len,
        config.training.steps,
        flops_per_token(shape, config.training.seq_len),
        rehearsed,
    )
