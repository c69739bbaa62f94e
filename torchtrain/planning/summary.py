"""From what the ledgers saw to what a user asks: does it fit, where does memory go, how fast is it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import Any

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.parallelisms.pipeline_schedule import plan_stages
from torchtrain.parallelisms.validate import resolve_global_batch_size
from torchtrain.planning.allocator import peak_reserved
from torchtrain.planning.hardware import GIB, Efficiency, Gpu
from torchtrain.planning.ledger import KINDS, StepRecord
from torchtrain.planning.operations import Operation
from torchtrain.planning.representative_ranks import first_of_each_kind, stand_in
from torchtrain.planning.request import refuse
from torchtrain.planning.simulation import RankRecord, representative_ranks, simulate
from torchtrain.planning.timing import Clock, replay

INTERVAL = 0.15  # of throughput, either way: docs/estimate.md compares with published runs
MICROBATCHES = 3  # rehearsed of a step at most: the first, the last, and one in place of all between
LAYERS = 2  # rehearsed in the smallest stage, then one more in each: the difference stands for each further one

LAYER = re.compile(r"layers\.(\d+)")
Place = tuple[str, str]  # phase and module
Live = tuple[float, ...]  # bytes by kind, in the order of KINDS


@dataclass(frozen=True)
class RankFigures:
    """Bytes that one rank would need."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    peaks: list[dict[Place, Live]]
    """Of each step: by place, the worst moment there."""
    by_stream: dict[int, dict[Place, float]]
    """By stream and place, the most live bytes."""
    scattered: float = 0.0
    """Bytes lost to fragmentation: what the allocator reserves beyond ``needed``."""

    @property
    def needed(self) -> float:
        return sum(max(sizes.values()) for sizes in self.by_stream.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        (_, first), (place, last) = (max(step.items(), key=lambda item: sum(item[1])) for step in self.peaks)
        sizes = {
            **dict(zip(KINDS, last, strict=True)),
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "peak_active": sum(last),
            "first_step_peak_active": sum(first),
            "peak_reserved": self.needed + self.scattered,
        }
        gib = {f"{name}_gib": size / GIB for name, size in sizes.items()}
        return {"rank": self.rank, **gib, "peak_at": " ".join(filter(None, place))}


@dataclass(frozen=True)
class Figures:
    """What a run would need: numbers that grow evenly with the number of layers, from some on."""

    ranks: list[RankFigures]
    """One of each kind."""
    collectives: list[dict[str, Any]]
    flops_by_phase: dict[str, float]
    """Of matrix products and attention, a step, with what is computed again; of the rank with the most."""
    seconds: dict[str, float]
    """A step's: by phase what the busiest rank computes, by axis what it waits for, and the whole."""

    def extended(self, more: "Figures", times: float) -> "Figures":
        """Linear extrapolation: these figures plus ``times`` times the difference of ``more`` from them."""
        found: Figures = extend(self, more, times)
        # Holes between blocks come and go with their sizes, which are the same for any number of layers.
        ranks = [
            replace(rank, scattered=max(few.scattered, many.scattered))
            for rank, few, many in zip(found.ranks, self.ranks, more.ranks, strict=True)
        ]
        return replace(found, ranks=ranks)


def extend(first: Any, second: Any, times: float) -> Any:
    """``first + times * (second - first)``, number by number, in figures, dicts, lists and tuples.

    A key that only ``second`` has counts as 0 in ``first``; a ``Place`` that only one of them has is left out.
    """
    if isinstance(second, Figures | RankFigures):
        return type(second)(**{key: extend(value, vars(second)[key], times) for key, value in vars(first).items()})
    if isinstance(second, dict):
        known = {key: value for key, value in second.items() if key in first or isinstance(key, str)}
        return {key: extend(first.get(key, 0), value, times) for key, value in known.items()}
    if isinstance(second, list | tuple):
        return type(second)(extend(a, b, times) for a, b in zip(first, second, strict=True))
    return first if isinstance(first, str) or first == second else first + times * (second - first)


@dataclass(frozen=True)
class Estimate:
    """``Figures`` of a run on ``gpu``."""

    gpu: Gpu
    degrees: ParallelDims
    figures: Figures
    global_tokens: int
    steps: int
    model_flops_per_token: int
    records: Sequence[RankRecord]
    """What was rehearsed."""

    @property
    def world_size(self) -> int:
        return prod(astuple(self.degrees))

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """What the JSON says of one rank of each kind."""
        return [rank.as_dict() for rank in self.figures.ranks]

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
    """The figures of a step of ``microbatches``, of which ``MICROBATCHES`` were rehearsed at most.

    ``records``: of the rehearsed ranks. ``steps``: by rank, the last step of these, and of the ranks they stand for.
    """
    ranks = [rank_figures(record) for record in records]

    def of(operations: dict[int, list[Operation]]) -> Figures:
        times = replay(operations, clock)
        work = {rank: flops_by_phase(own) for rank, own in operations.items()}
        busiest = max(work, key=lambda rank: work[rank].total())
        time = times[busiest]
        seconds = {"step": time.seconds, **time.by_phase, **{f"waiting for {k}": v for k, v in time.waiting.items()}}
        return Figures(ranks, collectives(operations[busiest]), dict(work[busiest]), seconds)

    found = of({rank: step.operations for rank, step in steps.items()})
    if microbatches <= MICROBATCHES:
        return found
    fewer = {}
    for rank, step in steps.items():
        second, third = step.microbatches[1:3]  # of which one is left out
        fewer[rank] = step.operations[:second] + step.operations[third:]
    return of(fewer).extended(found, microbatches - MICROBATCHES + 1)


def rank_figures(record: RankRecord) -> RankFigures:
    steps = record.ledger.steps
    peaks: list[dict[Place, Live]] = []
    by_stream: dict[int, dict[Place, float]] = {}
    for step in steps:
        name = layer_names(moment.module for moment in step.timeline)
        worst: dict[Place, Live] = {}
        for phase, module, sizes, stream, size in step.timeline:
            place, own = (phase, name[module]), by_stream.setdefault(stream, {})
            worst[place] = max(sizes, worst.get(place, sizes), key=sum)
            own[place] = max(size, own.get(place, 0))
        peaks.append(worst)
    gradients = max(moment.sizes[KINDS.index("gradients")] for moment in steps[-1].timeline)
    kept = steps[-1].kept["optimizer"]
    found = RankFigures(record.rank, record.parameter_bytes, gradients, kept, peaks, by_stream)
    allocations = [allocation for step in steps for allocation in step.allocations]
    return replace(found, scattered=peak_reserved(allocations) - found.needed)


def layer_names(modules: Iterable[str]) -> dict[str, str]:
    """What ``modules`` are called where only the first and the last layer are told from the others."""
    names = {module: module for module in modules}
    numbers = {module: int(match[1]) for module in names if (match := LAYER.match(module))}
    ends = {min(numbers.values(), default=-1): "first layer", max(numbers.values(), default=-1): "last layer"}
    return {**names, **{module: ends.get(number, "layer between") for module, number in numbers.items()}}


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


def estimate(config: JobConfig, shape: TransformerConfig, gpu: Gpu) -> Estimate:
    """Refuse what the trainer refuses; then simulate one rank of each kind, and time them together.

    Unless all layers are asked for, or a picture, which is of all, ``LAYERS`` are rehearsed in the smallest pipeline
    stage, then one more in each, and the figures are extended from these. For a search, of the ranks in the middle of a
    pipeline that are alike the first stands for the others, and is the only one in ``ranks``.
    """
    degrees, options = refuse(config, shape, gpu), config.estimate
    clock = Clock(gpu, Efficiency(), config)
    global_batch_size = resolve_global_batch_size(config, degrees)
    microbatches = global_batch_size // degrees.batch // config.training.local_batch_size
    stages = plan_stages(shape, config.parallelism)
    rehearsed: list[RankRecord] = []

    def figures(stages: tuple[int, ...]) -> Figures:
        run = replace(config, parallelism=replace(config.parallelism, pipeline_parallel_layers_per_stage=stages))
        model = replace(shape, n_layers=sum(stages))
        ranks, firsts = representative_ranks(degrees), list(range(degrees.pipeline))
        if options.search:
            firsts = first_of_each_kind(stages, degrees.pipeline, config.parallelism.pipeline_parallel_schedule)
        records = {
            first: simulate(run, model, degrees, ranks[first], capability=gpu.capability, max_microbatches=MICROBATCHES)
            for first in sorted(set(firsts))
        }
        rehearsed[:] = records.values()
        steps = {}
        for number, first in enumerate(firsts):
            step, order = records[first].ledger.steps[-1], records[first].orders.get(number, ())
            steps[ranks[number]] = step if number == first else stand_in(step, first, number, order, ranks)
        return figures_of(rehearsed, steps, clock, microbatches)

    left_out = min(stages) - LAYERS
    # Where every so many layers are checkpointed, layers are not alike.
    alike = config.activation_checkpoint.selective_option == "op" or config.activation_checkpoint.mode != "selective"
    if options.all_layers or options.picture or left_out <= 1 or not alike:
        found = figures(stages)
    else:
        few, more = (tuple(n - left_out + extra for n in stages) for extra in (0, 1))
        found = figures(few).extended(figures(more), left_out)
    tokens, flops = global_batch_size * config.training.seq_len, flops_per_token(shape, config.training.seq_len)
    return Estimate(gpu, degrees, found, tokens, config.training.steps, flops, rehearsed)
