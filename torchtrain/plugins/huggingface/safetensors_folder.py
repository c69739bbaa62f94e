"""Read and write the weights of a Hugging Face folder; each rank reads and writes only its shards (DCP)."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Shard

from torchtrain.checkpoint.other_formats import WeightFormat
from torchtrain.checkpoint.states import ORIGINAL, TIED, parameter_shapes, save_tensors
from torchtrain.datasets.tokenizers import TOKENIZER_FILES, load_tokenizer, tokenizer_file
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.mesh import local
from torchtrain.errors import CheckpointError, ConfigError
from torchtrain.files import (
    BLOCK_BYTES,
    MISSING,
    PARTIAL_SUFFIX,
    fsync_folder,
    parse_json,
    partial_path,
    printable,
    read_file,
    require_regular,
    with_retries,
)
from torchtrain.logging import logger
from torchtrain.models.parameters import local_block
from torchtrain.models.spec import DecoderConfig
from torchtrain.plugins.huggingface.config import CONFIG_FILE, hf_format, read_hf_config
from torchtrain.plugins.huggingface.tokenizer import find_eos_ids, one_or_all, write_hf_tokenizer
from torchtrain.plugins.object_storage.partial_folder import partial_folder
from torchtrain.progress import ProgressBar, progress

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "BF16", "F16")  # others are quantized, and need scales
ROWS_AT_ONCE = 4096  # of two matrices that are compared
FILE_BYTES = 5 * 10**9  # maximum size of a file, as in transformers


def is_hf_folder(path: Path) -> bool:
    """Whether ``path`` is a folder in Hugging Face's format, with weights in safetensors files."""
    return (path / CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))


class Source(NamedTuple):
    """A tensor in a file: its path, and the tensor's name there."""

    path: Path
    name: str


def file_tensors(tensors: Mapping[str, Tensor], model: DecoderConfig) -> dict[str, Tensor]:
    """``tensors`` as Hugging Face's files have them, by the names of torchtrain: see ``HFFormat.stored``.

    Of a parameter that files have as slices, views of those that this rank has, named ``layers.0.experts.w1.3``.
    """
    stored, views = hf_format(model).stored, {}
    for name, tensor in tensors.items():
        if stored(name) == "whole":
            views[name] = tensor
        elif stored(name) == "slices":
            part, (own, *_) = local_block(tensor)
            for i, view in zip(range(own.start, own.stop), part.detach(), strict=True):
                views[f"{name}.{i}"] = _sharded_like(tensor, view)
    return views


def _sharded_like(tensor: Tensor, view: Tensor) -> Tensor:
    """A slice along the first dimension of ``tensor``, whose part on this rank is ``view``."""
    if not isinstance(tensor, DTensor):
        return view
    for name, placement in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
        if isinstance(placement, Shard) and placement.dim > 0:  # by tensor parallelism
            return DTensor.from_local(view, tensor.device_mesh[name], [Shard(placement.dim - 1)], run_check=False)
    return view


def find_tensors(folder: Path, model: DecoderConfig) -> dict[str, Source]:
    """Find the file and the name of each of the ``file_tensors`` of ``model``, by the names of torchtrain.

    As in transformers, names may lack the prefix ``model.`` (a base model), and a tied matrix may be stored only as
    ``lm_head``.

    Raises:
        CheckpointError: a file is damaged; a tensor is missing, is not in the model, or has another shape or an
            unsupported dtype; a tied matrix is stored twice, with different values.
    """
    found: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for path, names in _files(folder).items():
        with _opened(path) as file:
            there = set(file.keys())
            for name in names or there:
                if name not in there:
                    raise CheckpointError(f"{path} lacks {printable(name)}, which {INDEX_FILE} lists for it")
                piece = file.get_slice(name)
                found[name] = path, tuple(piece.get_shape()), piece.get_dtype()
    sources, hf_name = {}, hf_format(model).parameter_name
    for ours, parameter in file_tensors(parameter_shapes(model), model).items():
        names = [hf_name(ours), hf_name(ours).removeprefix("model.")]
        if model.tied_embeddings and ours == ORIGINAL:
            names.append(hf_name(TIED))
        name = next((name for name in names if name in found), None)
        if name is None:
            raise CheckpointError(f"{folder} lacks {names[0]}, a parameter of the model in config.json")
        path, shape, dtype = found.pop(name)
        if shape != tuple(parameter.shape):
            raise CheckpointError(f"{name} in {path} has shape {shape}; by config.json it has {tuple(parameter.shape)}")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{name} in {path} is {dtype}; weights must be {', '.join(DTYPES)}: quantized ones are not supported"
            )
        sources[ours] = Source(path, name)
    if model.tied_embeddings and (lm_head := found.pop(hf_name(TIED), None)):
        _require_equal(sources[ORIGINAL], Source(lm_head[0], hf_name(TIED)))
    unknown = sorted(name for name in found if not name.endswith("rotary_emb.inv_freq"))  # RoPE tables of old exports
    if unknown:
        listed = ", ".join(map(printable, unknown[:5]))
        raise CheckpointError(
            f"{folder} contains tensors that the model in config.json does not have: {listed}"
            + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        )
    return sources


