"""Build the TransformerConfig from the section [model] and a tokenizer, and the section from a TransformerConfig."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol

from torchtrain.config.parse import to_dict
from torchtrain.config.schema import JobConfig, ModelConfig, ModelOverrides, RopeScalingConfig
from torchtrain.errors import ConfigError
from torchtrain.models.families import export_family, flavor_config, read_hf_config
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.models.llama.rope_scaling import RopeScaling


class Vocabulary(Protocol):
    """The attributes of a tokenizer that a model config depends on."""

    vocab_size: int
    used_ids: int
    bos_id: int | None


def build_model_config(model: ModelConfig, tokenizer: Vocabulary | None, seq_len: int) -> TransformerConfig:
    """Build the model config from the resolved section ``model``, for sequences of ``seq_len`` tokens.

    It combines the flavor, the overrides of [model.shape] and the vocabulary size: ``model.vocab_size``, or by default
    that of ``tokenizer``, or that of the flavor if ``tokenizer`` is None.

    Raises:
        ConfigError: the flavor does not exist, the shape is invalid, or the tokenizer has more ids than the model.
    """
    changes = given(model.shape)
    scaling = changes.pop("rope_scaling", None)
    vocab_size = model.vocab_size
    if vocab_size is None:
        vocab_size = (tokenizer or flavor_config(model.name, model.flavor)).vocab_size
    if tokenizer is not None and vocab_size < tokenizer.used_ids:
        raise ConfigError(
            f"model.vocab_size = {vocab_size} must be at least {tokenizer.used_ids}, the number of the tokenizer's "
            "ids; raise it, or give the tokenizer of the model by its path"
        )
    try:
        if model.flavor:
            base = flavor_config(model.name, model.flavor)
        else:
            base = TransformerConfig(**changes, vocab_size=vocab_size, family=model.name)
        if scaling is not None:
            old = base.rope_scaling or RopeScaling()
            changes["rope_scaling"] = None if scaling.get("type") == "none" else replace(old, **scaling)
        shape = replace(base, **changes, vocab_size=vocab_size, max_seq_len=seq_len)
        export_family(shape)
    except TypeError as error:  # its message names the missing fields
        raise ConfigError(f"model.flavor is empty, and [model.shape] does not give all: {error}") from error
    except ValueError as error:
        raise ConfigError(f"[model.shape] on {model.name} {model.flavor}: {error}") from error
    return shape


def longest_context(config: JobConfig) -> int:
    """Maximum context length, in tokens, that the model of ``config`` is intended for."""
    return max(config.training.seq_len, config.model.shape.max_position_embeddings or 0)


def document_start(config: JobConfig, tokenizer: Vocabulary) -> int | None:
    """Id of the token that begins a document (bos); None without ``data.document_mask``.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    if not config.data.document_mask:
        return None
    if tokenizer.bos_id is None:
        raise ConfigError(
            "data.document_mask = true needs a tokenizer with a token that begins a document (bos); that of "
            f"model.tokenizer_path = {config.model.tokenizer_path!r} has none"
        )
    return tokenizer.bos_id


def given(section: ModelOverrides) -> dict[str, Any]:
    """The options that ``section`` sets, as a dict."""
    return {key: value for key, value in to_dict(section).items() if value != {}}


def resolve_model_section(model: ModelConfig) -> ModelConfig:
    """Replace ``hf_folder`` by the explicit options that it stands for, so that the folder is no longer needed.

    Raises:
        CheckpointError: the folder does not contain a supported model.
    """
    if not model.hf_folder:
        return model
    explicit = to_model_section(read_hf_config(Path(model.hf_folder)), model.tokenizer_path or model.hf_folder)
    changes = given(model.shape)
    if "rope_scaling" in changes:
        changes["rope_scaling"] = replace(explicit.shape.rope_scaling, **changes["rope_scaling"])
    shape = replace(explicit.shape, **changes)
    vocab_size = explicit.vocab_size if model.vocab_size is None else model.vocab_size
    return replace(explicit, shape=shape, vocab_size=vocab_size)


def to_model_section(shape: TransformerConfig, tokenizer_path: str) -> ModelConfig:
    """Return the section [model] that describes the config ``shape`` explicitly, without a flavor."""
    names = {field.name for field in fields(ModelOverrides)} - {"rope_scaling"}
    values = {name: getattr(shape, name) for name in names} | {
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_position_embeddings or shape.max_seq_len,
    }
    scaling = RopeScalingConfig() if shape.rope_scaling is None else RopeScalingConfig(**asdict(shape.rope_scaling))
    return ModelConfig(
        name=shape.family,  # type: ignore[arg-type]
        flavor="",
        vocab_size=shape.vocab_size,
        tokenizer_path=tokenizer_path,
        shape=ModelOverrides(rope_scaling=scaling, **values),
    )
