"""From what the ledgers saw to what a user asks: does it fit, where does memory go, how fast is it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Degrees, resolve_degrees
from torchtrain.errors import ConfigError
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.parallelisms.limits.pipeline import plan_stages
from torchtrain.planning.allocator import peak_reserved
from torchtrain.planning.fake_run import RankRecord, ranks_of_each_kind, rehearse
from torchtrain.planning.hardware import GIB, Efficiency, Gpu
from torchtrain.planning.ledger import KINDS, StepRecord
from torchtrain.planning.operations import Operation
from torchtrain.planning.stand_ins import first_of_each_kind, stand_in
from torchtrain.planning.timing import Clock, replay

INTERVAL = 0.15  # of throughput, either way: docs/estimate.md compares with published runs
MICROBATCHES = 3  # of a step, that are rehearsed: the first, the last, and one for all between
LAYERS = 2  # of the smallest pipeline stage, and once more with another: all others do what the last of them does

LAYER = re.compile(r"layers\.(\d+)")
Place = tuple[str, str]  # phase and module


@dataclass(frozen=True)
class Figures:
    """What a run would need: numbers that grow evenly with the number of layers, from some on."""

    ranks: list[dict[str, float]]
    """Of one rank of each kind: what the JSON says, but for its peaks."""
    peaks: list[list[dict[Place, dict[str, float]]]]
    """Of each of these ranks and steps: by place, live bytes by kind at the worst moment there."""
    by_stream: list[dict[int, dict[Place, float]]]
    """Of each of these ranks: by stream and place, the most live bytes."""
    scattered: list[float]
    """Of each of these ranks: bytes that the allocator reserves beside the most that each stream needs."""
    collectives: list[dict[str, Any]]
    flops_by_phase: dict[str, float]
    """Of matrix products and attention, a step, with what is computed again; of the rank with the most."""
    seconds: dict[str, float]
    """A step's: by phase what the busiest rank computes, by axis what it waits for, and the whole."""

    def extended(self, more: "Figures", times: float) -> "Figures":
        """``times`` times as far from these to ``more`` as that is."""
        pairs = ((getattr(self, name), getattr(more, name)) for name in self.__dataclass_fields__)
        found = Figures(*(extend(first, second, times) for first, second in pairs))
        # Holes between blocks come and go with their sizes, which are the same for any number of layers.
        return replace(found, scattered=[max(pair) for pair in zip(self.scattered, more.scattered, strict=True)])

    def as_dicts(self) -> list[dict[str, Any]]:
        """For each rank what the JSON says of it."""
        return [
            {**rank, **peak_dict(steps), "peak_reserved_gib": (needed(streams) + scattered) / GIB}
            for rank, steps, streams, scattered in zip(
                self.ranks, self.peaks, self.by_stream, self.scattered, strict=True
            )
        ]


def extend(first: Any, second: Any, times: float) -> Any:
    """What has no name in ``first`` is 0 there; a place that only one of them has is left out."""
    if isinstance(second, dict):
        known = {key: value for key, value in second.items() if key in first or isinstance(key, str)}
        return {key: extend(first.get(key, 0), value, times) for key, value in known.items()}
    if isinstance(second, list):
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
    def ranks(self) -> list[dict[str, Any]]:
        """What the JSON says of one rank of each kind."""
        return self.figures.as_dicts()

    @property
    def peak_reserved_gib(self) -> float:
        return max(float(rank["peak_reserved_gib"]) for rank in self.ranks)

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
            "ranks": self.ranks,
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


def figures_of(
    records: Sequence[RankRecord], steps: Mapping[int, StepRecord], clock: Clock, microbatches: int
) -> Figures:
    """Of a step of ``microbatches``, of which ``MICROBATCHES`` were rehearsed at most.

    ``steps``: their last ones, and those of the ranks that they stand for.
    """

    def of(operations: dict[int, list[Operation]]) -> Figures:
        times = replay(operations, clock)
        work = {rank: flops_by_phase(own) for rank, own in operations.items()}
        busiest = max(work, key=lambda rank: work[rank].total())
        time = times[busiest]
        seconds = {"step": time.seconds, **time.by_phase, **{f"waiting for {k}": v for k, v in time.waiting.items()}}
        ranks, peaks = [rank_dict(record) for record in records], [peaks_of(record) for record in records]
        streams = [streams_of(record) for record in records]
        scattered = [peak_reserved(r.ledger.allocations) - needed(s) for r, s in zip(records, streams, strict=True)]
        traffic = collectives(operations[busiest])
        return Figures(ranks, peaks, streams, scattered, traffic, dict(work[busiest]), seconds)

    found = of({rank: step.operations for rank, step in steps.items()})
    if microbatches <= MICROBATCHES:
        return found
    fewer = of({rank: without(step.operations, *step.microbatches[1:3]) for rank, step in steps.items()})
    return fewer.extended(found, microbatches - MICROBATCHES + 1)


def step_of(number: int, first: int, record: RankRecord, ranks: Sequence[int]) -> StepRecord:
    """The last step of pipeline rank ``number``, which is ``first``, whose record this is, or one of its kind."""
    step = record.ledger.steps[-1]
    return step if number == first else stand_in(step, first, number, record.orders[number], ranks)


def without(operations: list[Operation], first: int, last: int) -> list[Operation]:
    return operations[:first] + operations[last:]


