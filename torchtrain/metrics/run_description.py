"""Describe a run before its first step: a banner in the log, and the same as a record in ``metrics.jsonl``."""

import math
import os
import platform
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchtrain import __version__
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.cpu.build import has_batched_attention_backward
from torchtrain.datasets.data_source import DataSource, SourceSize, TextInput
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.distributed.process_group import rank
from torchtrain.files import is_url
from torchtrain.logging import BestEffort, aligned, counted, logger, terminal_width
from torchtrain.metrics.options import ValidationConfig
from torchtrain.models.spec import DecoderConfig, count_parameters
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import EMAConfig, LRSchedulerConfig, OptimizerConfig
from torchtrain.parallelisms.attention_backend import attention_backend_name
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.parallelisms.options import ActivationCheckpointConfig, CompileConfig


@dataclass(frozen=True)
class RunDescription:
    """What is trained, on what, and how."""

    title: str
    rows: Sequence[tuple[str, str]]
    """Label and text of each line of the banner."""
    record: dict[str, Any]
    """The same as numbers and texts, for the event ``start`` in ``metrics.jsonl``."""

    def log(self) -> None:
        """Log the banner."""
        logger.info("%s\n%s", self.title, aligned(self.rows, terminal_width()))


def describe_run(
    config: JobConfig,
    model: DecoderConfig,
    device: torch.device,
    dims: ParallelDims,
    sources: Sequence[DataSource | TextInput],
    tokenizer: Tokenizer,
    start_step: int,
    resumes_from: str,
) -> RunDescription:
    """Describe the run with the resolved ``config``.

    Args:
        device: what the run trains on; it may be a GPU where there is none, as for ``resolve.check_run``.
        sources: those of ``config.data``. Only rank 0 asks them for their sizes. That of text is not known.
        start_step: the step from which the run resumes; 0 in a new run.
        resumes_from: what has the state of this step.
    """
    training = config.training
    rows_per_step = training.global_batch_size
    tokens_per_step = rows_per_step * training.seq_len
    plan = plan_of(config)
    steps = plan.last_step
    total = plan.tokens_after(steps)
    parameters = count_parameters(model)
    whose = "the run " * plan.has_stages
    ratio = f"{total / parameters:.2g}" if total < 100 * parameters else f"{total / parameters:,.0f}"
    length = f"{whose}in {counted(steps, 'step')} {format_tokens(total)}, {ratio} per parameter"
    layout = {axis: degree for axis, degree in asdict(dims).items() if degree > 1}
    family = config.model.hf_folder or f"{model.family} {config.model.flavor}".strip()
    data = describe_sources(config, sources, tokenizer)
    rows = [
        ("versions", f"torchtrain {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"),
        ("devices", _devices(device, layout)),
        (
            "model",
            f"{family}, {parameters:,} parameters, vocabulary {model.vocab_size:,}, seq_len {training.seq_len:,}",
        ),
        *(("data", text) for text in _source_rows(data)),
        ("validation", _validation(config.validation, config.data)),
        *plan.banner(),
        (
            "batch",
            f"{counted(rows_per_step, 'sequence')}, {tokens_per_step:,} tokens; {length}",
        ),
        ("optimizer", _optimizer(config.optimizer, training.max_norm, config.ema)),
        ("schedule", _schedule(config.lr_scheduler, config.optimizer.lr, training.steps)),
        ("precision", _precision(config, model, device, dims)),
        ("compile", _compile(config.compile, config.activation_checkpoint)),
        ("checkpoints", _checkpoints(config.checkpoint, _checkpoint_size(config.optimizer, config.ema, parameters))),
        ("start", f"resumes from {resumes_from}" if start_step else _start(config)),
    ]
    name = Path(config.job.dump_folder).name
    title = f"run {name}: {config.job.config_file or 'no config file'}, outputs in {config.job.dump_folder}"
    record = {
        "config_file": config.job.config_file,
        "parameters": parameters,
        "vocab_size": model.vocab_size,
        "seq_len": training.seq_len,
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "total_tokens": total,
        "layout": layout,
        "sources": data,
        "banner": [[label, text] for label, text in rows],
    }
    return RunDescription(title, rows, record)


