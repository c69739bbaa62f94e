"""The tensors of a Hugging Face folder: those that its index names, and only if they are all that a model needs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from torchtrain.checkpoint.states import parameter_shapes
from torchtrain.errors import CheckpointError
from torchtrain.initialization import block_held
from torchtrain.models.families import hf_name
from torchtrain.models.llama.model import TransformerConfig
from torchtrain.reading import MISSING, patiently, read_file

INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")  # others need scales to be read


def find_tensors(folder: Path, model: TransformerConfig) -> dict[str, Path]:
    """The file in which each parameter of ``model`` lies, by our names.

    Raises:
        CheckpointError: a file is damaged; a tensor is missing, has another shape, or a dtype that cannot be read as it
            is; there is one that the model does not have.
    """
    found = {}
    for path, names in _files(folder).items():
        with _opened(path) as file:
            there = set(file.keys())
            for name in names or there:
                if name not in there:
                    raise CheckpointError(f"{path} lacks {name}, which {INDEX_FILE} says is in it")
                piece = file.get_slice(name)
                found[name] = path, tuple(piece.get_shape()), piece.get_dtype()
    files = {}
    for ours, parameter in parameter_shapes(model).items():
        name, shape = hf_name(ours), tuple(parameter.shape)
        if name not in found:
            raise CheckpointError(f"{folder} lacks {name}, which a model of this config.json has")
        path, own_shape, dtype = found.pop(name)
        if own_shape != shape:
            raise CheckpointError(f"{name} in {path} has shape {own_shape}; by config.json it has {shape}")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{name} in {path} is {dtype}; weights must be {', '.join(DTYPES)}: quantized ones are not read"
            )
        files[ours] = path
    # transformers ignores these, too: RoPE tables of old exports, and a tied matrix by its other name.
    ignored = ("rotary_emb.inv_freq", *(("lm_head.weight",) if model.tied_embeddings else ()))
    unknown = sorted(name for name in found if not name.endswith(ignored))
    if unknown:
        raise CheckpointError(
            f"{folder} holds tensors that a model of this config.json does not have: {', '.join(unknown[:5])}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        )
    return files


def _files(folder: Path) -> dict[Path, list[str]]:
    """The files to read, and which tensors of each; none: all."""
    index = folder / INDEX_FILE
    try:
        weight_map = json.loads(read_file(index))["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ValueError(f"names {file!r}, which is not in its folder")
            files.setdefault(folder / file, []).append(name)
        return files
    except MISSING:
        pass
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files ({error!r})") from error
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files and no {INDEX_FILE} to say which of them count; add it, or "
            "leave one file"
        )
    return {path: [] for path in found}


@torch.no_grad()
def read_into(tensor: torch.Tensor, file: Path, name: str) -> None:
    """Write into ``tensor``, of any layout and dtype, what of the tensor ``name`` this rank has."""
    part, spans = block_held(tensor)
    if part.numel():
        with _opened(file) as opened:
            part.copy_(opened.get_slice(name)[spans])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        patiently(lambda: path.open("rb").close(), path)  # safe_open says "no such file" of any error
        with safe_open(path, framework="pt") as file:
            yield file
    except MISSING as error:
        raise CheckpointError(f"{path} is missing, and {INDEX_FILE} names it") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}): fetch it again") from error
