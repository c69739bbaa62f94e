"""Summarize simulated steps as an estimate of memory, FLOPs, collectives and time."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import prod
from typing import Any

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.models.spec import DecoderConfig, count_parameters, flops_per_token
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.plugins.planner.allocator import peak_reserved
from torchtrain.plugins.planner.attention import DIRECT_CALLS, kernel_of
from torchtrain.plugins.planner.hardware import GIB, Efficiency, Gpu
from torchtrain.plugins.planner.operations import Operation
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.recorder import CATEGORIES, StepRecord
from torchtrain.plugins.planner.representative_ranks import (
    derive_step,
    representative_microbatches,
    representative_pipeline_ranks,
)
from torchtrain.plugins.planner.request import resolve_and_check, vocabulary_source
from torchtrain.plugins.planner.simulation import RankRecord, representative_ranks, simulate
from torchtrain.plugins.planner.timing import CostModel, replay

MAX_MICROBATCHES = 3  # microbatches simulated per step: the first, the last, and one that represents all between
SIMULATED_LAYERS = 2  # layers simulated in the smallest stage; then one more in each, to extrapolate the difference

LAYER_NAME = re.compile(r"layers\.(\d+)")
Location = tuple[str, str]  # phase and module
LiveBytes = tuple[float, ...]  # by category, in the order of CATEGORIES


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in bytes."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    peaks: list[dict[Location, LiveBytes]]
    """For each step, the live bytes at the peak of each location."""
    by_stream: dict[int, dict[Location, float]]
    """Peak live bytes by stream and location."""
    fragmentation: float = 0.0
    """Bytes that the allocator reserves beyond ``allocated``."""

    @property
    def allocated(self) -> float:
        """Sum of the streams' peaks of live bytes, since a stream does not reuse memory of another."""
        return sum(max(sizes.values()) for sizes in self.by_stream.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the memory in GiB, and where it peaks, as JSON values."""
        (_, first), (location, last) = (max(step.items(), key=lambda item: sum(item[1])) for step in self.peaks)
        sizes = {
            **dict(zip(CATEGORIES, last, strict=True)),
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "peak_active": sum(last),
            "first_step_peak_active": sum(first),
            "peak_reserved": self.allocated + self.fragmentation,
        }
        gib = {f"{name}_gib": size / GIB for name, size in sizes.items()}
        return {"rank": self.rank, **gib, "peak_at": " ".join(filter(None, location))}


@dataclass(frozen=True)
class StepCosts:
    """Memory, FLOPs, collectives and time of a step: numbers that grow linearly with layers and microbatches.

    FLOPs, collectives and seconds are those of the rank with the most FLOPs.
    """

    ranks: list[RankMemory]
    """Memory of each simulated rank."""
    collectives: list[dict[str, Any]]
    flops_by_phase: dict[str, float]
    """FLOPs of matrix products and attention, including recomputation."""
    seconds: dict[str, float]
    """Duration of the step ("step"), of the computation in each phase, and of the waits on each mesh axis."""
    kernels: dict[str, float]
    """Seconds of computation by phase and kind of kernel (``StepTime.kernels``)."""

    def extrapolated(self, more: "StepCosts", times: float) -> "StepCosts":
        """Linear extrapolation: these costs plus ``times`` times the difference between ``more`` and these."""
        costs: StepCosts = extrapolate(self, more, times)
        # Fragmentation depends on the sizes of blocks, which are the same for any number of layers.
        ranks = [
            replace(rank, fragmentation=max(few.fragmentation, many.fragmentation))
            for rank, few, many in zip(costs.ranks, self.ranks, more.ranks, strict=True)
        ]
        return replace(costs, ranks=ranks)


def extrapolate(first: Any, second: Any, times: float) -> Any:
    """Return ``first + times * (second - first)`` for each number in costs, dicts, lists and tuples.

    A string key that only ``second`` has counts as 0 in ``first``. A ``Location`` that only one of them has is omitted.
    """
    if isinstance(second, StepCosts | RankMemory):
        return type(second)(**{key: extrapolate(value, vars(second)[key], times) for key, value in vars(first).items()})
    if isinstance(second, dict):
        common = {key: value for key, value in second.items() if key in first or isinstance(key, str)}
        return {key: extrapolate(first.get(key, 0), value, times) for key, value in common.items()}
    if isinstance(second, list | tuple):
        return type(second)(extrapolate(a, b, times) for a, b in zip(first, second, strict=True))
    return first if isinstance(first, str) or first == second else first + times * (second - first)


@dataclass(frozen=True)
class Estimate:
    """Estimate of a training run on GPUs of the type ``gpu``."""

    gpu: Gpu
    degrees: ParallelDims
    costs: StepCosts
    global_tokens: int
    """Tokens per step."""
    steps: int
    model_flops_per_token: int
    records: Sequence[RankRecord]
    """Records of the simulated ranks."""
    gpus_per_node: int = 8
    attention: str = "flash"
    """The kernel that is assumed: cudnn, fa3, flash or flex."""
    dollars_per_gpu_hour: float = 0.0
    is_float8: bool = False
    parameters: int = 0
    """Of the model."""
    vocab_size: int = 0
    vocabulary_source: str = ""
    """What gives the vocabulary size, in words."""

    @property
    def world_size(self) -> int:
        return prod(astuple(self.degrees))

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Memory of each simulated rank, as JSON values."""
        return [rank.as_dict() for rank in self.costs.ranks]

    @property
    def peak_reserved_gib(self) -> float:
        return max(float(rank["peak_reserved_gib"]) for rank in self.ranks)

    @property
    def fits(self) -> bool:
        return self.peak_reserved_gib <= self.gpu.memory_gib

    @property
    def step_seconds(self) -> float:
        return self.costs.seconds["step"]

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.global_tokens / self.step_seconds / self.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization (PaLM, https://arxiv.org/abs/2204.02311), relative to the bfloat16 peak."""
        return self.model_flops_per_token * self.tokens_per_second_per_gpu / self.gpu.flops_bfloat16

    @property
    def days(self) -> float:
        """Duration of all steps in days."""
        return self.steps * self.step_seconds / 86400

    @property
    def gpu_hours(self) -> float:
        return self.days * 24 * self.world_size

    @property
    def dollars(self) -> float:
        """Price of all steps; 0 if the price of a GPU is not known."""
        return self.gpu_hours * self.dollars_per_gpu_hour

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON values."""
        return {
            "parameters": self.parameters,
            "vocab_size": self.vocab_size,
            "vocabulary_source": self.vocabulary_source,
            "ranks": self.ranks,
            "fits": self.fits,
            "memory_gib": self.gpu.memory_gib,
            "flops_per_step_per_rank": sum(self.costs.flops_by_phase.values()),
            "flops_by_phase": self.costs.flops_by_phase,
            "model_flops_per_token": self.model_flops_per_token,
            "collectives": self.costs.collectives,
            "step_seconds": self.step_seconds,
            "step_seconds_range": [self.step_seconds / (1 + sign * self.gpu.interval) for sign in (1, -1)],
            "seconds": self.costs.seconds,
            "seconds_by_kernel": self.costs.kernels,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu": self.mfu,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            **({"dollars": self.dollars} if self.dollars else {}),
        }


def with_few_microbatches(config: JobConfig) -> JobConfig:
    """``config`` with those microbatches of a run of the pipeline's schedule that represent all of them."""
    parallelism, training = config.parallelism, config.training
    ranks, count = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_microbatches
    few = representative_microbatches(count, ranks, parallelism.pipeline_parallel_schedule)
    if ranks == 1 or few == count:
        return config
    rows, runs = training.local_batch_size // count, training.global_batch_size // training.local_batch_size
    return replace(
        config,
        parallelism=replace(parallelism, pipeline_parallel_microbatches=few),
        training=replace(training, local_batch_size=rows * few, global_batch_size=rows * few * runs),
    )


def step_costs(
    records: Sequence[RankRecord], steps: Mapping[int, StepRecord], cost_model: CostModel, microbatches: int
) -> StepCosts:
    """Compute the costs of a step with ``microbatches`` microbatches; ``MAX_MICROBATCHES`` are simulated at most.

    Args:
        records: records of the simulated ranks.
        steps: the last step of each simulated rank, and of the ranks that were derived from them, by global rank.
    """
    ranks = [rank_memory(record) for record in records]

    def costs_of(operations: dict[int, list[Operation]]) -> StepCosts:
        times = replay(operations, cost_model)
        flops = {rank: flops_by_phase(own) for rank, own in operations.items()}
        busiest = max(flops, key=lambda rank: flops[rank].total())
        time = times[busiest]
        seconds = {"step": time.seconds, **time.by_phase, **{f"waiting for {k}": v for k, v in time.waiting.items()}}
        found = collectives(operations[busiest])
        return StepCosts(ranks, found, dict(flops[busiest]), seconds, dict(time.kernels))

    costs = costs_of({rank: step.operations for rank, step in steps.items()})
    if microbatches <= MAX_MICROBATCHES:
        return costs
    without_second = {}
    for rank, step in steps.items():
        second, third = step.microbatches[1:3]
        without_second[rank] = step.operations[:second] + step.operations[third:]
    return costs_of(without_second).extrapolated(costs, microbatches - MAX_MICROBATCHES + 1)


def rank_memory(record: RankRecord) -> RankMemory:
    """Summarize the memory of one simulated rank."""
    steps, omitted = record.recorder.steps, sum(record.omitted_bytes.values())
    peaks: list[dict[Location, LiveBytes]] = []
    by_stream: dict[int, dict[Location, float]] = {}
    for step in steps:
        name = merge_middle_layers(moment.module for moment in step.timeline)
        step_peaks: dict[Location, LiveBytes] = {}
        for phase, module, sizes, stream, stream_bytes in step.timeline:
            location, stream_peaks = (phase, name[module]), by_stream.setdefault(stream, {})
            sizes = tuple(size + record.omitted_bytes.get(key, 0) for key, size in zip(CATEGORIES, sizes, strict=True))
            step_peaks[location] = max(sizes, step_peaks.get(location, sizes), key=sum)
            stream_bytes += omitted if stream == 0 else 0
            stream_peaks[location] = max(stream_bytes, stream_peaks.get(location, 0))
        peaks.append(step_peaks)
    gradients = max(moment.sizes[CATEGORIES.index("gradients")] for moment in steps[-1].timeline)
    optimizer = steps[-1].live_at_end["optimizer"]
    memory = RankMemory(record.rank, record.parameter_bytes, gradients, optimizer, peaks, by_stream)
    allocations = [allocation for step in steps for allocation in step.allocations]
    fragmentation = peak_reserved(allocations) - memory.allocated + omitted
    return replace(memory, fragmentation=fragmentation)


def merge_middle_layers(modules: Iterable[str]) -> dict[str, str]:
    """Map module names to names in which all layers but the first and the last have the same name."""
    names = {module: module for module in modules}
    indices = {module: int(match[1]) for module in names if (match := LAYER_NAME.match(module))}
    ends = {min(indices.values(), default=-1): "first layer", max(indices.values(), default=-1): "last layer"}
    return {**names, **{module: ends.get(index, "middle layer") for module, index in indices.items()}}


def collectives(operations: Sequence[Operation]) -> list[dict[str, Any]]:
    """Count and total bytes of collectives, by mesh axis, operation and phase."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for operation in operations:
        if operation.axis:
            key = operation.axis, operation.name, operation.phase
            count, size = totals.get(key, (0, 0))
            totals[key] = count + 1, size + operation.bytes
    return [
        {"axis": axis, "op": op, "phase": phase, "count": count, "bytes": size}
        for (axis, op, phase), (count, size) in sorted(totals.items())
    ]


def flops_by_phase(operations: Sequence[Operation]) -> Counter[str]:
    """Total FLOPs by phase."""
    flops: Counter[str] = Counter()
    for operation in operations:
        if operation.flops:
            flops[operation.phase] += operation.flops
    return flops


def estimate(config: JobConfig, model_config: DecoderConfig, gpu: Gpu) -> Estimate:
    """Simulate representative ranks of a run, and estimate its memory and speed on ``gpu``.

    With ``estimate.all_layers`` or ``estimate.picture`` all layers are simulated. Otherwise ``SIMULATED_LAYERS`` are
    simulated in the smallest pipeline stage, then one more in each stage, and the costs are extrapolated linearly; the
    middle ranks of a pipeline are represented by one of them where possible, and the estimate contains the memory of
    that one only.

    Raises:
        ConfigError: the trainer would reject the config on this GPU.
    """
    config, degrees = resolve_and_check(config, model_config, gpu)
    cost_model = CostModel(gpu, Efficiency(), config)
    options, global_batch_size = section_of(config, EstimateConfig), config.training.global_batch_size
    microbatches = global_batch_size // degrees.batch // config.training.local_batch_size
    stages = config.parallelism.pipeline_parallel_layers_per_stage or (model_config.n_layers,)
    simulated: list[RankRecord] = []

    def costs_of(stages: tuple[int, ...]) -> StepCosts:
        parallelism = replace(config.parallelism, pipeline_parallel_layers_per_stage=stages)
        run_config = replace(config, parallelism=parallelism)
        run_model_config = replace(model_config, n_layers=sum(stages))
        ranks, representatives = representative_ranks(degrees), list(range(degrees.pipeline))
        if not options.all_layers and not options.picture:
            run_config = with_few_microbatches(run_config)
            representatives = representative_pipeline_ranks(
                stages, degrees.pipeline, parallelism.pipeline_parallel_schedule
            )
        records = {
            pipeline_rank: simulate(
                run_config,
                run_model_config,
                degrees,
                ranks[pipeline_rank],
                max_microbatches=MAX_MICROBATCHES,
                pipeline_microbatches=parallelism.pipeline_parallel_microbatches,
            )
            for pipeline_rank in sorted(set(representatives))
        }
        simulated[:] = records.values()
        steps = {}
        for pipeline_rank, representative in enumerate(representatives):
            record = records[representative]
            step = record.recorder.steps[-1]
            if pipeline_rank != representative or run_config.parallelism != parallelism:
                actions = record.pipeline_actions[pipeline_rank]
                schedule = parallelism.pipeline_parallel_schedule
                step = derive_step(step, representative, pipeline_rank, actions, ranks, schedule)
            steps[ranks[pipeline_rank]] = step
        return step_costs(simulated, steps, cost_model, microbatches)

    omitted_layers = min(stages) - SIMULATED_LAYERS
    # With selective checkpointing of every n-th layer, layers differ, so that they cannot be extrapolated.
    ac = config.activation_checkpoint
    layers_differ = ac.mode == "selective" and ac.selective_option != "op"
    if options.all_layers or options.picture or omitted_layers <= 1 or layers_differ:
        costs = costs_of(stages)
    else:
        few, more = (tuple(n - omitted_layers + extra for n in stages) for extra in (0, 1))
        costs = costs_of(few).extrapolated(costs_of(more), omitted_layers)
    tokens, flops = global_batch_size * config.training.seq_len, flops_per_token(model_config, config.training.seq_len)
    operation = DIRECT_CALLS[0] if degrees.context > 1 else "scaled_dot_product_attention"
    attention = "flex" if config.data.document_mask else kernel_of(operation, config.training, gpu.capability)
    return Estimate(
        gpu,
        degrees,
        costs,
        tokens,
        config.training.steps,
        flops,
        simulated,
        options.gpus_per_node,
        attention,
        options.dollars_per_gpu_hour,
        linear_conversion(config) is not None,
        count_parameters(model_config),
        model_config.vocab_size,
        vocabulary_source(config),
    )
