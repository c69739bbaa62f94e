"""What is asked of the planner: kind of GPU, model and layout; what the trainer would refuse is refused."""

from dataclasses import replace
from math import prod

import torch

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.devices import planned_for_gpu
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.models.model_config import build_model_config, document_start
from torchtrain.parallelisms.validate import check_layout, resolve_global_batch_size
from torchtrain.planning.hardware import GPUS, Gpu


def gpu_of(config: JobConfig) -> Gpu:
    """The kind of GPU that ``config`` names, with numbers of one's own where it has some."""
    gpu, own = GPUS[config.estimate.gpu], config.estimate
    return replace(
        gpu,
        memory_gib=own.memory_gib or gpu.memory_gib,
        network_bytes=own.network_gigabits * 1e9 / 8 or gpu.network_bytes,
    )


def shape_of(config: JobConfig) -> TransformerConfig:
    """With the tokenizer's vocabulary, if its file is here; ConfigError where it is not one for the config."""
    path, tokenizer = config.model.tokenizer_path, None
    if tokenizer_file(path).is_file():
        tokenizer = load_tokenizer(path)
        document_start(config, tokenizer)
    return build_model_config(config.model, tokenizer, config.training.seq_len)


def world_size_of(config: JobConfig) -> int:
    """``estimate.world_size``, or as many ranks as the degrees need."""
    if config.estimate.world_size:
        return config.estimate.world_size
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree == -1:
        raise ConfigError(
            "estimate.world_size is not set, and parallelism.data_parallel_shard_degree = -1 takes all ranks that the "
            "others leave; say how many there are, such as --estimate.world_size 8"
        )
    return prod(value for name, value in vars(parallelism).items() if name.endswith("_degree"))


def refuse(config: JobConfig, shape: TransformerConfig, gpu: Gpu) -> ParallelDims:
    """The degrees; ConfigError for what the trainer would refuse on this GPU."""
    degrees = resolve_parallel_dims(config.parallelism, world_size_of(config))
    resolve_global_batch_size(config, degrees)
    with planned_for_gpu(gpu.capability):
        check_layout(config, torch.device("cuda"), degrees, shape)
    return degrees
