"""Stages and microbatches of a pipeline, as the config says or leaves open; what cannot work is refused."""

from torchtrain.config.schema import ParallelismConfig, TrainingConfig
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import TransformerConfig

STAGES_PER_RANK = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


def layers_per_stage(n_layers: int, stages: int) -> tuple[int, ...]:
    """An even split in which the embedding and the output count as a layer each, as Llama 3's (section 3.3.2)."""
    assert n_layers >= stages
    layers = [1] * stages
    for _ in range(n_layers - stages):
        loads = [n + (i == 0) + (i == stages - 1) for i, n in enumerate(layers)]
        # Of equal ones the latest: an earlier stage has more microbatches in flight, so a layer costs it more memory.
        layers[max(range(stages), key=lambda i: (-loads[i], i))] += 1
    return tuple(layers)


def plan_stages(model: TransformerConfig, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Layers of each stage; ConfigError where the model cannot be split as the config says."""
    ranks, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    layers = parallelism.pipeline_parallel_layers_per_stage
    if ranks == 1:
        return (model.n_layers,)  # no pipeline, whatever the schedule
    if model.tied_embeddings and schedule == "ZBVZeroBubble":
        raise ConfigError(
            "parallelism.pipeline_parallel_schedule = 'ZBVZeroBubble' puts the first and the last stage on one rank, "
            "where they cannot hold the tied embeddings of this model twice; try InterleavedZeroBubble"
        )
    if not layers:
        stages = ranks * STAGES_PER_RANK[schedule]
        if stages > model.n_layers:
            raise ConfigError(
                f"parallelism.pipeline_parallel_degree = {ranks} makes {stages} stages with the schedule {schedule}, "
                f"and the model has only {model.n_layers} layers; each stage needs one: lower the degree"
                + (", or take a schedule with one stage a rank, such as 1F1B" if stages > ranks else "")
            )
        return layers_per_stage(model.n_layers, stages)
    given = f"parallelism.pipeline_parallel_layers_per_stage = {list(layers)}"
    if sum(layers) != model.n_layers:
        raise ConfigError(f"{given} must add up to the model's {model.n_layers} layers, not to {sum(layers)}")
    if len(layers) % ranks or (schedule not in INTERLEAVED and len(layers) != ranks * STAGES_PER_RANK[schedule]):
        count = f"a multiple of {ranks}" if schedule in INTERLEAVED else ranks * STAGES_PER_RANK[schedule]
        raise ConfigError(
            f"{given} has {len(layers)} stages; {schedule} on pipeline_parallel_degree = {ranks} needs {count}"
        )
    return layers


def resolve_microbatches(parallelism: ParallelismConfig, training: TrainingConfig) -> int:
    """``pipeline_parallel_microbatches`` with -1 filled in; ConfigError where the schedule cannot do with it."""
    ranks, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    sequences, count = training.local_batch_size, parallelism.pipeline_parallel_microbatches
    count = sequences if count == -1 else count
    given = f"parallelism.pipeline_parallel_microbatches = {count}"
    if sequences % count:
        divisors = ", ".join(str(n) for n in range(1, sequences + 1) if sequences % n == 0)
        raise ConfigError(f"{given} must divide training.local_batch_size = {sequences}; try one of {divisors}")
    if schedule == "1F1B" and count < ranks:
        raise ConfigError(
            f"{given} must be at least pipeline_parallel_degree = {ranks} for the schedule 1F1B: raise it (and "
            "training.local_batch_size, which it must divide), or take GPipe"
        )
    rounds = max(1, count // ranks)
    if schedule in INTERLEAVED and count % rounds:
        raise ConfigError(
            f"{given} must be a multiple of {rounds}, its rounds over {ranks} ranks, for the schedule {schedule}; "
            f"try {count // ranks * ranks}"
        )
    return count
