"""Hugging Face's format of a family whose ``config.json`` has the keys of Llama's, and some of its own."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields
from typing import Any

from torchtrain.models.llama import TransformerConfig
from torchtrain.models.spec import HFFormat
from torchtrain.plugins.huggingface.llama import config_from_hf, hf_config, hf_name

LLAMA_FIELDS = [field.name for field in fields(TransformerConfig) if field.init]


def own_fields(config_class: type[TransformerConfig]) -> list[str]:
    """The fields that ``config_class`` adds to those of Llama."""
    return [field.name for field in fields(config_class) if field.init and field.name not in LLAMA_FIELDS]


def llama_like_format(
    architecture: str,
    model_type: str,
    config_class: type[TransformerConfig],
    *,
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
    modules: Mapping[str, str] | None = None,
    read: Callable[[MutableMapping[str, Any]], dict[str, Any]] | None = None,
    write: Callable[[MutableMapping[str, Any], Any], None] | None = None,
) -> HFFormat:
    """The format of a family that is registered as ``model_type``.

    Args:
        architecture: transformers' class of the model.
        defaults: transformers' values of keys that are missing from a ``config.json``, where they are not Llama's.
        fixed: keys that must have these values, because others would change what the model computes.
        modules: Hugging Face's names of modules of a block that are not named as in Llama.
        read: returns the values of ``own_fields`` for the content of a ``config.json``, in which it may replace keys
            that Llama's reader would not understand. By default the fields are keys of the same names.
        write: adds the keys for a config to those of Llama, or changes them; the reverse of ``read``.
    """
    own = own_fields(config_class)

    def parameter_name(name: str) -> str:
        for ours, theirs in (modules or {}).items():
            if name.endswith(f".{ours}.weight"):
                return f"model.{name.removesuffix(f'{ours}.weight')}{theirs}.weight"
        return hf_name(name)

    def from_config(content: Mapping[str, Any]) -> TransformerConfig:
        values = {**defaults, **content}
        for key, ours in fixed.items():
            if values.get(key, ours) != ours:
                raise ValueError(f"{key} = {values[key]!r} must be {ours!r} in a {model_type}")
        extra = {name: values[name] for name in own} if read is None else read(values)
        llama = config_from_hf("llama3", values)
        return config_class(**{name: getattr(llama, name) for name in LLAMA_FIELDS} | extra | {"family": model_type})

    def to_config(config: Any, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
        check(config)
        llama = TransformerConfig(**{name: getattr(config, name) for name in LLAMA_FIELDS} | {"family": "llama3"})
        content = hf_config(llama, dtype, bos_id, eos_id) | {"architectures": [architecture], "model_type": model_type}
        if write is None:
            content |= {name: getattr(config, name) for name in own}
        else:
            write(content, config)
        # By default some families have the id of a published model, which may exceed the vocabulary.
        content |= {**fixed, "pad_token_id": None}
        written = from_config(content)
        for name in own:
            if getattr(written, name) != getattr(config, name):
                raise ValueError(f"{name} = {getattr(config, name)!r} cannot be exported in a {model_type}")
        return content

    return HFFormat(model_type, parameter_name, to_config, from_config)


def check(config: TransformerConfig) -> None:
    """Raise ValueError if ``config`` sets an option of Qwen."""
    for name in ("qk_norm", "qkv_bias"):
        if getattr(config, name):
            raise ValueError(f"{name} = true is an option of Qwen, not of {config.family}; omit it")


def check_without_mup(config: TransformerConfig) -> None:
    """``check`` of families with norms after attention and feed-forward."""
    check(config)
    if config.base_dim is not None or config.base_layers is not None:
        raise ValueError(f"mup.base_dim and mup.base_layers have no rule for the norms of {config.family}; omit them")
