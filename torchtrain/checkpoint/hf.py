"""Weights from and to a Hugging Face folder, sharded: through DCP, no rank holds more than its part of the model."""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from torchtrain.checkpoint.hf_files import HFReader, find_tensors
from torchtrain.checkpoint.hf_tokenizer import write_hf_tokenizer
from torchtrain.checkpoint.states import ModelState, load_tensors, save_tensors
from torchtrain.checkpoint.storage import PARTIAL_SUFFIX, fsync_folder
from torchtrain.distributed.agreement import of_first_rank
from torchtrain.distributed.mesh import local
from torchtrain.errors import CheckpointError
from torchtrain.log import logger
from torchtrain.models.families import CONFIG_FILE, hf_config, hf_name
from torchtrain.models.llama.model import Transformer, TransformerConfig
from torchtrain.tokenizers import load_tokenizer, tokenizer_file

FILE_BYTES = 5 * 10**9  # about as much as Hugging Face's own files hold


def is_hf_folder(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and any(path.glob("*.safetensors"))


def expected_tensors(model: TransformerConfig) -> dict[str, torch.Size]:
    """Names and shapes of the tensors of ``model`` in a Hugging Face folder, a tied one once."""
    return {hf_name(name): tensor.shape for name, tensor in parameter_shapes(model).items()}


def ignored_tensors(model: TransformerConfig) -> tuple[str, ...]:
    """Ends of names that transformers ignores, too: RoPE tables of old exports, and a tied matrix by its other name."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if model.tied_embeddings else ()))


def parameter_shapes(model: TransformerConfig) -> dict[str, Tensor]:
    """Meta tensors of the parameters of ``model``, by our names, a tied one once."""
    with torch.device("meta"):
        return ModelState([Transformer(model)], model.tied_embeddings).state_dict()


def check_same_shape(
    found: TransformerConfig, model: TransformerConfig, folder: Path, wanted: Collection[str] = ()
) -> None:
    """Raise ``CheckpointError`` unless weights for ``found``, in ``folder``, compute the same in ``model``.

    ``wanted``: fields of ``model`` that may be others than in ``found``, such as ``rope_scaling``.
    """
    found = replace(found, max_seq_len=model.max_seq_len)
    if found == model:
        return
    compared = (field.name for field in fields(model) if field.compare)
    names = [name for name in compared if getattr(found, name) != getattr(model, name)]
    listed = "; ".join(f"{name} = {getattr(found, name)!r}, here {getattr(model, name)!r}" for name in names)
    if set(names) <= set(wanted):
        logger.warning("the weights in %s are of a model with %s, as [model.shape] asks for", folder, listed)
        return
    raise CheckpointError(
        f"{folder} holds another model than the config asks for: {listed}. Set model.hf_folder to it, or the "
        "model.flavor, model.vocab_size, [model.shape] and model.tokenizer_path that belong to it"
    )


def load_hf(
    tensors: Mapping[str, Tensor], folder: Path, model: TransformerConfig, group: dist.ProcessGroup | None = None
) -> None:
    """Write the weights in ``folder`` into ``tensors``: live ones of ``model``, by our names, of any layout and dtype.

    Raises:
        CheckpointError: the folder does not hold the weights of ``model``, and nothing else.
    """
    found = of_first_rank(lambda: find_tensors(folder, expected_tensors(model), ignored_tensors(model)), group)
    load_tensors({hf_name(name): tensor for name, tensor in tensors.items()}, HFReader(folder, found), folder, group)


def save_hf(
    tensors: Mapping[str, Tensor],
    folder: Path,
    model: TransformerConfig,
    dtype: str,
    tokenizer_path: str,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write ``tensors``, under our names and of any layout, as a folder that transformers loads. Collective.

    Each rank writes its shards in ``dtype`` (such as bfloat16), the first one puts them together, file by file. The
    folder appears when it is complete; one of that name is replaced.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    cast = {name: tensor.detach().to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    staged = {name: local(tensor) for name, tensor in cast.items()}
    write_hf(folder, cast, staged, model, dtype, tokenizer_path, group=group)


def write_hf(
    folder: Path,
    shapes: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    model: TransformerConfig,
    dtype: str,
    tokenizer_path: str,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """``save_hf`` with this rank's ``values``, in ``dtype``, apart from ``shapes``, which may be on the meta device."""
    alone = dist.get_world_size(group) == 1
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)

    def begin() -> None:
        with _failing_as_checkpoint_error(folder):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def complete() -> None:
        with _failing_as_checkpoint_error(folder):
            shutil.rmtree(partial / "sharded", ignore_errors=True)
            write_hf_config(partial, model, dtype, tokenizer_path)
            fsync_folder(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

    names = {hf_name(name): name for name in shapes}
    tensors = {theirs: shapes[name] for theirs, name in names.items()}
    files = _files(tensors, group)
    try:
        of_first_rank(begin, group)
        save_tensors(
            tensors,
            LazyTensors(names, lambda name: values[names[name]]),
            HuggingFaceStorageWriter(str(partial), files, save_distributed=not alone, enable_consolidation=not alone),
            folder,
            group,
        )
        of_first_rank(complete, group)
    except CheckpointError:
        if dist.get_rank(group) == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _failing_as_checkpoint_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written: {error.strerror or error}; make room, or let this user write there"
        ) from error


class LazyTensors(Mapping[str, Tensor]):
    """A dict whose values are made when they are asked for, and not kept."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
        self.names = list(names)
        self.make = make

    def __getitem__(self, name: str) -> Tensor:
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _files(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Which file, from 1, each weight goes to: the same answer on all ranks, of which each may have a part."""
    everywhere: list[dict[str, int]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, {name: t.numel() * t.element_size() for name, t in tensors.items()}, group)
    return files_by_size({name: size for sizes in everywhere for name, size in sizes.items()})


def files_by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    """Which file, from 1, each weight of ``sizes`` bytes goes to, about ``FILE_BYTES`` in each."""
    files, file, filled = {}, 1, 0
    for name, size in sorted(sizes.items()):
        if filled and filled + size > FILE_BYTES:
            file, filled = file + 1, 0
        files[name] = file
        filled += size
    return files


def write_hf_config(folder: Path, model: TransformerConfig, dtype: str, tokenizer_path: str) -> None:
    """Write what a Hugging Face folder has beside the weights: ``config.json`` and the tokenizer."""
    tokenizer = load_tokenizer(tokenizer_path)
    config = hf_config(model, dtype, tokenizer.bos_id, tokenizer.eos_id)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_hf_tokenizer(folder, tokenizer, tokenizer_file(tokenizer_path))
