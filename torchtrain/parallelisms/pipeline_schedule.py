"""Resolve and check the number of layers per pipeline stage and the number of pipeline microbatches."""

from torchtrain.config.schema import TrainingConfig
from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig
from torchtrain.parallelisms.options import ParallelismConfig

STAGES_PER_RANK = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2}
INTERLEAVED = ("Interleaved1F1B", "InterleavedZeroBubble")


def split_evenly(n_layers: int, stages: int) -> tuple[int, ...]:
    """Split layers evenly over stages, counting the embedding and the output as one layer each.

    This is the split of Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2).
    """
    assert n_layers >= stages
    layers = [1] * stages
    for _ in range(n_layers - stages):
        loads = [n + (i == 0) + (i == stages - 1) for i, n in enumerate(layers)]
        # Among equally loaded stages the last: earlier stages have more microbatches in flight, so each of their layers
        # takes more memory.
        layers[max(range(stages), key=lambda i: (-loads[i], i))] += 1
    return tuple(layers)


def resolve_layers_per_stage(model: DecoderConfig, parallelism: ParallelismConfig) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage, by default those of an even split.

    Raises:
        ConfigError: the model cannot be split as configured.
    """
    ranks, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    layers = parallelism.pipeline_parallel_layers_per_stage
    if model.tied_embeddings and schedule == "ZBVZeroBubble":
        raise ConfigError(
            "parallelism.pipeline_parallel_schedule = 'ZBVZeroBubble' puts the first and the last stage on one rank, "
            "which cannot have two replicas of the tied embeddings of this model; try InterleavedZeroBubble"
        )
    if not layers:
        stages = ranks * STAGES_PER_RANK[schedule]
        if stages > model.n_layers:
            raise ConfigError(
                f"parallelism.pipeline_parallel_degree = {ranks} makes {stages} stages with the schedule {schedule}, "
                f"and the model has only {model.n_layers} layers; each stage needs one: lower the degree"
                + (", or take a schedule with one stage a rank, such as 1F1B" if stages > ranks else "")
            )
        return split_evenly(model.n_layers, stages)
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
    """Return ``pipeline_parallel_microbatches`` with its default (-1) resolved to ``training.local_batch_size``.

    Raises:
        ConfigError: the schedule or the local batch size does not allow this number of microbatches.
    """
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