def describe_sources(
    config: JobConfig, sources: Sequence[DataSource | TextInput], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """For each source its label, share, size, and the epochs that the run reads of it; None where unknown.

    The share is that of the stage of the run with ``config``; the epochs are those of all stages.
    """
    plan, described = plan_of(config), []
    for number, (source_config, source) in enumerate(zip(config.data.all, sources, strict=True)):
        size = SourceSize()
        if rank() == 0:
            with BestEffort(f"the size of {source.name}"):
                size = source.size(tokenizer)
        tokens = sum(_share(stage.data, number) * plan.tokens_of(index) for index, stage in enumerate(plan.stages))
        described.append(
            {
                "source": source_config.title or source_config.source_type,
                "share": _share(config.data, number),
                "tokens": size.tokens,
                "tokens_are_an_estimate": size.is_estimate,
                "bytes": size.text_bytes,
                "epochs": tokens / size.tokens if size.tokens else None,
            }
        )
    return described


def _share(data: DataConfig, number: int) -> float:
    """The share of source ``number`` in the tokens of the stage with ``data``; 0 if only later stages have it."""
    weights = [source.weight for source in data.all]
    return weights[number] / sum(weights) if number < len(weights) else 0.0


def _source_rows(sources: Sequence[dict[str, Any]]) -> list[str]:
    """One line per source, that with the largest weight first."""
    rows = []
    for source in sorted(sources, key=lambda source: -source["share"]):
        about = "about " if source["tokens_are_an_estimate"] else ""
        words = [f"weight {source['share']:.3g}"] if len(sources) > 1 else []
        words += [f"{source['bytes'] / 1e6:,.3g} MB"] if source["bytes"] else []
        words += [f"{about}{format_tokens(source['tokens'])} tokens"] if source["tokens"] else []
        words += ["size not known"] if not (source["bytes"] or source["tokens"]) else []
        if source["epochs"]:
            words.append(f"{source['epochs']:,.2f} epochs" if source["epochs"] >= 0.01 else "under 0.01 epochs")
        rows.append(f"{source['source']}: {', '.join(words)}")
    return rows


def _devices(device: torch.device, layout: dict[str, int]) -> str:
    ranks = math.prod(layout.values())
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks
    if device.type == "cpu":
        name = f"cpu ({platform.machine()})"
    else:
        name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "GPUs"
    machines = f" on {-(-ranks // local)} machines" if ranks > local else ""
    axes = " x ".join(f"{axis} {degree}" for axis, degree in layout.items())
    return f"{name}, {counted(ranks, 'rank')}{machines}{f': {axes}' if axes else ''}"


def _validation(options: ValidationConfig, data: DataConfig) -> str:
    if not (options.enable or data.largest_held_out):
        return "off (data.held_out, validation.enable)"
    labels = [source.title or source.source_type for source in options.all if options.enable]
    labels += [f"{s.held_out:.2%} of {s.title or s.source_type}" for s in data.all if s.held_out]
    return f"{', '.join(labels)}, every {counted(options.interval, 'step')} and at the end"


def _optimizer(options: OptimizerConfig, max_norm: float, averages: EMAConfig) -> str:
    ema = f", EMA with decay {averages.decay:g}" if averages.enable else ""
    return (
        f"{options.name}, learning rate {options.lr:g}, weight decay {options.weight_decay:g}, clipping at "
        f"{max_norm:g}{ema}"
    )


def _schedule(options: LRSchedulerConfig, lr: float, steps: int) -> str:
    phases = LRSchedule(options, lr, steps).phases
    warmup = f"warm-up of {counted(phases.warmup, 'step')}, then " if phases.warmup else ""
    if options.decay_type == "constant" or not phases.decay:
        return f"{warmup}constant"
    stable = phases.total - phases.warmup - phases.decay
    constant = f"constant for {counted(stable, 'step')}, then " if stable else ""
    last = f"{lr * phases.min_lr_factor:g}"
    return f"{warmup}{constant}{options.decay_type} to {last} after step {options.start_step + phases.total:,}"


def _precision(config: JobConfig, model: DecoderConfig, device: torch.device, dims: ParallelDims) -> str:
    training, documents = config.training, config.data.document_mask
    dtype, backend = training.mixed_precision_param, training.attention_backend
    conversion = linear_conversion(config)
    converted = f" and {conversion.label}" if conversion is not None else ""
    sums = "" if config.training.sums == "fast" else f", {config.training.sums} sums"
    context = dims.context > 1
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"{dtype}{converted}{sums}; attention: {backend}"
    attention = attention_backend_name(
        backend, model, getattr(torch, dtype), device, documents=documents, context=context
    )
    causal = not context and not documents
    if device.type == "cpu" and causal and has_batched_attention_backward(backend, getattr(torch, dtype)):
        attention += ", backward in batched products"
    return f"{dtype}{converted}{sums}; attention: {attention}"


def _compile(options: CompileConfig, checkpointing: ActivationCheckpointConfig) -> str:
    return f"{'on' if options.enable else 'off'}; activation checkpointing: {checkpointing.mode}"


def _checkpoint_size(optimizer: OptimizerConfig, averages: EMAConfig, parameters: int) -> int:
    """Bytes of a checkpoint, at most: some optimizers have fewer states than two."""
    moments = {"float32": 8, "bfloat16": 4}[optimizer.state_dtype]
    return parameters * (4 + moments + 4 * averages.enable)


def _checkpoints(options: CheckpointConfig, size_bytes: int) -> str:
    if not options.enable:
        return "off (checkpoint.enable = false): the run cannot be resumed"
    minutes = (
        f" and {options.interval_minutes:g} minute{'s' * (options.interval_minutes != 1)}"
        if options.interval_minutes
        else ""
    )
    kept = f"the newest {options.keep_latest_k} kept" if options.keep_latest_k else "all kept"
    if options.keep_latest_k and options.keep_every:
        kept += f" and each {options.keep_every:,} steps one"
    if options.keep_latest_k and options.keep_best_k:
        kept += f" and the best {options.keep_best_k}"
    size = f"{size_bytes / 1e9:.3g} GB each"
    return f"every {counted(options.interval, 'step')}{minutes}, {kept}, {size}"


def _start(config: JobConfig) -> str:
    if config.checkpoint.initial_load_path:
        return f"new run, weights of {config.checkpoint.initial_load_path}"
    return f"new run, initial weights of seed {config.training.seed}"


def most_checkpoints(config: JobConfig, start_step: int) -> int:
    """The number of checkpoints that a run which continues from ``start_step`` may still add to those that are kept.

    With the one that is being written. Those that only ``interval_minutes`` asks for are not counted if all are kept.
    """
    options, plan = config.checkpoint, plan_of(config)
    if not options.keep_latest_k:
        return -(-(plan.last_step - start_step) // options.interval)
    kept = options.keep_latest_k + options.keep_best_k * len(plan.stages)
    if options.keep_every:
        kept += plan.last_step // options.keep_every - start_step // options.keep_every
    return kept + 1


def warn_about_validation(options: ValidationConfig) -> None:
    """Warn if data to validate on are named in vain."""
    if not options.enable and (options.sources or options.is_set):
        logger.warning(
            "[validation] names data, and validation.enable is false: the model is not validated on them; set "
            "validation.enable = true"
        )


def warn_about_checkpoints(config: JobConfig, model: DecoderConfig, start_step: int) -> None:
    """Warn if the disk has too little room for the checkpoints."""
    options = config.checkpoint
    if not options.enable:
        return
    location = options.location(config.job.dump_folder)
    if is_url(location):
        return
    folder = Path(location)
    while not folder.exists() and folder != folder.parent:  # it is created by the first save
        folder = folder.parent
    with suppress(OSError):
        count = most_checkpoints(config, start_step)
        free, needed = (
            shutil.disk_usage(folder).free,
            count * _checkpoint_size(config.optimizer, config.ema, count_parameters(model)),
        )
        if free < needed:
            keep = {name: getattr(options, name) for name in ("keep_latest_k", "keep_every", "keep_best_k")}
            set_options = ", ".join(f"{name} = {value}" for name, value in keep.items() if value) or "keep_latest_k = 0"
            logger.warning(
                f"{folder} has {free / 1e9:,.1f} GB left, and up to {counted(count, 'checkpoint')} "
                f"(checkpoint.{set_options}, and the one being written) may need {needed / 1e9:,.1f} GB: make room, "
                "name another job.dump_folder or checkpoint.folder, or keep fewer"
            )
