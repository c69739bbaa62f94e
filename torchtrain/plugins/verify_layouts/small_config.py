"""The config that is verified: that of the user, small, in float64, and without what only a GPU or a long run has."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.weights import resolve_model_section
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.metrics.options import ValidationConfig
from torchtrain.models.model_config import build_model_config
from torchtrain.models.spec import DecoderConfig, spec_of
from torchtrain.optimizers.options import EMAConfig, LRSchedulerConfig
from torchtrain.parallelisms.options import CompileConfig
from torchtrain.plugins.verify_layouts.plain import PlainConfig

LAYERS = 4  # of which interleaved schedules make four stages
HEAD_DIM = 8
KV_HEADS = 4  # as many as the largest tensor degree
SEQ_LEN = 64
FLOAT64: Any = "float64"  # no choice of these options: the trainer has no use for it
LOSS_CHUNK = 64  # tokens; several chunks, as in a model of usual size


def small_model(config: DecoderConfig) -> DecoderConfig:
    """A model like ``config``, whose sizes are as small as a layout of eight ranks allows.

    Sizes that the config class computes itself, and fields that not every model has, stay.

    Raises:
        ConfigError: the config class rejects these sizes.
    """
    names = {field.name for field in fields(config) if field.init}
    kv_heads = min(config.n_kv_heads, KV_HEADS)
    heads = kv_heads * min(2, config.n_heads // config.n_kv_heads)
    sizes: dict[str, Any] = {
        "dim": heads * HEAD_DIM,
        "n_layers": min(config.n_layers, LAYERS),
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "ffn_dim": 2 * heads * HEAD_DIM,
        "vocab_size": min(config.vocab_size, 128 + config.vocab_size % 16),  # the tensor degree divides both, or none
        "max_seq_len": SEQ_LEN,
    }
    if getattr(config, "head_dim", None) is not None:
        sizes["head_dim"] = HEAD_DIM
    try:
        small: DecoderConfig = replace(config, **{key: value for key, value in sizes.items() if key in names})
        check = spec_of(config).check
        if check is not None:
            check(small)
    except ValueError as error:
        raise ConfigError(
            f"the model cannot be made smaller: {error}; verify it with its own sizes (--as-is)"
        ) from None
    return small


def verified_config(config: JobConfig, *, as_is: bool, steps: int) -> tuple[JobConfig, DecoderConfig, list[str]]:
    """The config and the model that are trained on each layout, and the options that were replaced, as text."""
    if config.model.hf_folder:
        config = replace(config, model=resolve_model_section(config.model))
    model = build_model_config(config.model, None, config.training.seq_len, config.mup)
    if not as_is:
        model = small_model(model)
    training, replaced = config.training, []
    if config.compile.enable:
        replaced.append("compile.enable = false")
    if training.sums != "fast":
        replaced.append('training.sums = "fast"')
    checkpointing = config.activation_checkpoint
    if checkpointing.mode == "memory_budget":  # a mode of the compiler
        checkpointing = replace(checkpointing, mode="none")
        replaced.append('activation_checkpoint.mode = "none"')
    if config.ema.enable:
        replaced.append("ema.enable = false")
    # Those of this package are for a run, or for kernels of a GPU; those of a user may be of the model.
    plugins = {
        name: section
        for name, section in config.plugins.items()
        if not type(section).__module__.startswith("torchtrain.plugins.")
    }
    if "float8" in config.plugins:
        replaced.append("no float8")
    has_chunks = torch.__version__ >= "2.13" and training.loss_chunk_tokens == -1
    config = replace(
        config,
        training=replace(
            training,
            seq_len=model.max_seq_len,
            steps=steps,
            tokens="",
            global_batch_size_schedule="",
            mixed_precision_param=FLOAT64,
            mixed_precision_reduce=FLOAT64,
            sums="fast",
            loss_chunk_tokens=LOSS_CHUNK if has_chunks else training.loss_chunk_tokens,
            attention_backend="auto",
            enable_cpu_offload=False,
        ),
        optimizer=replace(config.optimizer, state_dtype=FLOAT64),
        parallelism=replace(config.parallelism, enable_async_tensor_parallel=False),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        activation_checkpoint=checkpointing,
        compile=CompileConfig(),
        ema=EMAConfig(),
        checkpoint=CheckpointConfig(enable=False),
        validation=ValidationConfig(),
        faults=FaultsConfig(),
        plugins=plugins,
        stages=(),
    )
    return config, model, replaced


def without_chunks(config: JobConfig) -> JobConfig:
    """``config`` whose loss is computed at once, for the reference."""
    return replace(config, training=replace(config.training, loss_chunk_tokens=0))


def describe_model(model: DecoderConfig, dtype: str, replaced: Sequence[str]) -> str:
    """One line about what is verified."""
    sizes = ""
    if not isinstance(model, PlainConfig):
        heads = f"{model.n_heads} heads ({model.n_kv_heads} for keys and values)"
        sizes = f"{model.n_layers} layers of width {model.dim}, {heads}, vocabulary {model.vocab_size}, "
    return f"{model.family}: {sizes}sequences of {model.max_seq_len} tokens, {dtype}" + "".join(
        f"; {option}" for option in replaced
    )
