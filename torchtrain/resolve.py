"""A run before it starts: its config is resolved and checked, so that a mistake in it is reported within seconds."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torchtrain.checkpoint.saved_run import SavedRun
from torchtrain.checkpoint.states import parameter_shapes
from torchtrain.checkpoint.weights import find_weights, resolve_model_section, with_longest_context
from torchtrain.config.parse import by_folder, train_configs
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.build import check_data, document_start
from torchtrain.datasets.builtin_sources import pinned
from torchtrain.datasets.data_source import DataSource, TextInput
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.devices import memory_of
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.distributed.process_group import pick_device
from torchtrain.errors import ConfigError
from torchtrain.files import is_url, require_folder
from torchtrain.logging import logger
from torchtrain.metrics.run_description import describe_run
from torchtrain.metrics.writers import check_writers
from torchtrain.models.model_config import build_model_config
from torchtrain.models.options import ModelConfig
from torchtrain.models.spec import DecoderConfig
from torchtrain.optimizers.groups import check_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms.attention_backend import check_attention_backend
from torchtrain.parallelisms.check import check_layout, check_memory
from torchtrain.parallelisms.resolve import resolve_layout

ASSUMED_CAPABILITY = (9, 0)
"""Compute capability of a GPU for which all options are valid, where a run is checked without one."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a number of ranks: in its config, each -1 and path of a model is replaced by what it stands for."""

    config: JobConfig
    tokenizer: Tokenizer
    model_config: DecoderConfig
    parallel_dims: ParallelDims


def resolve(config: JobConfig, ranks: int, saved: SavedRun) -> ResolvedRun:
    """Resolve ``config`` for a number of ranks."""
    if config.model.hf_folder:
        config = replace(config, model=resolve_model_section(config.model))
    if config.checkpoint.initial_load_path or saved.exists:
        config = with_longest_context(config, saved)
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    model_config = build_model_config(config.model, tokenizer, config.training.seq_len, config.mup)
    config, dims = resolve_layout(config, model_config, ranks)
    return ResolvedRun(config, tokenizer, model_config, dims)


def check_config(run: ResolvedRun, device: torch.device, saved: SavedRun) -> None:
    """Raise ConfigError if the device or layout does not support ``run``, or a package or file is missing."""
    check_attention_backend(run.config.training.attention_backend, device)
    check_layout(run.config, device, run.parallel_dims, run.model_config)
    if not run.config.training.enable_cpu_offload:
        check_memory(run.config, run.parallel_dims, run.model_config, *memory_of(device))
    check_options(run, device, saved)


def check_options(run: ResolvedRun, device: torch.device, saved: SavedRun) -> None:
    """The checks of ``check_config`` that do not ask ``device`` for its properties."""
    config = run.config
    check_writers(config)
    LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps)  # reads the options of its decay
    document_start(config, run.tokenizer)
    initial = config.checkpoint.initial_load_path
    if initial and not saved.exists:  # a resumed run does not read it
        find_weights(initial)
    check_optimizer(config.optimizer, parameter_shapes(run.model_config), run.model_config)
    for section in config.plugins.values():
        section.check_run(run, device)


def check_run(config: JobConfig, ranks: int) -> None:
    """Check the run with ``config`` on a number of ranks in this one process, and log its description.

    What a ``Trainer`` checks and opens before it builds the model: options, tokenizer, data, and whether the outputs
    can be written. Without a GPU here, the run is checked for GPUs as if they had all features, unless ``job.device``
    is "cpu".

    Raises:
        ConfigError, DataError, CheckpointError, StorageError: as ``Trainer`` does.
    """
    saved = SavedRun(config)

    def resolve_one(own: JobConfig) -> tuple[JobConfig, DecoderConfig]:
        run = resolve(own, ranks, saved)
        return run.config, run.model_config

    device = pick_device(config.job.device)
    is_absent = device.type == "cpu" and config.job.device == "auto"
    if is_absent:
        device = torch.device("cuda")
        logger.info("this machine has no GPU: what depends on the GPU, such as its memory, is not checked")
    opened: dict[str, DataSource | TextInput] = {}
    for number, own in enumerate(plan_of(config).resolve(resolve_one)):
        run = resolve(own, ranks, saved)
        if is_absent:
            check_layout(run.config, device, run.parallel_dims, run.model_config, capability=ASSUMED_CAPABILITY)
            check_options(run, device, saved)
        else:
            check_config(run, device, saved)
        own = with_pinned_data(run.config, saved)
        rows = range(own.training.global_batch_size // run.parallel_dims.batch)
        sources = check_data(own, run.tokenizer, rows, opened)
        if number == 0:
            require_choice(config)
            require_possible_folder(own.job.dump_folder, "job.dump_folder")
            if own.checkpoint.enable:
                saved.storage.check_access()
                if not is_url(location := own.checkpoint.location(own.job.dump_folder)):
                    require_possible_folder(location, "checkpoint.folder")
        newest = max(saved.storage.steps(), default=0)
        checkpoint = str(saved.storage.open(newest)) if newest else ""
        described = (own, run.model_config, device, run.parallel_dims, sources, run.tokenizer)
        describe_run(*described, newest, checkpoint).log()


def with_pinned_data(config: JobConfig, saved: SavedRun) -> JobConfig:
    """``config`` with all of its data that may change in the course of a run, such as the newest revision of a dataset,
    as in the checkpoint to resume from. Called on rank 0 only."""
    data = pinned(config.data, lambda: saved.config.data.all if saved.config else (), "data")
    validation = config.validation
    if validation.enable:
        validation = pinned(validation, lambda: saved.config.validation.all if saved.config else (), "validation")
    return replace(config, data=data, validation=validation)


def require_possible_folder(path: str, option: str) -> None:
    """Raise an error if ``require_folder`` would: it creates no folder, but asks whether one can be created."""
    folder = Path(path)
    existing = next((parent for parent in (folder, *folder.parents) if os.path.lexists(parent)), folder)
    # Below a file, no folder can be created either, and the error says why.
    require_folder(existing if existing.is_dir() else folder, f"{option} = {path!r}")


def require_choice(config: JobConfig) -> None:
    """Raise ConfigError where nothing says what to train: nobody wants a run of the defaults alone."""
    if not config.job.config_file and config.model == ModelConfig() and config.training == TrainingConfig():
        raise ConfigError(
            "nothing says what to train: name a config by --job.config_file, or set options of [model] and [training]; "
            f"./run_llama_train.sh takes debug_model.toml. There are:\n{by_folder(train_configs())}"
        )
