"""Convert weights between formats, one tensor at a time: checkpoints, Hugging Face's folders and Meta's releases."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.checkpoint.format import VerifiedReader, VerifiedWriter, read_manifest
from torchtrain.checkpoint.local_storage import LocalNewCheckpoint
from torchtrain.checkpoint.saved_run import read_config
from torchtrain.checkpoint.states import load_weight_tensors, parameter_shapes, save_tensors
from torchtrain.checkpoint.storage import MANIFEST, StoredCheckpoint, open_storage
from torchtrain.checkpoint.weights import checkpoint_folders, fetch_folder, find_checkpoint, require_one_kind
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.distributed.process_group import init_process_group
from torchtrain.environment import require_one_process
from torchtrain.errors import CheckpointError
from torchtrain.files import is_url, parse_json, read_file, require_folder
from torchtrain.logging import logger
from torchtrain.models.model_config import build_model_config, require_sizes, to_model_section
from torchtrain.models.spec import DecoderConfig
from torchtrain.plugins.huggingface.config import CONFIG_FILE, read_hf_config
from torchtrain.plugins.huggingface.meta import META_SPLIT_BY_COLUMNS, config_from_meta, meta_rows_to_ours
from torchtrain.plugins.huggingface.safetensors_folder import (
    file_tensors,
    find_tensors,
    finite,
    is_hf_folder,
    read_into,
    save_hf,
)
from torchtrain.plugins.huggingface.tokenizer import begins_with_bos, check_tokenizer
from torchtrain.plugins.object_storage.partial_folder import partial_folder
from torchtrain.plugins.object_storage.storage import ObjectStore
from torchtrain.progress import ProgressBar


def convert(
    source_path: str | Path,
    target: str | Path,
    to: str,
    dtype_name: str,
    tokenizer_path: str = "",
    weights: str = "trained",
    average: int = 1,
) -> None:
    """Convert the weights in ``source_path`` to the format ``to`` ("hf" or "torchtrain"), written to ``target``.

    ``target`` appears when it is complete.

    Args:
        source_path: a run's folder, a checkpoint, a URL of these, a Hugging Face folder or one of Meta's releases.
        target: a folder or URL that does not exist.
        dtype_name: the dtype of the written weights, such as "bfloat16".
        tokenizer_path: the tokenizer of the model; "": that of the source.
        weights: "trained", or "ema" for the averaged weights of a run.
        average: the number of newest checkpoints of a run whose mean is written.

    Raises:
        CheckpointError: the source cannot be read, or the target exists.
        ConfigError: there are several processes; a weight is not finite in the dtype.
    """
    require_one_process("convert")
    if is_url(target):
        store = ObjectStore(str(target), "the target of convert")
        if store.names():
            raise CheckpointError(f"{target} exists; give a URL that does not, or remove it")
        store.check_access()  # before the work
        with TemporaryDirectory(prefix="torchtrain-convert-") as folder:
            converted = Path(folder) / "converted"
            convert(source_path, converted, to, dtype_name, tokenizer_path, weights, average)
            store.upload(converted, last=(CONFIG_FILE, MANIFEST))  # which make a folder of weights complete
        logger.info("wrote %s, in %s", target, dtype_name)
        return
    target = Path(target)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists; give a folder that does not, or remove it")
    init_process_group(torch.device("cpu"), timeout_seconds=60)  # DCP needs one, also for a single process
    try:
        source = open_source(source_path, tokenizer_path, weights, average)
        require_folder(target.parent, str(target))
        if to == "hf":
            save_hf(
                source.meta_tensors,
                target,
                source.model_config,
                dtype_name,
                source.tokenizer_path,
                bos=source.bos,
                read=source.read,
            )
        else:
            dtype = getattr(torch, dtype_name)
            tensors = {f"model.{name}": tensor.to(dtype) for name, tensor in source.meta_tensors.items()}
            names = {name: name.removeprefix("model.") for name in tensors}
            total = sum(tensor.nbytes for tensor in tensors.values())
            with partial_folder(target) as partial, ProgressBar(f"writing {target}", total) as bar:

                def value(name: str) -> Tensor:
                    tensor = finite(source.read(names[name]).to(dtype), names[name])
                    bar.update(tensor.nbytes)
                    return tensor

                writer = VerifiedWriter(LocalNewCheckpoint(target, partial), source.config_toml())
                save_tensors(tensors, value, writer, target)
    finally:
        dist.destroy_process_group()
    logger.info("wrote %s, in %s", target, dtype_name)


@dataclass(frozen=True)
class SourceWeights:
    """The weights of a source, which are read one by one, by the names of torchtrain."""

    model_config: DecoderConfig
    meta_tensors: Mapping[str, Tensor]
    """All parameters by name, as tensors on the meta device with the shapes and dtypes of the model."""
    read: Callable[[str], Tensor]
    """Reads the parameter with this name into CPU memory."""
    tokenizer_path: str
    bos: bool = True
    """Whether texts begin with a BOS token; see ``begins_with_bos``."""

    def config_toml(self) -> str:
        """A config of a run with this model, for ``config.toml`` in a checkpoint."""
        model = to_model_section(self.model_config, self.tokenizer_path)
        return to_toml(JobConfig(model=model, training=TrainingConfig(seq_len=self.model_config.max_seq_len)))


def open_source(source: str | Path, tokenizer_path: str, weights: str, average: int) -> SourceWeights:
    """Detect the format of ``source``, a path or URL, and open it."""
    if is_url(source) and (copy := fetch_folder(str(source))) is not None:
        require_one_kind(copy, weights if average == 1 else f"--average {average}")
        return hf_source(copy, tokenizer_path or str(source))
    path = Path(source)
    is_hf = not is_url(source) and is_hf_folder(path)
    if not is_hf and (is_url(source) or not (path / "params.json").is_file()):
        return checkpoint_source(find_checkpoints(source, average), tokenizer_path, weights)
    require_one_kind(path, weights if average == 1 else f"--average {average}")
    return hf_source(path, tokenizer_path) if is_hf else meta_source(path, tokenizer_path)


def checkpoint_source(checkpoints: Sequence[StoredCheckpoint], tokenizer_path: str, weights: str) -> SourceWeights:
    """Weights of a checkpoint, or the mean of several checkpoints of a run (LAWA, https://arxiv.org/abs/2209.14981)."""
    config = read_config(checkpoints[-1], only_model=True)
    tokenizer = load_tokenizer(tokenizer_path or config.model.tokenizer_path)
    if not tokenizer_path:
        tokenizer_path = config.model.tokenizer_path
        check_tokenizer(checkpoints[-1], tokenizer, tokenizer_path)
    model_config = build_model_config(config.model, tokenizer, config.training.seq_len)
    readers = [VerifiedReader(checkpoint) for checkpoint in checkpoints]
    meta_tensors = parameter_shapes(model_config)

    def read_from(reader: VerifiedReader, name: str) -> Tensor:
        tensor = torch.empty_like(meta_tensors[name], device="cpu")
        load_weight_tensors({name: tensor}, weights, reader)
        return tensor

    for reader in readers:
        read_from(reader, next(iter(meta_tensors)))  # missing weights are an error before anything is written

    def read(name: str) -> Tensor:
        total = read_from(readers[0], name)
        for reader in readers[1:]:
            total = total.double() + read_from(reader, name)
        return (total / len(readers)).to(meta_tensors[name].dtype)

    bos = begins_with_bos(checkpoints[-1], tokenizer)
    return SourceWeights(model_config, meta_tensors, read, tokenizer_path, bos)


def hf_source(folder: Path, tokenizer_path: str) -> SourceWeights:
    """Weights of a Hugging Face folder."""
    model_config = read_hf_config(folder)
    meta_tensors = parameter_shapes(model_config)
    found = find_tensors(folder, model_config)

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(meta_tensors[name], device="cpu")
        read_into(file_tensors({name: tensor}, model_config), found)
        return tensor

    return SourceWeights(model_config, meta_tensors, read, source_tokenizer(folder, tokenizer_path), bos=False)


def meta_source(folder: Path, tokenizer_path: str) -> SourceWeights:
    """Weights of Meta's release of a model, whose files each contain a tensor-parallel shard of every matrix."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        raise CheckpointError(f"{folder} has a params.json, but no files consolidated.*.pth with the weights")
    tokenizer_path = source_tokenizer(folder, tokenizer_path)
    vocab_size = load_tokenizer(tokenizer_path).vocab_size
    at = folder / "params.json"
    try:
        model_config = config_from_meta(parse_json(read_file(at, CheckpointError), at, CheckpointError), vocab_size)
        require_sizes(model_config)
        files = []
        for at in paths:  # the error message names this file
            files.append(torch.load(at, mmap=True, weights_only=True, map_location="cpu"))
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        pickle.UnpicklingError,
        EOFError,
    ) as error:
        raise CheckpointError(
            f"{at} is damaged, or not in Meta's format ({error!r:.200}): download it again"
        ) from error

    def read(name: str) -> Tensor:
        pieces = [file[name] for file in files]
        module = name.removesuffix(".weight").split(".", 2)[-1] if name.startswith("layers.") else name.split(".")[0]
        whole: Tensor = pieces[0]
        if len(files) > 1 and whole.ndim == 2:
            # Llama 2 splits the embedding by columns, Llama 3 by rows.
            by_columns = module in META_SPLIT_BY_COLUMNS or (
                module == "tok_embeddings" and whole.shape[1] != model_config.dim
            )
            whole = torch.cat(pieces, dim=1 if by_columns else 0)
        if module in ("attention.wq", "attention.wk"):
            heads = model_config.n_heads if module == "attention.wq" else model_config.n_kv_heads
            whole = meta_rows_to_ours(whole, heads)
        expected = meta_tensors[name].shape
        if whole.shape != expected:
            raise CheckpointError(f"{name} in {folder} has shape {tuple(whole.shape)}, not {tuple(expected)}")
        return whole

    meta_tensors = parameter_shapes(model_config)
    for path, file in zip(paths, files, strict=True):
        if missing := [name for name in meta_tensors if name not in file]:
            raise CheckpointError(f"{path} lacks {', '.join(missing[:5])}")
    return SourceWeights(model_config, meta_tensors, read, tokenizer_path)


def source_tokenizer(folder: Path, tokenizer_path: str) -> str:
    """``tokenizer_path``, or by default the tokenizer in ``folder``; CheckpointError if there is none."""
    path = tokenizer_path or str(folder)
    if not tokenizer_file(path).is_file():
        raise CheckpointError(f"{path} has no tokenizer, which the converted model needs; give one by --tokenizer_path")
    load_tokenizer(path)  # an invalid one is an error before anything is written
    return path


def find_checkpoints(path: str | Path, count: int) -> list[StoredCheckpoint]:
    """The newest ``count`` checkpoints of the run in ``path``; for 1, that of ``find_checkpoint``. CheckpointError."""
    if count == 1:
        return [find_checkpoint(path)]
    for folder in checkpoint_folders(path):
        storage = open_storage(folder)
        if steps := storage.steps()[-count:]:
            break
    else:
        find_checkpoint(path)  # raises, if there is none
        steps = []
    if len(steps) < count:
        has = f"has {len(steps)}" if steps else "is one"
        raise CheckpointError(f"the mean of {count} checkpoints was asked for, and {path} {has}; give a run's folder")
    checkpoints = [storage.open(step) for step in steps]
    if len({read_manifest(checkpoint).run for checkpoint in checkpoints}) > 1:
        raise CheckpointError(f"the newest {count} checkpoints in {storage} are not of one run")
    return checkpoints