def _require_equal(embedding: Source, output: Source) -> None:
    """Raise CheckpointError unless two matrices, which the config ties, have the same values."""
    with _opened(embedding.path) as first, _opened(output.path) as second:
        one, other = first.get_slice(embedding.name), second.get_slice(output.name)
        equal = one.get_shape() == other.get_shape()
        for start in range(0, one.get_shape()[0] if equal else 0, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            equal = equal and torch.equal(one[rows].float(), other[rows].float())
    if not equal:
        raise CheckpointError(
            f"{output.name} in {output.path} differs from {embedding.name}, and {CONFIG_FILE} has tie_word_embeddings "
            f"= true: set it to false there to use both, as transformers does, or remove {output.name} from the file"
        )


def _files(folder: Path) -> dict[Path, list[str]]:
    """The files to read, and the tensors to read from each; an empty list: all. The choice is that of transformers."""
    weights, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if weights.is_file():
        if index.is_file():
            logger.warning("%s is read, and not the files that %s names, as in transformers", weights, INDEX_FILE)
        return {weights: []}
    try:
        weight_map = parse_json(read_file(index), index, CheckpointError)["weight_map"]
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file or not file.isprintable():
                raise ValueError(f"names {file!r}, which is not in its folder")
            files.setdefault(folder / file, []).append(name)
        return files
    except MISSING:
        pass
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files ({error!r})") from error
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} contains {len(found)} safetensors files and neither {WEIGHTS_FILE} nor {INDEX_FILE} to select "
            "from them; add one of these, or keep only one file"
        )
    return {path: [] for path in found}


@torch.no_grad()
def read_into(tensors: Mapping[str, Tensor], sources: Mapping[str, Source]) -> None:
    """Read this rank's shards of ``tensors``: ``file_tensors`` of any layout and dtype."""
    blocks = {name: local_block(tensor) for name, tensor in tensors.items()}
    sizes = {name: part.nbytes for name, (part, _) in blocks.items()}
    for name in progress(sizes.items(), "loading weights", sum(sizes.values())):
        part, spans = blocks[name]
        if part.numel():
            with _opened(sources[name].path) as opened:
                part.copy_(opened.get_slice(sources[name].name)[spans])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with_retries(lambda: require_regular(path), path)
        with_retries(lambda: path.open("rb").close(), path)  # safe_open reports every error as a missing file
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, and {INDEX_FILE} names it") from error
    except MISSING as error:
        raise CheckpointError(f"{path} {error.strerror}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or truncated ({printable(str(error))}): download it again") from error


def save_hf(
    tensors: Mapping[str, Tensor],
    folder: Path,
    model: DecoderConfig,
    dtype: str,
    tokenizer_path: str,
    *,
    bos: bool = True,
    read: Callable[[str], Tensor] | None = None,
    replace_old: bool = False,
) -> None:
    """Write ``tensors``, of any layout, as a folder that transformers loads. Collective.

    Each rank writes its shards, and rank 0 consolidates them, one file at a time. The folder appears when it is
    complete.

    Args:
        tensors: all parameters, by the names of torchtrain.
        dtype: the dtype of the written weights, such as "bfloat16".
        bos: whether a prompt begins with a BOS token, as the documents of a run do; if not, as the tokenizer's own
            files define it.
        read: returns the values of a parameter, if ``tensors`` are on the meta device.
        replace_old: whether an existing folder is replaced.

    Raises:
        CheckpointError: the folder cannot be written.
        ConfigError: see ``finite`` and ``require_exportable``.
    """
    require_exportable(model, dtype)
    torch_dtype, hf_name = getattr(torch, dtype), hf_format(model).parameter_name
    tensors, whole = file_tensors(tensors, model), tensors
    ours = {hf_name(name): name for name in tensors}
    cast = {theirs: tensors[name].detach().to(torch_dtype) for theirs, name in ours.items()}
    # Sizes of the full model, of which a rank may have a part, so that all ranks choose the same files.
    full = file_tensors(parameter_shapes(model), model)
    sizes = {hf_name(name): t.numel() * torch_dtype.itemsize for name, t in full.items()}

    def read_tensor(name: str) -> Tensor:
        assert read is not None
        if name in whole:
            return read(name)
        parameter, _, i = name.rpartition(".")
        return read(parameter)[int(i)]

    def value(name: str) -> Tensor:
        tensor = finite(local(cast[name]) if read is None else read_tensor(ours[name]).to(torch_dtype), name)
        bar.update(tensor.nbytes)
        return tensor

    def complete() -> None:
        try:
            shutil.rmtree(partial / "sharded", ignore_errors=True)
            _normalize_headers(partial)
            write_hf_config(partial, model, dtype, tokenizer_path, bos)
            fsync_folder(partial, *os.listdir(partial))
            if folder.exists():  # the rename below would silently replace an empty one
                if not replace_old:
                    raise ConfigError(
                        f"{folder} exists: another process has created it in the meantime; name another folder"
                    )
                folder.rename(old)
            partial.rename(folder)
            fsync_folder(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"{folder} could not be written: {error.strerror or error}") from error

    files, sharded = files_by_size(sizes), dist.get_world_size() > 1
    with ExitStack() as stack:  # on rank 0: removes the partial folder also on Ctrl-C
        partial = broadcast_from_rank0(lambda: stack.enter_context(partial_folder(folder)))
        old = partial_path(folder)
        writer = HuggingFaceStorageWriter(str(partial), files, save_distributed=sharded, enable_consolidation=sharded)
        own_bytes = sum(local(tensor).nbytes for tensor in cast.values())
        bar = stack.enter_context(ProgressBar(f"writing {folder}", own_bytes))
        try:
            save_tensors(cast, value, writer, folder)
            broadcast_from_rank0(complete)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; free space on the disk, or give this user permission to write there"
            ) from error


