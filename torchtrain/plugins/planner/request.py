"""Resolve and check a request to the planner: GPU, model, number of ranks and layout."""

from dataclasses import replace
from math import prod

import torch

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.build import document_start
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.files import is_url
from torchtrain.models.model_config import build_model_config
from torchtrain.models.spec import DecoderConfig
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.planner.hardware import GPUS, Gpu
from torchtrain.plugins.planner.options import EstimateConfig


def resolve_gpu(config: JobConfig) -> Gpu:
    """Return the GPU named by ``estimate.gpu``, with the memory and network bandwidth that the config overrides."""
    gpu, options = GPUS[section_of(config, EstimateConfig).gpu], section_of(config, EstimateConfig)
    return replace(
        gpu,
        memory_gib=options.memory_gib or gpu.memory_gib,
        network_bandwidth=options.network_gigabits / options.gpus_per_node * 1e9 / 8 or gpu.network_bandwidth,
    )


def resolve_model_config(config: JobConfig) -> DecoderConfig:
    """Return the model's config, with the vocabulary size of the tokenizer if its file exists.

    Raises:
        ConfigError: the tokenizer does not fit the config.
    """
    path, tokenizer = config.model.tokenizer_path, None
    needs_fetch = is_url(path) and config.model.vocab_size is not None  # for nothing: the size is known
    if not needs_fetch and tokenizer_file(path).is_file():
        tokenizer = load_tokenizer(path)
        document_start(config, tokenizer)
    return build_model_config(config.model, tokenizer, config.training.seq_len)


def vocabulary_source(config: JobConfig) -> str:
    """What gives the vocabulary size of ``resolve_model_config``."""
    path = config.model.tokenizer_path
    if config.model.vocab_size is not None:
        return "model.vocab_size"
    if not path:
        return "the package's tokenizer"
    return "model.tokenizer_path" if tokenizer_file(path).is_file() else "the model flavor"


def resolve_world_size(config: JobConfig) -> int:
    """Return ``estimate.world_size``, or by default the product of the parallel degrees.

    Raises:
        ConfigError: neither is set.
    """
    if section_of(config, EstimateConfig).world_size:
        return section_of(config, EstimateConfig).world_size
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree == -1:
        raise ConfigError(
            "estimate.world_size is not set, and parallelism.data_parallel_shard_degree = -1 is derived from it; set "
            "the number of ranks, for example --estimate.world_size 8"
        )
    return prod(value for name, value in vars(parallelism).items() if name.endswith("_degree"))


def resolve_and_check(config: JobConfig, model_config: DecoderConfig, gpu: Gpu) -> tuple[JobConfig, ParallelDims]:
    """Return ``config`` with its layout resolved, and its parallel dimensions.

    Raises:
        ConfigError: the trainer would reject the layout on this GPU.
    """
    config, dims = resolve_layout(config, model_config, resolve_world_size(config))
    check_layout(config, torch.device("cuda"), dims, model_config, gpu.capability)
    return config, dims
