"""Which layout of a run is the fastest that fits."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Literal

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.parallelisms.pipeline_schedule import STAGES_PER_RANK, plan_stages
from torchtrain.parallelisms.validate import resolve_global_batch_size
from torchtrain.planning.hardware import GIB, Efficiency, Gpu
from torchtrain.planning.report import ranking_table
from torchtrain.planning.representative_ranks import first_of_each_kind
from torchtrain.planning.request import gpu_of, refuse, shape_of, world_size_of
from torchtrain.planning.summary import MICROBATCHES, estimate

BEST = 10  # layouts that are shown
# The first guess of memory is a rough one: what it says is this far above the GPU's is tried all the same.
ALLOWANCE = 1.15
SECONDS = 80  # of CPU time to simulate for, up to 64 GPUs; five times as much beyond
LOCAL_BATCHES = (1, 2, 4, 8, 16)
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SCHEDULES: tuple[Literal["1F1B", "Interleaved1F1B"], ...] = ("1F1B", "Interleaved1F1B")
RESHARD: tuple[Literal["default", "never"], ...] = ("default", "never")


def search(config: JobConfig, before_work: Callable[[], None]) -> tuple[str, JobConfig]:
    """A table of the ten best layouts, for people, and the first of them, without what was only asked of the planner.

    ``before_work`` is called once nothing is wrong with the config.

    Raises:
        ConfigError: none fits.
    """
    gpu, shape, size = gpu_of(config), shape_of(config), world_size_of(config)
    if config.training.global_batch_size == -1:
        batch = resolve_global_batch_size(config, resolve_parallel_dims(config.parallelism, size))
        config = replace(config, training=replace(config.training, global_batch_size=batch))
    own, guesses = [], []
    with suppress(ConfigError):
        degrees = refuse(config, shape, gpu)
        own = [replace(config, parallelism=replace(config.parallelism, data_parallel_shard_degree=degrees.shard))]
    for layout in layouts(config, shape):
        with suppress(ConfigError):
            guesses.append((*analytic_estimate(layout, shape, refuse(layout, shape, gpu), gpu), layout))
    if not (own or guesses):
        refuse(config, shape, gpu)  # says what is wrong with all of them, as far as it is with this one
    before_work()
    guesses.sort(key=lambda candidate: candidate[:2])
    promising = [layout for _, memory_gib, layout in guesses if memory_gib <= gpu.memory_gib * ALLOWANCE]
    tried, work, passed_over, began = [], 0, 0, time.process_time()
    budget = SECONDS if size <= 64 else 5 * SECONDS
    # First the config as it is: what is found is no slower.
    for layout in own + [layout for layout in promising if layout not in own]:
        spent, more = time.process_time() - began, forwards(layout, shape)
        # What would take too long, pipelines of many microbatches, is passed over.
        if work and spent + spent / work * more > budget:
            passed_over += 1
            continue
        tried.append((layout, replace(estimate(layout, shape, gpu), records=())))  # which are large
        work += more
    fitting = [(layout, found) for layout, found in tried if found.fits]
    best = sorted(fitting, key=lambda pair: -pair[1].tokens_per_second_per_gpu)[:BEST]
    if not best:
        raise ConfigError(
            f"none of the {len(tried)} most promising of {len(guesses)} layouts of {size} GPUs fits in "
            f"{gpu.memory_gib} GiB; take more GPUs, or training.enable_cpu_offload"
        )
    head = (
        f"{len(guesses)} layouts, {len(promising)} of which may fit; {len(tried)} rehearsed in "
        f"{time.process_time() - began:.0f} s of CPU time, {len(fitting)} of them fit; {passed_over} passed over for "
        "lack of time"
    )
    return f"{head}\n{ranking_table(best)}", replace(best[0][0], estimate=JobConfig().estimate)


def layouts(config: JobConfig, shape: TransformerConfig) -> Iterator[JobConfig]:
    """Every layout that keeps the global batch: degrees, local batch, checkpointing, schedule, reshard."""
    size, own = world_size_of(config), config.parallelism
    powers = [2**i for i in range(size.bit_length()) if size % 2**i == 0]
    tensors = [n for n in powers if n <= config.estimate.gpus_per_node and shape.n_kv_heads % n == 0]
    contexts = [n for n in powers if n == 1 or config.training.seq_len // n >= 8192]
    pipelines = [n for n in powers if n <= shape.n_layers // 2]
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if size % (tensor * context * pipeline):
            continue
        batch = size // (tensor * context * pipeline)
        for replicate in sorted({1, max(1, batch * tensor * context // config.estimate.gpus_per_node)}):
            if batch % replicate:
                continue
            schedules = SCHEDULES if pipeline > 1 else (own.pipeline_parallel_schedule,)
            reshards = RESHARD if pipeline == 1 and batch // replicate * context > 1 else RESHARD[:1]
            for local, mode, schedule, reshard in product(LOCAL_BATCHES, MODES, schedules, reshards):
                yield replace(
                    config,
                    training=replace(config.training, local_batch_size=local),
                    activation_checkpoint=replace(config.activation_checkpoint, mode=mode),
                    parallelism=replace(
                        own,
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
    config: JobConfig, shape: TransformerConfig, degrees: ParallelDims, gpu: Gpu
) -> tuple[float, float]:
    """Seconds of a step and GiB by closed forms, to know what to simulate first."""
    efficiency, global_batch_size = Efficiency(), resolve_global_batch_size(config, degrees)
    mode, piped = config.activation_checkpoint.mode, degrees.pipeline > 1
    local, seq = config.training.local_batch_size, config.training.seq_len
    heads = shape.head_size * 2 * (shape.n_heads + shape.n_kv_heads)
    block = shape.dim * (heads + 3 * shape.ffn_dim)
    output = shape.dim * shape.vocab_size
    matrices = shape.n_layers * block + output
    on_rank = (matrices + (0 if shape.tied_embeddings else output)) / degrees.tensor / degrees.pipeline
    count = global_batch_size // degrees.batch // local  # microbatches of a step, or runs of a pipeline
    in_run = local if piped else 1  # microbatches of a run, a sequence each

    # Memory: states; what is gathered, with its gradients; activations of what is under way; two copies of logits.
    whole = config.parallelism.fsdp_reshard_after_forward == "never" or piped
    gathered = (2 * on_rank if whole else 0.0) + 6 * (block + 2 * output) / degrees.tensor
    width = {
        "none": 6 * shape.dim + 2 * heads + 4 * shape.ffn_dim,
        "selective": 2 * shape.dim + heads + 2 * shape.ffn_dim,
        "full": shape.dim,
    }[mode]
    rows = local // in_run
    under_way = min(in_run, degrees.pipeline) * rows  # sequences, in the first stage
    layers = shape.n_layers / degrees.pipeline
    activations = 2 * under_way * seq / degrees.context / degrees.tensor * width * layers
    logits = 8 * seq * rows / degrees.context * shape.vocab_size / degrees.tensor
    memory = 16 * on_rank / degrees.fsdp + gathered + activations + min(logits, 4 * GIB)

    # Time: products, what of the traffic nothing hides, and a pipeline's idle share.
    again = {"none": 1.0, "selective": 1.15, "full": 4 / 3}[mode]
    attention = 6 * shape.n_layers * shape.n_heads * shape.head_size * seq  # half of its pairs are masked
    work = (flops_per_token(shape, seq) - attention) * again
    tokens = local * seq / degrees.context * count
    computing = work * tokens / degrees.tensor / degrees.pipeline / (gpu.flops_bfloat16 * efficiency.matrices)
    stages = STAGES_PER_RANK[config.parallelism.pipeline_parallel_schedule]
    computing *= 1 + (degrees.pipeline - 1) / (in_run * stages)
    near, far = gpu.link_bytes * efficiency.link, gpu.network_bytes * efficiency.network
    tensor = 16 * tokens * shape.dim * (1 - 1 / degrees.tensor) * layers / near
    node = config.estimate.gpus_per_node
    rate = near if degrees.tensor * degrees.fsdp <= node else far * max(1, node // degrees.tensor)
    times = count * ((2 if whole else 4) + 4 * in_run)
    sharding = times * on_rank / rate if degrees.fsdp > 1 else 0.0
    return max(computing + tensor, sharding) + 0.1 * min(computing, sharding), memory / GIB


def forwards(config: JobConfig, shape: TransformerConfig) -> int:
    """How many forwards of a stage a rehearsal of ``config`` runs, by which its time goes."""
    parallelism, local = config.parallelism, config.training.local_batch_size
    pipeline, stages = parallelism.pipeline_parallel_degree, plan_stages(shape, parallelism)
    batch = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    count = min(MICROBATCHES, config.training.global_batch_size // (batch * local))
    kinds = len(set(first_of_each_kind(stages, pipeline, parallelism.pipeline_parallel_schedule)))
    return count * (local if pipeline > 1 else 1) * kinds * len(stages) // pipeline