def _normalize_headers(folder: Path) -> None:
    """Rewrite the safetensors headers in ``folder``, and the index, so that they depend only on the weights.

    DCP writes the entries of a header in random order, with metadata for its consolidation of shards; these differ with
    the number of ranks.
    """
    for path in sorted(folder.glob("*.safetensors")):
        rewritten = path.with_suffix(PARTIAL_SUFFIX)
        with path.open("rb") as old, rewritten.open("xb") as new:
            entries = json.loads(old.read(int.from_bytes(old.read(8), "little")))
            entries.pop("__metadata__", None)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
            for name, entry in sorted(entries.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
                header[name] = {key: entry[key] for key in ("dtype", "shape", "data_offsets")}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # aligns the tensors
            new.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(old, new, BLOCK_BYTES)
        rewritten.replace(path)
    index = folder / INDEX_FILE
    index.write_text(json.dumps(json.loads(index.read_bytes()), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def require_exportable(model: DecoderConfig, dtype: str) -> None:
    """Raise ConfigError unless ``config.json`` can describe ``model``."""
    try:
        hf_format(model).to_config(model, dtype, None, None)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def finite(tensor: Tensor, name: str) -> Tensor:
    """Return ``tensor``, the weight ``name``; ConfigError unless all its elements are finite in its dtype."""
    if not tensor.isfinite().all():
        raise ConfigError(
            f"{name} has numbers that are not finite in {str(tensor.dtype).removeprefix('torch.')}, the dtype of the "
            "export: take another dtype (the maximum of float16 is 65504), or other weights"
        )
    return tensor


def files_by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    """Assign weights of ``sizes`` bytes to files, numbered from 1, of at most ``FILE_BYTES`` (or a single weight)."""
    files, file, filled = {}, 1, 0
    for name, size in sorted(sizes.items()):
        if filled and filled + size > FILE_BYTES:
            file, filled = file + 1, 0
        files[name] = file
        filled += size
    return files


def write_hf_config(folder: Path, model: DecoderConfig, dtype: str, tokenizer_path: str, bos: bool = True) -> None:
    """Write the other files of a Hugging Face folder: ``config.json`` and the tokenizer. ``bos``: see ``save_hf``."""
    tokenizer, file = load_tokenizer(tokenizer_path), tokenizer_file(tokenizer_path)
    eos_ids = find_eos_ids(tokenizer, file.parent, bos=bos)
    content = hf_format(model).to_config(model, dtype, tokenizer.bos_id, tokenizer.eos_id)
    config = content | {"eos_token_id": one_or_all(eos_ids)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_hf_tokenizer(folder, tokenizer, file, bos=bos, eos_ids=eos_ids)


class HuggingFaceFolder(WeightFormat):
    """A folder with ``config.json`` and safetensors files."""

    def recognizes(self, path: Path) -> bool:
        return is_hf_folder(path)

    def files_of(self, names: Sequence[str]) -> Sequence[str]:
        weights = [name for name in names if name.endswith(".safetensors")]
        if CONFIG_FILE not in names or not weights:
            return ()
        if WEIGHTS_FILE in weights:  # see ``_files``
            weights = [WEIGHTS_FILE]
        elif INDEX_FILE in names:  # which names none of Mistral's copies in another format
            weights = [name for name in weights if not name.startswith("consolidated")]
        return [*weights, *(name for name in names if name == INDEX_FILE or name in TOKENIZER_FILES)]

    def read_config(self, folder: Path) -> DecoderConfig:
        return read_hf_config(folder)

    def load(self, tensors: Mapping[str, Tensor], folder: Path, model: DecoderConfig) -> None:
        found = broadcast_from_rank0(lambda: find_tensors(folder, model))
        gather_from_all_ranks(lambda: read_into(file_tensors(tensors, model), found))


HUGGING_FACE_FOLDER = HuggingFaceFolder()
