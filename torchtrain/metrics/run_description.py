"""Log the run configuration before the first step."""

import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.distributed.process_group import world_size
from torchtrain.logging import logger
from torchtrain.models.spec import DecoderConfig, count_parameters
from torchtrain.parallelisms.attention_backend import attention_backend_name


def describe(config: JobConfig, model: DecoderConfig, device: torch.device, degrees: ParallelDims) -> None:
    """Log model size, layout, dtypes and checkpoint settings. ``config``: the resolved config."""
    parameters = count_parameters(model)
    axes = [f"{axis} {degree}" for axis, degree in asdict(degrees).items() if degree > 1]
    ranks = f"{world_size()} rank(s) on {device.type}" + (f" ({' x '.join(axes)})" if axes else "")
    rows, dtype = config.training.global_batch_size, config.training.mixed_precision_param
    tokens = config.training.steps * rows * config.training.seq_len
    logger.info(
        f"{parameters:,} parameters, vocabulary {model.vocab_size}; {ranks}; {rows} sequences a step, "
        f"{config.training.steps} steps, {format_tokens(tokens)} tokens ({tokens / parameters:.3g} per parameter)"
    )
    numbers = dtype if config.float8.recipe == "none" else f"{dtype} and float8 ({config.float8.recipe})"
    compiled = "compiled" if config.compile.enable else "not compiled"
    attention = attention_backend_name(
        config.training.attention_backend,
        model,
        getattr(torch, dtype),
        device,
        documents=config.data.document_mask,
        split=degrees.context > 1,
    )
    logger.info(f"{numbers}, {compiled}; attention: {attention}")
    _describe_checkpoints(config, parameters)


def _describe_checkpoints(config: JobConfig, parameters: int) -> None:
    """Log when checkpoints are saved; warn if they are disabled, or if the disk has too little free space."""
    options, folder = config.checkpoint, Path(config.job.dump_folder)
    if not options.enable:
        logger.warning("checkpoint.enable = false: this run saves no checkpoints, and cannot be resumed")
        return
    moments = {"float32": 8, "bfloat16": 4}[config.optimizer.state_dtype]  # bytes; Muon has fewer
    size = parameters * (4 + moments + 4 * config.ema.enable)
    when = f"every {options.interval} steps"
    if options.interval_minutes:
        when += f" and {options.interval_minutes:g} minutes after the last one"
    kept = f"the newest {options.keep_latest_k} are kept" if options.keep_latest_k else "all are kept"
    logger.info(f"checkpoints of about {size / 1e9:,.1f} GB are saved {when}, and after the last step; {kept}")
    with suppress(OSError):
        free, needed = shutil.disk_usage(folder).free, size * (options.keep_latest_k + 1)
        if free < needed:
            logger.warning(
                f"{folder} has {free / 1e9:,.1f} GB left, and {options.keep_latest_k or 'its'} checkpoints and the one "
                f"being written may need {needed / 1e9:,.1f} GB: make room, name another job.dump_folder, or lower "
                "checkpoint.keep_latest_k"
            )
