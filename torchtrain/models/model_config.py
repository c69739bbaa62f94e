"""Build the config of a model from the section [model] and a tokenizer, and the section from a config."""

from dataclasses import asdict, fields, replace
from typing import Any, Protocol

from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig, to_dict
from torchtrain.errors import ConfigError
from torchtrain.models.llama.rope_scaling import RopeScaling
from torchtrain.models.options import ModelConfig, ModelOverrides, MupConfig, RopeScalingConfig
from torchtrain.models.spec import DecoderConfig, ModelSpec

LARGEST = {
    **dict.fromkeys(("dim", "ffn_dim", "vocab_size", "max_seq_len"), 2**28),
    **dict.fromkeys(("n_heads", "n_kv_heads", "head_size"), 2**16),
    "n_layers": 2**12,  # which take seconds to build on the meta device
}
"""Largest sizes of a model: beyond them it would take more memory than any machine has before anything is checked."""


def require_sizes(config: DecoderConfig) -> None:
    """Raise ValueError if a size in ``config`` is larger than that of any model, or no integer."""
    for name, most in LARGEST.items():
        value = getattr(config, name, 0)
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"{name} = {value!r} must be an integer of at most {most:,}")


class Vocabulary(Protocol):
    """The attributes of a tokenizer that a model config depends on."""

    vocab_size: int
    used_ids: int
    bos_id: int | None


def flavor_config(name: str, flavor: str) -> DecoderConfig:
    """Return the config of a flavor of the model ``name``; ConfigError lists the flavors if it is unknown."""
    flavors = MODELS[name].flavors
    if flavor not in flavors:
        raise ConfigError(f"model.flavor = {flavor!r} is not a flavor of {name}; there are {', '.join(flavors)}")
    config: DecoderConfig = replace(flavors[flavor], family=name)
    return config


def build_model_config(
    model: ModelConfig, tokenizer: Vocabulary | None, seq_len: int, mup: MupConfig | None = None
) -> DecoderConfig:
    """Build the model config from the resolved section ``model``, for sequences of ``seq_len`` tokens.

    It combines the flavor, the overrides of [model.shape] and [model.options], those of ``mup``, and the vocabulary
    size: ``model.vocab_size``, or by default that of ``tokenizer``, or that of the flavor if ``tokenizer`` is None.

    Raises:
        ConfigError: the flavor does not exist, an option is none of this model's or invalid, or the tokenizer has more
            ids than the model.
    """
    spec: ModelSpec = MODELS[model.name]
    changes = overrides(model, spec, mup)
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
            base: Any = flavor_config(model.name, model.flavor)
        else:
            base = spec.config_class(**changes, vocab_size=vocab_size, family=model.name)
        if scaling is not None:
            old = base.rope_scaling or RopeScaling()
            changes["rope_scaling"] = None if scaling.get("type") == "none" else replace(old, **scaling)
        config: DecoderConfig = replace(base, **changes, vocab_size=vocab_size, max_seq_len=seq_len)
        require_sizes(config)
        if spec.check is not None:
            spec.check(config)
    except TypeError as error:  # its message names the missing fields
        raise ConfigError(f"model.flavor is empty, and [model.shape] does not give all: {error}") from error
    except ValueError as error:
        raise ConfigError(f"[model.shape] on {model.name} {model.flavor}: {error}") from error
    return config


def overrides(model: ModelConfig, spec: ModelSpec, mup: MupConfig | None) -> dict[str, Any]:
    """Values of the config's fields that [model.shape], [model.options] and ``mup`` set.

    Raises:
        ConfigError: the model's config has no such field.
    """
    names = [field.name for field in fields(spec.config_class) if field.init]
    shape = given(model.shape)
    if "max_position_embeddings" not in names:
        shape.pop("max_position_embeddings", None)  # no model computes with it; ``longest_context`` reads it
    changes: dict[str, Any] = {}
    sections = {"model.shape": shape, "model.options": model.options, "mup": given(mup) if mup is not None else {}}
    for section, values in sections.items():
        for key, value in values.items():
            if key not in names:
                raise ConfigError(
                    f"{section}.{key} is not an option of model.name = {model.name!r}; there are {', '.join(names)}"
                )
            changes[key] = value
    return changes


def longest_context(config: JobConfig) -> int:
    """Maximum context length, in tokens, that the model of ``config`` is intended for."""
    return max(config.training.seq_len, config.model.shape.max_position_embeddings or 0)


def given(section: ModelOverrides | MupConfig) -> dict[str, Any]:
    """The options that ``section`` sets, as a dict."""
    return {key: value for key, value in to_dict(section).items() if value != {}}


def to_model_section(config: DecoderConfig, tokenizer_path: str) -> ModelConfig:
    """Return the section [model] that describes ``config`` explicitly, without a flavor."""
    values = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.init and field.name not in ("family", "vocab_size", "max_seq_len", "base_dim", "base_layers")
    }
    shape = {field.name: values.pop(field.name) for field in fields(ModelOverrides) if field.name in values}
    shape["head_dim"] = config.head_size
    shape["max_position_embeddings"] = shape.get("max_position_embeddings") or config.max_seq_len
    if "head_dim" not in {field.name for field in fields(config)}:
        del shape["head_dim"]
    if "rope_scaling" in shape:
        scaling = shape["rope_scaling"]
        shape["rope_scaling"] = RopeScalingConfig() if scaling is None else RopeScalingConfig(**asdict(scaling))
    return ModelConfig(
        name=config.family,
        flavor="",
        vocab_size=config.vocab_size,
        tokenizer_path=tokenizer_path,
        shape=ModelOverrides(**shape),
        options={key: value for key, value in values.items() if value is not None},  # TOML has no None
    )
