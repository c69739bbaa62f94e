"""Which layout of a run is the fastest that fits."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Degrees
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.parallelisms.limits.layout import resolve_global_batch_size
from torchtrain.parallelisms.limits.pipeline import STAGES_PER_RANK, plan_stages
from torchtrain.planning.hardware import GIB, Efficiency, Gpu
from torchtrain.planning.stand_ins import first_of_each_kind
from torchtrain.planning.summary import MICROBATCHES, world_size_of

LOCAL_BATCHES = (1, 2, 4, 8, 16)
MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
SCHEDULES: tuple[Literal["1F1B", "Interleaved1F1B"], ...] = ("1F1B", "Interleaved1F1B")
RESHARD: tuple[Literal["default", "never"], ...] = ("default", "never")


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
            for local, mode, schedule, reshard in product(LOCAL_BATCHES, MODES, SCHEDULES, RESHARD):
                if pipeline == 1 and schedule != SCHEDULES[0]:
                    continue
                if reshard == "never" and (pipeline > 1 or batch // replicate * context == 1):
                    continue
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
                        pipeline_parallel_schedule=schedule if pipeline > 1 else own.pipeline_parallel_schedule,
                        pipeline_parallel_layers_per_stage=(),
                        fsdp_reshard_after_forward=reshard,
                    ),
                )


def guess(config: JobConfig, shape: TransformerConfig, degrees: Degrees, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a step and GiB by closed forms, to know what to rehearse first."""
    efficiency, global_batch_size = Efficiency(), resolve_global_batch_size(config, degrees)
    mode, piped = config.activation_checkpoint.mode, degrees.pipeline > 1
    local, seq = config.training.local_batch_size, config.training.seq_len
    heads = shape.head_size * 2 * (shape.n_heads + shape.n_kv_heads)
    block = shape.dim * (heads + 3 * shape.ffn_dim)
    output = shape.dim * shape.vocab_size
    matrices = shape.n_layers * block + output
    on_rank = (matrices + (0 if shape.tied_embeddings else output)) / degrees.tensor / degrees.pipeline
    count = global_batch_size // degrees.batch // local  # microbatches of a step, or runs of a pipeline

    # Memory: states; what is gathered, with its gradients; activations of what is under way; two copies of logits.
    whole = config.parallelism.fsdp_reshard_after_forward == "never" or piped
    gathered = 2 * on_rank if whole else 0.0
    gathered += 6 * (block + 2 * output) / degrees.tensor
    width = {
        "none": 6 * shape.dim + 2 * heads + 4 * shape.ffn_dim,
        "selective": 2 * shape.dim + heads + 2 * shape.ffn_dim,
        "full": shape.dim,
    }[mode]
    under_way = min(local, degrees.pipeline) if piped else local  # sequences, in the first stage
    layers = shape.n_layers / degrees.pipeline
    activations = 2 * under_way * seq / degrees.context / degrees.tensor * width * layers
    logits = 8 * seq * (1 if piped else local) / degrees.context * shape.vocab_size / degrees.tensor
    memory = 16 * on_rank / degrees.fsdp + gathered + activations + min(logits, 4 * GIB)

    # Time: products, what of the traffic nothing hides, and a pipeline's idle share.
    again = {"none": 1.0, "selective": 1.15, "full": 4 / 3}[mode]
    attention = 6 * shape.n_layers * shape.n_heads * shape.head_size * seq  # half of its pairs are masked
    work = (flops_per_token(shape, seq) - attention) * again
    tokens = local * seq / degrees.context * count
    computing = work * tokens / degrees.tensor / degrees.pipeline / (gpu.flops_bfloat16 * efficiency.matrices)
    if piped:
        stages = STAGES_PER_RANK[config.parallelism.pipeline_parallel_schedule]
        computing *= 1 + (degrees.pipeline - 1) / (local * stages)
    near, far = gpu.link_bytes * efficiency.link, gpu.network_bytes * efficiency.network
    tensor = 16 * tokens * shape.dim * (1 - 1 / degrees.tensor) * layers / near
    node = config.estimate.gpus_per_node
    rate = near if degrees.tensor * degrees.fsdp <= node else far * max(1, node // degrees.tensor)
    times = count * ((2 if whole else 4) + 4 * (local if piped else 1))
    sharding = times * on_rank / rate if degrees.fsdp > 1 else 0.0
    return max(computing + tensor, sharding) + 0.1 * min(computing, sharding), memory / GIB


def forwards(config: JobConfig, shape: TransformerConfig) -> int:
    """How many forwards of a stage a rehearsal of ``config`` runs, by which its time goes."""
    parallelism, local = config.parallelism, config.training.local_batch_size
    pipeline = parallelism.pipeline_parallel_degree
    batch = parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree
    count = min(MICROBATCHES, config.training.global_batch_size // (batch * local))
    if pipeline == 1:
        return count
    schedule = parallelism.pipeline_parallel_schedule
    kinds = len(set(first_of_each_kind(plan_stages(shape, parallelism), pipeline, schedule)))
    return count * local * kinds * STAGES_PER_RANK[schedule]
