"""Check the config against the device and the parallel layout, before process-group initialization."""

import math
from dataclasses import astuple

import torch

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.spec import DecoderConfig, count_parameters
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.parallelisms.resolve import nearest_multiples


def check_layout(
    config: JobConfig,
    device: torch.device,
    degrees: ParallelDims,
    model: DecoderConfig,
    capability: tuple[int, int] | None = None,
) -> None:
    """Check that the device and the parallel layout support ``config``, which ``resolve_layout`` has resolved.

    ``capability``: the compute capability of a GPU; None: that of ``device``.

    Raises:
        ConfigError: they do not; the message names the rule and suggests a fix.
    """
    parallelism = config.parallelism
    if config.training.enable_cpu_offload and device.type == "cpu":
        raise ConfigError("training.enable_cpu_offload = true needs a GPU to offload from; set it to false on a CPU")
    _check_tensor(model, degrees.tensor)
    _check_sequence(degrees, config.training.seq_len, parallelism.enable_sequence_parallel)
    if parallelism.enable_async_tensor_parallel:
        _check_async_tensor(config, degrees, device)
    tokens = config.training.local_batch_size * config.training.seq_len // degrees.context
    if degrees.pipeline > 1:
        tokens //= parallelism.pipeline_parallel_microbatches
        if parallelism.pipeline_parallel_schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
            _check_split_backward(config, has_flex_attention=config.data.document_mask and device.type == "cuda")
    uses_fa3, conversion = config.training.attention_backend == "fa3", linear_conversion(config)
    if (uses_fa3 or conversion is not None) and capability is None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    if uses_fa3:
        _check_fa3(config, capability, model)
    if conversion is not None:
        conversion.check(config, degrees, model, tokens, capability)
    if config.activation_checkpoint.mode == "memory_budget":
        _check_memory_budget(config, device, degrees, has_grouped_queries=model.n_kv_heads < model.n_heads)


def check_memory(config: JobConfig, degrees: ParallelDims, model: DecoderConfig, memory_bytes: int, ranks: int) -> None:
    """Raise ConfigError if weights, gradients and optimizer states alone exceed the memory of this machine or GPU.

    Args:
        memory_bytes: that memory.
        ranks: the number of ranks that share it.
    """
    moments = 8 if config.optimizer.name == "adamw" and config.optimizer.state_dtype == "float32" else 2
    per_parameter = 4 + 4 + moments + 4 * (config.ema.enable and not config.ema.offload)
    parameters, world = count_parameters(model), math.prod(astuple(degrees))
    needed = per_parameter * parameters * degrees.replicate * ranks // world
    if needed > memory_bytes:
        raise ConfigError(
            f"the model has {parameters:,} parameters, whose weights, gradients and optimizer states take "
            f"{needed / 2**30:,.1f} GiB here, and there are {memory_bytes / 2**30:,.1f} GiB: take a smaller model "
            "(model.flavor), or more machines or GPUs; python -m torchtrain.estimate says what fits"
        )


def _check_tensor(model: DecoderConfig, degree: int) -> None:
    widths = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "ffn_dim": model.ffn_dim}
    for name, width in widths.items():
        if width % degree:
            fitting = [n for n in range(1, degree) if all(w % n == 0 for w in widths.values())]
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {degree} must divide the model's {name} = {width}; "
                f"try {' or '.join(map(str, fitting[-2:]))}"
            )


def _check_sequence(degrees: ParallelDims, seq_len: int, sequence_parallel: bool) -> None:
    context, tensor = degrees.context, degrees.tensor
    if context > 1 and seq_len % (2 * context):
        raise ConfigError(
            f"training.seq_len = {seq_len} must be a multiple of 2 * parallelism.context_parallel_degree = "
            f"{2 * context}: each rank takes two chunks of a sequence; try {nearest_multiples(seq_len, 2 * context)}"
        )
    if tensor > 1 and sequence_parallel and seq_len // context % tensor:
        step = tensor * context * (2 if context > 1 else 1)
        of = f" / context_parallel_degree = {seq_len // context}" if context > 1 else ""
        raise ConfigError(
            f"training.seq_len = {seq_len}{of} must be a multiple of parallelism.tensor_parallel_degree = {tensor} "
            f"with sequence parallelism; try {nearest_multiples(seq_len, step)}, or set enable_sequence_parallel = "
            "false"
        )


