"""Resolve the options that depend on the model and the number of ranks: each default becomes a number, once."""

from dataclasses import replace
from functools import partial

from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import resolve_tokens
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig, count_parameters
from torchtrain.parallelisms.pipeline_schedule import resolve_layers_per_stage, resolve_microbatches

MOST_TOKENS = 2**25
"""Maximum tokens of a rank per step: twice the global batch of Llama 3 (https://arxiv.org/abs/2407.21783)."""


def resolve_layout(config: JobConfig, model: DecoderConfig, world_size: int) -> tuple[JobConfig, ParallelDims]:
    """Return ``config`` with numbers in place of the defaults that depend on the layout, and its parallel dimensions.

    These are the data-parallel shard degree, the global batch size, the options in tokens, and with pipeline
    parallelism the microbatches and the layers of each stage. A resolved config is returned as it is.

    Raises:
        ConfigError: the degrees do not multiply to ``world_size``, the batch cannot be divided, or the layers cannot.
    """
    dims, parallelism = resolve_parallel_dims(config.parallelism, world_size), config.parallelism
    global_batch_size = resolve_global_batch_size(config, dims)
    # Without pipeline parallelism these options have no effect.
    layers: tuple[int, ...] = ()
    microbatches = parallelism.pipeline_parallel_microbatches
    if dims.pipeline > 1:
        layers = resolve_layers_per_stage(model, parallelism)
        microbatches = resolve_microbatches(parallelism, config.training)
    parallelism = replace(
        parallelism,
        data_parallel_shard_degree=dims.shard,
        pipeline_parallel_layers_per_stage=layers,
        pipeline_parallel_microbatches=microbatches,
    )
    training = replace(config.training, global_batch_size=global_batch_size)
    config = replace(config, parallelism=parallelism, training=training)
    return resolve_tokens(config, partial(count_parameters, model)), dims


def resolve_global_batch_size(config: JobConfig, degrees: ParallelDims) -> int:
    """Return ``training.global_batch_size`` with its default (-1) resolved.

    Raises:
        ConfigError: it is too large, or no multiple of local_batch_size times the data-parallel degree.
    """
    local, ranks, wanted = config.training.local_batch_size, degrees.batch, config.training.global_batch_size
    at_once = local * ranks
    if wanted == -1:
        return at_once
    tokens = wanted // ranks * config.training.seq_len
    if tokens > MOST_TOKENS:
        raise ConfigError(
            f"training.global_batch_size = {wanted} gives each data-parallel rank, of {ranks}, {tokens} tokens a step; "
            f"the limit is {MOST_TOKENS}. It counts sequences of training.seq_len tokens, not tokens: try "
            f"{max(1, wanted // config.training.seq_len)}"
        )
    if wanted % at_once:
        raise ConfigError(
            f"training.global_batch_size = {wanted} must be a multiple of local_batch_size = {local} times {ranks} "
            f"data-parallel ranks = {at_once}; try {nearest_multiples(wanted, at_once)}, or a local_batch_size that "
            "fits"
        )
    return wanted


def nearest_multiples(value: int, step: int) -> str:
    """The nearest multiples of ``step`` below and above ``value``, as text for an error message."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)
