"""What to change about a run that does not fit in memory, or that recomputes activations although memory is free."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig
from torchtrain.plugins.planner.hardware import Gpu
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.request import resolve_and_check
from torchtrain.plugins.planner.search import MODES
from torchtrain.plugins.planner.summary import Estimate, estimate

ATTEMPTS = 3
FREE_SHARE = 0.4
"""A run that leaves more of the memory free than this may recompute less."""
SEARCH = "--estimate.search tries all layouts"


def advice(config: JobConfig, result: Estimate, model_config: DecoderConfig, gpu: Gpu) -> str:
    """A line with options that make the run fit, or make it faster; empty if there is nothing to say.

    At most ``ATTEMPTS`` configs are simulated.

    Args:
        config: the run, whose estimate is ``result``.
    """
    depends_on_local_batch = config.training.global_batch_size == -1
    original = config
    config, _ = resolve_and_check(config, model_config, gpu)
    is_wasteful = result.peak_reserved_gib < (1 - FREE_SHARE) * gpu.memory_gib
    if result.fits and not (is_wasteful and config.activation_checkpoint.mode in MODES[1:]):
        return ""
    configs = less_recomputation(config) if result.fits else less_memory(config)
    for number, (options, changed) in enumerate(configs):
        if number == ATTEMPTS:
            break
        with suppress(ConfigError):
            found = estimate(changed, model_config, gpu)
            faster = found.tokens_per_second_per_gpu / result.tokens_per_second_per_gpu - 1
            if not found.fits or (result.fits and faster < 0.01):
                continue
            if depends_on_local_batch and changed.training.local_batch_size != config.training.local_batch_size:
                options += f" and training.global_batch_size = {config.training.global_batch_size}, as it is now"
            rate = f"{found.tokens_per_second_per_gpu:,.0f} tokens/s a GPU"
            text = f"{options} ({found.peak_reserved_gib:.1f} GiB, {rate})"
            if result.fits:
                return f"{faster:.0%} faster, and it fits: {text}; {SEARCH}"
            return f"it fits with {text}; {SEARCH}"
    return "" if result.fits else f"{more_gpus(original, result, model_config, gpu)}; {SEARCH}"


def more_gpus(config: JobConfig, result: Estimate, model_config: DecoderConfig, gpu: Gpu) -> str:
    """How many GPUs would be enough for the run, or for it with full activation checkpointing.

    Parameters, gradients and states are divided among the GPUs; the rest of the memory of a GPU stays as it is.

    Args:
        config: the run with the degrees as they are given, whose estimate is ``result``.
    """
    full = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="full"))
    for option, own in (("", config), ("activation_checkpoint.mode = 'full' and ", full)):
        if option and config.activation_checkpoint.mode == "full":
            continue
        found = result if not option else estimate(own, model_config, gpu)
        largest = max(found.ranks, key=lambda rank: rank["peak_reserved_gib"])
        divided = sum(largest[f"{kind}_gib"] for kind in ("parameters", "gradients", "optimizer"))
        room = gpu.memory_gib - (largest["peak_reserved_gib"] - divided)
        if room <= 0:
            continue
        times = 1 << math.ceil(math.log2(divided / room))
        for larger in (times, 2 * times):
            with suppress(ConfigError):
                more = estimate(_on_more_gpus(own, result.world_size, larger), model_config, gpu)
                if more.fits:
                    return f"it fits with {option}{more.world_size:,} GPUs ({more.peak_reserved_gib:.1f} GiB)"
    return (
        "more GPUs alone are not enough, because activations and gathered parameters take the memory of one: raise "
        "parallelism.tensor_parallel_degree or parallelism.context_parallel_degree"
    )


def _on_more_gpus(config: JobConfig, world_size: int, times: int) -> JobConfig:
    """``config`` on ``times`` as many GPUs, which shard parameters and states further."""
    shard = config.parallelism.data_parallel_shard_degree
    parallelism = replace(config.parallelism, data_parallel_shard_degree=shard if shard == -1 else shard * times)
    options = replace(section_of(config, EstimateConfig), world_size=world_size * times)
    batch = config.training.global_batch_size
    training = replace(config.training, global_batch_size=-1 if batch % (world_size * times) else batch)
    return replace(
        config,
        parallelism=parallelism,
        training=training,
        plugins={**config.plugins, EstimateConfig.section_name: options},
    )


def less_memory(config: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """Options and configs that take less memory, those that cost least first."""
    mode, batch = config.activation_checkpoint.mode, config.training.local_batch_size
    stronger = MODES[MODES.index(mode) + 1 :] if mode in MODES else ()
    for size in (batch, batch // 2, batch // 4):
        if size and batch % size == 0:
            for recomputed in (*([mode] if size < batch else []), *stronger):
                yield _changed(config, recomputed, size)


def less_recomputation(config: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """Options and configs that recompute fewer activations, the fewest first."""
    for mode in MODES[: MODES.index(config.activation_checkpoint.mode)]:
        yield _changed(config, mode, config.training.local_batch_size)


def _changed(config: JobConfig, mode: str, batch: int) -> tuple[str, JobConfig]:
    options = []
    if mode != config.activation_checkpoint.mode:
        options.append(f"activation_checkpoint.mode = {mode!r}")
    if batch != config.training.local_batch_size:
        options.append(f"training.local_batch_size = {batch}")
    changed = replace(
        config,
        activation_checkpoint=replace(config.activation_checkpoint, mode=mode),  # type: ignore[arg-type]
        training=replace(config.training, local_batch_size=batch),
    )
    return " and ".join(options), changed