def _check_split_backward(config: JobConfig, has_flex_attention: bool) -> None:
    schedule = config.parallelism.pipeline_parallel_schedule
    given = f"parallelism.pipeline_parallel_schedule = {schedule!r} runs the backward of a block in two passes"
    if config.compile.enable:
        raise ConfigError(
            f"{given}, which compiled blocks do not support; switch compile.enable off, or take the schedule "
            "Interleaved1F1B"
        )
    if has_flex_attention:
        raise ConfigError(
            f"{given}, which flex_attention, the kernel for data.document_mask on a GPU, does not support; take the "
            "schedule Interleaved1F1B, or switch data.document_mask off"
        )
    if config.activation_checkpoint.mode == "selective" and config.activation_checkpoint.selective_option == "op":
        raise ConfigError(
            f"{given}, and what activation_checkpoint.mode = 'selective' keeps with selective_option = 'op' is only "
            "available in one of them; take mode 'full' or selective_option '2', or the schedule Interleaved1F1B"
        )
    if config.parallelism.fsdp_reshard_after_forward == "always":
        raise ConfigError(
            f"{given}, and parallelism.fsdp_reshard_after_forward = 'always' frees its parameters before the second "
            "one, so that they get no gradient; take 'default' or 'never', or the schedule Interleaved1F1B"
        )
    if config.training.loss_chunk_tokens != 0 and torch.__version__ < "2.13":
        raise ConfigError(
            f"{given}, which a loss in chunks does not support in torch {torch.__version__}; set "
            "training.loss_chunk_tokens = 0, or take torch 2.13 or later, or the schedule Interleaved1F1B"
        )


def _check_memory_budget(
    config: JobConfig, device: torch.device, degrees: ParallelDims, has_grouped_queries: bool
) -> None:
    given = "activation_checkpoint.mode = 'memory_budget' lets the compiler choose what to save"
    if not config.compile.enable:
        raise ConfigError(f"{given}; it needs compile.enable = true; set that, or another mode, such as 'selective'")
    # The compiler's FLOP counter requires flash attention with as many key/value heads as query heads. It does not
    # count flex_attention.
    has_flash_attention = device.type == "cuda" and not config.data.document_mask
    if has_flash_attention and has_grouped_queries and torch.__version__ < "2.12":
        raise ConfigError(
            f"{given}, which fails on a GPU with torch {torch.__version__} where a model has fewer n_kv_heads than "
            "n_heads; take torch 2.12 or later, or another mode, such as 'selective'"
        )
    if degrees.tensor > 1 and "2.12" <= torch.__version__ < "2.13":
        raise ConfigError(
            f"{given}, which fails with torch {torch.__version__} under tensor parallelism; take torch 2.13 or later, "
            "or another mode, such as 'selective'"
        )


def _check_async_tensor(config: JobConfig, degrees: ParallelDims, device: torch.device) -> None:
    needs = {
        "a GPU": device.type == "cuda",
        "compile.enable": config.compile.enable,
        "parallelism.tensor_parallel_degree above 1": degrees.tensor > 1,
        "parallelism.enable_sequence_parallel": config.parallelism.enable_sequence_parallel,
    }
    missing = [need for need, there in needs.items() if not there]
    if missing:
        raise ConfigError(
            f"parallelism.enable_async_tensor_parallel needs {' and '.join(missing)}: the compiler overlaps "
            "collectives with CUDA kernels; set what is missing, or switch it off"
        )


def _check_fa3(config: JobConfig, capability: tuple[int, int] | None, model: DecoderConfig) -> None:
    """Check the requirements of FlashAttention 3 (``torch/nn/attention/_fa3.py`` and its ``flash_api.cpp``)."""
    training, given = config.training, "training.attention_backend = 'fa3'"
    if capability is None or capability[0] != 9:
        found = "this is a CPU" if capability is None else "this one has {}.{}".format(*capability)
        raise ConfigError(f"{given} needs a GPU of compute capability 9.0 (Hopper), and {found}; set 'auto'")
    if training.mixed_precision_param == "float32":
        raise ConfigError(f"{given} has no kernel for float32; set mixed_precision_param = 'bfloat16', or 'auto'")
    if config.data.document_mask:
        raise ConfigError(
            f"{given} has no kernel for data.document_mask = true, which uses flex_attention; set 'auto', or "
            "document_mask = false"
        )
    size = model.head_size
    if size % 8 or size > 256:
        raise ConfigError(f"{given} needs heads of a multiple of 8 channels, at most 256, not {size}; set 'auto'")
    if training.deterministic and size > 192:
        raise ConfigError(
            f"{given} has no deterministic backward for heads of more than 192 channels, and this model's have {size}; "
            "set 'flash', or training.deterministic = false"
        )
