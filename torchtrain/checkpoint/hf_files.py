"""The tensors of a Hugging Face folder: those that its index names, and only if they are all that a model needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtrain.errors import CheckpointError
from torchtrain.reading import MISSING, patiently, read_file
from torchtrain.torch_internals import _HFStorageInfo

INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # others need scales to be read


@dataclass(frozen=True)
class HFTensor:
    """Where a tensor lies."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def find_tensors(
    folder: Path, expected: Mapping[str, torch.Size], ignored: tuple[str, ...] = ()
) -> dict[str, HFTensor]:
    """Where each of the tensors ``expected``, by name and shape, lies. Names that end in ``ignored`` may be there, too.

    Raises:
        CheckpointError: a file is damaged; a tensor is missing, has another shape, or a dtype that cannot be read as it
            is; there is one that the model does not have.
    """
    found = {}
    for path, names in _files(folder).items():
        try:
            patiently(lambda: path.open("rb").close(), path)  # noqa: B023  # safe_open says "no such file" of any error
            with safe_open(path, framework="pt") as file:
                there = set(file.keys())
                for name in there if names is None else names:
                    if name not in there:
                        raise CheckpointError(f"{path} lacks {name}, which {INDEX_FILE} says is in it")
                    piece = file.get_slice(name)
                    found[name] = path, tuple(piece.get_shape()), piece.get_dtype()
        except MISSING as error:
            raise CheckpointError(f"{path} is missing, and {INDEX_FILE} names it") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or cut short ({error}): fetch it again") from error
    tensors = {}
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"{folder} lacks {name}, which a model of this config.json has")
        path, own_shape, dtype = found.pop(name)
        if own_shape != tuple(shape):
            raise CheckpointError(f"{name} in {path} has shape {own_shape}; by config.json it has {tuple(shape)}")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{name} in {path} is {dtype}; weights must be {', '.join(DTYPES)}: quantized ones are not read"
            )
        tensors[name] = HFTensor(path, own_shape, DTYPES[dtype])
    unknown = sorted(name for name in found if not name.endswith(ignored))
    if unknown:
        raise CheckpointError(
            f"{folder} holds tensors that a model of this config.json does not have: {', '.join(unknown[:5])}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        )
    return tensors


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, and which tensors of each; None: all."""
    index = folder / INDEX_FILE
    try:
        weight_map = json.loads(read_file(index))["weight_map"]
        files: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ValueError(f"names {file!r}, which is not in its folder")
            files.setdefault(folder / file, []).append(name)  # type: ignore[union-attr]
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
    return {found[0]: None} if found else {}


def read_tensor(tensor: HFTensor, name: str) -> torch.Tensor:
    """The tensor ``name`` as it lies there."""
    with safe_open(tensor.file, framework="pt") as file:
        return file.get_tensor(name)  # type: ignore[no-any-return]


class HFReader(HuggingFaceStorageReader):
    """DCP's reader of safetensors for the tensors that ``find_tensors`` has found."""

    def __init__(self, folder: Path, tensors: Mapping[str, HFTensor]) -> None:
        super().__init__(str(folder))
        self.tensors = tensors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=torch.Size(tensor.shape),
                    chunks=[ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))],
                )
                for name, tensor in self.tensors.items()
            },
            storage_data={
                MetadataIndex(fqn=name, offset=torch.Size([0] * len(tensor.shape))): _HFStorageInfo(
                    relative_path=str(tensor.file), shape=torch.Size(tensor.shape), dtype=tensor.dtype
                )
                for name, tensor in self.tensors.items()
            },
            storage_meta=StorageMeta(load_id=self.load_id),
        )
