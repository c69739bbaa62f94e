"""Search for the fastest layout of a training run that fits in memory."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.environment import cores_of_process
from torchtrain.errors import ConfigError
from torchtrain.logging import counted, logger
from torchtrain.models.spec import DecoderConfig, flops_per_token, matrix_shapes
from torchtrain.parallelisms.pipeline_schedule import STAGES_PER_RANK
from torchtrain.parallelisms.resolve import resolve_global_batch_size
from torchtrain.plugins.planner.estimate_pool import EstimatePool
from torchtrain.plugins.planner.hardware import GIB, Efficiency, Gpu
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.report import format_layout, format_ranking
from torchtrain.plugins.planner.representative_ranks import (
    representative_microbatches,
    representative_pipeline_ranks,
)
from torchtrain.plugins.planner.request import (
    resolve_and_check,
    resolve_gpu,
    resolve_model_config,
    resolve_world_size,
)
from torchtrain.plugins.planner.summary import MAX_MICROBATCHES, Estimate

LAYOUTS_SHOWN = 10
# The analytic estimate of memory is rough: layouts up to this factor above the GPU's memory are simulated.
MEMORY_TOLERANCE = 1.15
CPU_SECONDS = 80  # of each core: default of estimate.search_seconds up to 64 GPUs; five times as much beyond
MAX_PROCESSES = 16  # of 0.6 GB of memory each
LOCAL_BATCHES = (1, 2, 4, 8, 16)
INTERRUPTED = "because of Ctrl-C"
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SCHEDULES: tuple[Literal["1F1B", "Interleaved1F1B"], ...] = ("1F1B", "Interleaved1F1B")
RESHARD: tuple[Literal["default", "never"], ...] = ("default", "never")


@dataclass(frozen=True)
class SearchResult:
    table: str  # of the ``LAYOUTS_SHOWN`` fastest layouts, with a line about the search
    best: JobConfig  # the config of the fastest layout, with the default [estimate]
    is_complete: bool  # False: Ctrl-C ended the search


def search(config: JobConfig, before_work: Callable[[], None]) -> SearchResult:
    """Simulate the most promising layouts of ``config``, and rank those that fit by tokens per second.

    The candidates are sorted by ``analytic_estimate``. The layout of ``config`` itself is simulated first, so the
    result is not slower than it; then the best candidates, on all cores. A log line shows each of them and the best so
    far. After Ctrl-C the result is that of the layouts so far, if one of them fits.

    Args:
        config: the run to search a layout for; it keeps its global batch size.
        before_work: called after validation and before the first simulation.

    Raises:
        ConfigError: no layout is valid, or no simulated layout fits.
    """
    gpu, model_config, world_size = resolve_gpu(config), resolve_model_config(config), resolve_world_size(config)
    if config.training.global_batch_size == -1:
        batch = resolve_global_batch_size(config, resolve_parallel_dims(config.parallelism, world_size))
        config = replace(config, training=replace(config.training, global_batch_size=batch))
    given, candidates = [], []
    with suppress(ConfigError):
        given = [resolve_and_check(config, model_config, gpu)[0]]
    for layout in candidate_layouts(config, model_config):
        with suppress(ConfigError):
            resolved, degrees = resolve_and_check(layout, model_config, gpu)
            if resolved not in given:
                candidates.append((*analytic_estimate(resolved, model_config, degrees, gpu), resolved))
    if not (given or candidates):
        resolve_and_check(config, model_config, gpu)  # raises the error of the layout in the config
    before_work()
    candidates.sort(key=lambda candidate: candidate[:2])
    most_gib = gpu.memory_gib * MEMORY_TOLERANCE
    layouts = given + [layout for _, memory_gib, layout in candidates if memory_gib <= most_gib]
    count = len(given) + len(candidates)
    budget = section_of(config, EstimateConfig).search_seconds or (CPU_SECONDS if world_size <= 64 else 5 * CPU_SECONDS)
    simulated: dict[int, tuple[JobConfig, Estimate]] = {}
    fastest, cpu_seconds, why = 0.0, 0.0, "for lack of time (estimate.search_seconds)"
    try:
        with closing(estimates_within(budget, layouts, model_config, gpu)) as estimates:
            for number, result, seconds in estimates:
                simulated[number] = layouts[number], result
                cpu_seconds += seconds
                fastest = max(fastest, result.tokens_per_second_per_gpu if result.fits else 0.0)
                logger.info(
                    "layout %d of %d: %s; %s",
                    *(number + 1, len(layouts), format_layout(layouts[number], result)),
                    f"the best so far {fastest:,.0f} tokens/s" if fastest else "none fits so far",
                )
    except KeyboardInterrupt:
        if not fastest:
            raise
        why = INTERRUPTED
    except BrokenProcessPool:
        why = "because a process of the search was killed, perhaps for lack of memory"
    fitting = [(layout, result) for _, (layout, result) in sorted(simulated.items()) if result.fits]
    best = sorted(fitting, key=lambda pair: -pair[1].tokens_per_second_per_gpu)[:LAYOUTS_SHOWN]
    skipped = len(layouts) - len(simulated)
    if not best:
        more = f"; {skipped} others were skipped {why}" if skipped else ""
        raise ConfigError(
            f"none of the {len(simulated)} most promising of {counted(count, 'layout')} on "
            f"{counted(world_size, 'GPU')} fits in {gpu.memory_gib} GiB{more}; use more GPUs, or set "
            "training.enable_cpu_offload = true"
        )
    head = (
        f"{count} layouts, of which {len(layouts)} may fit\n{len(simulated)} simulated in "
        f"{cpu_seconds:.0f} s of CPU time, {len(fitting)} of them fit; {skipped} skipped {why}"
    )
    fastest_config = best[0][0]
    of_run = {name: section for name, section in fastest_config.plugins.items() if name != EstimateConfig.section_name}
    own = replace(fastest_config, plugins=of_run)
    return SearchResult(f"{head}\n{format_ranking(best)}", own, is_complete=why is not INTERRUPTED)


def estimates_within(
    budget: float, layouts: Sequence[JobConfig], model_config: DecoderConfig, gpu: Gpu
) -> Generator[tuple[int, Estimate, float], None, None]:
    """Estimate ``layouts`` on all cores, but for those that would exceed ``budget``, in CPU seconds of each core.

    The first one is estimated alone, and whatever the budget. Those that are skipped are the expensive ones, such as
    pipelines with many microbatches: their time is predicted from that of the others.

    Yields:
        In the order in which they are ready: the index of a layout, its estimate, and the CPU seconds that it took.
    """
    if not layouts:
        return
    works = [stage_forwards(layout, model_config) for layout in layouts]
    processes = min(cores_of_process(), MAX_PROCESSES, len(layouts))
    waiting = list(range(len(layouts)))
    done, spent, taken = 0, 0.0, works[0]  # ``taken`` contains what is under way
    with EstimatePool(model_config, gpu, processes) as pool:
        pool.submit(waiting.pop(0), layouts[0])
        while ready := pool.wait():
            for number, result, seconds in ready:
                done, spent = done + works[number], spent + seconds
                yield number, result, seconds
            for number in waiting.copy():
                if pool.is_full:
                    break
                if spent / done * (taken + works[number]) <= budget * processes:
                    pool.submit(number, layouts[number])
                    waiting.remove(number)
                    taken += works[number]


def candidate_layouts(config: JobConfig, model_config: DecoderConfig) -> Iterator[JobConfig]:
    """Yield layouts with the global batch size of ``config``.

    They vary the degrees of parallelism, local batch size, activation checkpointing, pipeline schedule and resharding.
    """
    size, parallelism = resolve_world_size(config), config.parallelism
    node = section_of(config, EstimateConfig).gpus_per_node
    powers = [2**i for i in range(size.bit_length()) if size % 2**i == 0]
    tensors = [n for n in powers if n <= node and model_config.n_kv_heads % n == 0]
    contexts = [n for n in powers if n == 1 or config.training.seq_len // n >= 8192]
    pipelines = [n for n in powers if n <= model_config.n_layers // 2]
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if size % (tensor * context * pipeline):
            continue
        batch = size // (tensor * context * pipeline)
        for replicate in sorted({1, max(1, batch * tensor * context // node)}):
            if batch % replicate:
                continue
            schedules = SCHEDULES if pipeline > 1 else (parallelism.pipeline_parallel_schedule,)
            reshards = RESHARD if pipeline == 1 and batch // replicate * context > 1 else RESHARD[:1]
            for local, mode, schedule, reshard in product(LOCAL_BATCHES, MODES, schedules, reshards):
                yield replace(
                    config,
                    training=replace(config.training, local_batch_size=local),
                    activation_checkpoint=replace(config.activation_checkpoint, mode=mode),
                    parallelism=replace(
                        parallelism,
                        data_parallel_replicate_degree=replicate,
                        data_parallel_shard_degree=batch // replicate,
                        tensor_parallel_degree=tensor,
                        context_parallel_degree=context,
                        pipeline_parallel_degree=pipeline,
                        pipeline_parallel_schedule=schedule,
                        pipeline_parallel_layers_per_stage=(),
                        fsdp_reshard_after_forward=reshard,
                    ),
                )


def analytic_estimate(
    config: JobConfig, model_config: DecoderConfig, degrees: ParallelDims, gpu: Gpu
) -> tuple[float, float]:
    """Estimate the seconds of a step and the GiB of memory by closed forms, to order layouts before simulation.

    Weights are bfloat16 and optimizer states float32. FLOPs per token are those of ``flops_per_token``.
    """
    efficiency, global_batch_size = Efficiency(), config.training.global_batch_size
    mode, pipelined = config.activation_checkpoint.mode, degrees.pipeline > 1
    local, seq = config.training.local_batch_size, config.training.seq_len
    heads = model_config.head_size * 2 * (model_config.n_heads + model_config.n_kv_heads)
    matrices = {name: prod(shape) for name, shape in matrix_shapes(model_config).items()}
    output = matrices.pop("output.weight")
    block = sum(matrices.values()) // model_config.n_layers
    elements = model_config.n_layers * block + output + (0 if model_config.tied_embeddings else output)
    rank_elements = elements / degrees.tensor / degrees.pipeline
    count = global_batch_size // degrees.batch // local  # microbatches per step, or runs of the pipeline schedule
    run_microbatches = local if pipelined else 1  # of one sequence each, in one run of the schedule

    # Memory: states, unsharded parameters with their gradients, activations in flight, and two copies of the logits.
    unsharded = config.parallelism.fsdp_reshard_after_forward == "never" or pipelined
    gathered = (2 * rank_elements if unsharded else 0.0) + 6 * (block + 2 * output) / degrees.tensor
    width = {
        "none": 6 * model_config.dim + 2 * heads + 4 * model_config.ffn_dim,
        "selective": 2 * model_config.dim + heads + 2 * model_config.ffn_dim,
        "full": model_config.dim,
    }[mode]
    rows = local // run_microbatches
    in_flight = min(run_microbatches, degrees.pipeline) * rows  # sequences, in the first stage
    layers = model_config.n_layers / degrees.pipeline
    activations = 2 * in_flight * seq / degrees.context / degrees.tensor * width * layers
    logits = 8 * seq * rows / degrees.context * model_config.vocab_size / degrees.tensor
    memory = 16 * rank_elements / degrees.fsdp + gathered + activations + min(logits, 4 * GIB)

    # Time: computation with recomputation and the pipeline bubble, and the communication that does not overlap with it.
    recompute_factor = {"none": 1.0, "selective": 1.15, "full": 4 / 3}[mode]
    # Half of the pairs in attention are masked.
    attention = 6 * model_config.n_layers * model_config.n_heads * model_config.head_size * seq
    flops = (flops_per_token(model_config, seq) - attention) * recompute_factor
    tokens = local * seq / degrees.context * count
    compute = flops * tokens / degrees.tensor / degrees.pipeline / (gpu.flops_bfloat16 * efficiency.matmul)
    stages = STAGES_PER_RANK[config.parallelism.pipeline_parallel_schedule]
    compute *= 1 + (degrees.pipeline - 1) / (run_microbatches * stages)
    link, network = gpu.link_bandwidth * efficiency.link, gpu.network_bandwidth * efficiency.network
    tensor_parallel = 16 * tokens * model_config.dim * (1 - 1 / degrees.tensor) * layers / link
    node = section_of(config, EstimateConfig).gpus_per_node
    rate = link if degrees.tensor * degrees.fsdp <= node else network * max(1, node // degrees.tensor)
    element_bytes = count * ((2 if unsharded else 4) + 4 * run_microbatches)  # gathered and reduced, per element
    sharding = element_bytes * rank_elements / rate if degrees.fsdp > 1 else 0.0
    return max(compute + tensor_parallel, sharding) + 0.1 * min(compute, sharding), memory / GIB


def stage_forwards(config: JobConfig, model_config: DecoderConfig) -> int:
    """Number of stage forwards that a simulation of ``config`` runs, to which its CPU time is proportional."""
    parallelism, local = config.parallelism, config.training.local_batch_size
    pipeline = parallelism.pipeline_parallel_degree
    stages = parallelism.pipeline_parallel_layers_per_stage or (model_config.n_layers,)
    batch = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    count = min(MAX_MICROBATCHES, config.training.global_batch_size // (batch * local))
    simulated = len(set(representative_pipeline_ranks(stages, pipeline, parallelism.pipeline_parallel_schedule)))
    microbatches = representative_microbatches(local, pipeline, parallelism.pipeline_parallel_schedule)
    return count * (microbatches if pipeline > 1 else 1) * simulated * len(stages) // pipeline