def rank_dict(record: RankRecord) -> dict[str, float]:
    last = record.ledger.steps[-1]
    return {
        "rank": record.rank,
        "parameters_gib": record.parameter_bytes / GIB,
        "gradients_gib": max((sizes[KINDS.index("gradients")] for sizes in last.timeline), default=0) / GIB,
        "optimizer_gib": last.kept.get("optimizer", 0) / GIB,
    }


def places(modules: Iterable[str]) -> Callable[[str], str]:
    """What ``modules`` are called where only the first and the last layer are told from the others."""
    numbers = {module: int(match[1]) for module in modules if (match := LAYER.match(module))}
    names = {min(numbers.values(), default=-1): "first layer", max(numbers.values(), default=-1): "last layer"}
    return lambda module: names.get(numbers[module], "layer between") if module in numbers else module


def streams_of(record: RankRecord) -> dict[int, dict[Place, float]]:
    found: dict[int, dict[Place, float]] = {}
    for step in record.ledger.steps:
        name = places(module for _, module, _ in step.by_stream)
        for (phase, module, stream), size in step.by_stream.items():
            own, place = found.setdefault(stream, {}), (phase, name(module))
            own[place] = max(size, own.get(place, 0))
    return found


def needed(streams: dict[int, dict[Place, float]]) -> float:
    return sum(max(sizes.values()) for sizes in streams.values())


def peaks_of(record: RankRecord) -> list[dict[Place, dict[str, float]]]:
    """By place; of layers the first, the last and any other are told apart, which more layers have as well."""
    found: list[dict[Place, dict[str, float]]] = []
    for step in record.ledger.steps:
        name = places(module for _, module in step.peaks)
        worst: dict[Place, tuple[int, ...]] = {}
        for (phase, module), sizes in step.peaks.items():
            place = phase, name(module)
            worst[place] = max(sizes, worst.get(place, sizes), key=sum)
        found.append({place: dict(zip(KINDS, sizes, strict=True)) for place, sizes in worst.items()})
    return found


def peak_dict(steps: list[dict[Place, dict[str, float]]]) -> dict[str, Any]:
    first, last = (max(step.items(), key=lambda item: sum(item[1].values())) for step in steps)
    place, by_kind = last
    return {
        **{f"{kind}_gib": by_kind[kind] / GIB for kind in ("gathered", "activations", "temporary")},
        "peak_active_gib": sum(by_kind.values()) / GIB,
        "first_step_peak_active_gib": sum(first[1].values()) / GIB,
        "peak_at": " ".join(filter(None, place)),
    }


def collectives(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Their number and bytes, by axis, operation and phase."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for operation in operations:
        if operation.axis:
            key = operation.axis, operation.name, operation.phase
            count, size = found.get(key, (0, 0))
            found[key] = count + 1, size + operation.bytes
    return [
        {"axis": axis, "op": op, "phase": phase, "count": count, "bytes": size}
        for (axis, op, phase), (count, size) in sorted(found.items())
    ]


def flops_by_phase(operations: Sequence[Operation]) -> Counter[str]:
    work: Counter[str] = Counter()
    for operation in operations:
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
    *,
    all_layers: bool = False,
    stand_ins: bool = False,
) -> Estimate:
    """Rehearse one rank of each kind, and time them together.

    ``config`` must be one that ``check_layout`` passes. Without ``all_layers`` it is rehearsed with ``LAYERS`` in
    the smallest pipeline stage, then with one more in each, and extended from these. With ``stand_ins``, of the ranks
    in the middle of a pipeline that are alike the first stands for the others, and is the only one in ``ranks``.
    """
    degrees = resolve_degrees(config.parallelism, world_size_of(config))
    clock = Clock(gpu, config.estimate.gpus_per_node, efficiency or Efficiency(), config)
    microbatches = global_batch_size // degrees.batch // config.training.local_batch_size
    stages = plan_stages(shape, config.parallelism)
    rehearsed: list[RankRecord] = []

    def figures(stages: tuple[int, ...]) -> Figures:
        run = config
        if len(stages) > 1:
            run = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_layers_per_stage=stages))
        ranks, firsts = ranks_of_each_kind(degrees), list(range(degrees.pipeline))
        if stand_ins:
            firsts = first_of_each_kind(stages, degrees.pipeline, config.parallelism.pipeline_parallel_schedule)
        records = {
            first: rehearse(
                run,
                replace(shape, n_layers=sum(stages)),
                degrees,
                ranks[first],
                rows=min(microbatches, MICROBATCHES) * config.training.local_batch_size,
                document_start=0 if config.data.document_mask else None,
                capability=gpu.capability,
            )
            for first in sorted(set(firsts))
        }
        rehearsed[:] = records.values()
        steps = {ranks[i]: step_of(i, first, records[first], ranks) for i, first in enumerate(firsts)}
        return figures_of(rehearsed, steps, clock, microbatches)

    left_out = min(stages) - LAYERS
    # Where every so many layers are checkpointed, layers are not alike.
    alike = config.activation_checkpoint.selective_option == "op" or config.activation_checkpoint.mode != "selective"
    if all_layers or left_out <= 1 or not alike:
        found = figures(stages)
    else:
        few, more = (tuple(n - left_out + extra for n in stages) for extra in (0, 1))
        found = figures(few).extended(figures(more), left_out)
    return Estimate(
        gpu,
        degrees,
        found,
        global_batch_size * config.training.seq_len,
        config.training.steps,
        flops_per_token(shape, config.training.seq_len),
        rehearsed,
    )
