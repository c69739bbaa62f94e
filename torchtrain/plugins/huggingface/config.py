"""Read Hugging Face's ``config.json`` as a model config, and as the section [model]."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtrain.config.registry import MODELS
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.files import MISSING, parse_json, read_file
from torchtrain.models.llama.model import Transformer
from torchtrain.models.model_config import require_sizes
from torchtrain.models.spec import DecoderConfig, HFFormat, ModelSpec
from torchtrain.plugins.huggingface.llama import FORMATS

CONFIG_FILE = "config.json"


def hf_format(model: DecoderConfig) -> HFFormat:
    """Hugging Face's format of ``model``; ConfigError if its ``ModelSpec`` defines none."""
    hf = _format_of(model.family)
    if hf is None:
        raise ConfigError(
            f"model.name = {model.family!r} cannot be converted to Hugging Face's format: its ModelSpec has no hf "
            "(docs/adding-a-model.md). Train it with huggingface.export = false, and convert it with "
            "--to torchtrain"
        )
    return hf


def _format_of(name: str) -> HFFormat | None:
    """Hugging Face's format of the model ``name``; None if it has none."""
    spec: ModelSpec = MODELS[name]
    if spec.hf is None and spec.model_class is Transformer:
        return FORMATS.get(name, FORMATS["llama3"])  # exported as the family that computes the same
    return spec.hf


def read_hf_config(folder: Path) -> DecoderConfig:
    """Read the model config from ``config.json`` in ``folder``; CheckpointError if the model is not supported."""
    try:
        content = parse_json(read_file(folder / CONFIG_FILE, CheckpointError), folder / CONFIG_FILE, CheckpointError)
        if not isinstance(content, dict):
            raise ValueError(f"it contains {str(content)[:40]!r}, not an object")
        config = config_from_hf(content)
        require_sizes(config)
        return config
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE} lacks {error}") from error
    except (*MISSING, ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE} does not describe a supported model: {error}") from error


def config_from_hf(content: Mapping[str, Any]) -> DecoderConfig:
    """Convert the content of a ``config.json`` to a model config.

    Of the models in ``MODELS`` that read its ``model_type``, the first one converts it.

    Raises:
        KeyError: a required key is missing.
        ValueError: the message names the value that is not supported.
    """
    formats: dict[str, HFFormat] = {}
    for name in MODELS:
        hf = _format_of(name)
        if hf is not None and hf.reads:
            formats.setdefault(hf.model_type, hf)
    model_type = content.get("model_type", "llama")
    if model_type not in formats:
        raise ValueError(f"model_type = {model_type!r} is not supported; there are {', '.join(formats)}")
    config: DecoderConfig = formats[model_type].from_config(content)
    return config
