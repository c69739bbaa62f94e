"""Loading only the weights, to start a run from them or to use them without training. Files are not changed."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from torch import nn

from torchtrain.checkpoint.format import CONFIG, VerifiedReader
from torchtrain.checkpoint.local_storage import LocalCheckpoint
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.other_formats import WeightFormat
from torchtrain.checkpoint.saved_run import SavedRun, read_config
from torchtrain.checkpoint.states import ModelState, load_weight_tensors
from torchtrain.checkpoint.storage import (
    MANIFEST,
    STEP,
    StoredCheckpoint,
    open_storage,
)
from torchtrain.config.parse import from_toml, read_table, read_text
from torchtrain.config.registry import URL_READERS, WEIGHT_FORMATS
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.config.urls import local_copy, names_at
from torchtrain.datasets.tokenizers import TOKENIZER_FILES
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.mesh import local
from torchtrain.errors import CheckpointError, ConfigError, DamagedError
from torchtrain.files import MISSING, is_url, scheme_of
from torchtrain.logging import logger
from torchtrain.models.model_config import given, longest_context, to_model_section
from torchtrain.models.options import ModelConfig
from torchtrain.models.spec import DecoderConfig, spec_of


def check_same_architecture(
    found: DecoderConfig, model: DecoderConfig, folder: StoredCheckpoint | Path, may_differ: Collection[str] = ()
) -> None:
    """Raise ``CheckpointError`` unless the weights in ``folder``, of a model ``found``, fit the config ``model``.

    ``may_differ``: fields that may have different values, such as ``rope_scaling``; a warning names them.
    """
    if spec_of(found).model_class is not spec_of(model).model_class:
        raise CheckpointError(
            f"{folder} contains a model of another architecture than the config: model.name = {found.family!r}, here "
            f"{model.family!r}"
        )
    found = replace(found, max_seq_len=model.max_seq_len)
    names = [f.name for f in fields(model) if f.compare and getattr(found, f.name) != getattr(model, f.name)]
    if not names:
        return
    listed = "; ".join(f"{name} = {getattr(found, name)!r}, here {getattr(model, name)!r}" for name in names)
    if set(names) <= set(may_differ):
        logger.warning("the weights in %s are those of a model with %s, as configured", folder, listed)
        return
    raise CheckpointError(
        f"{folder} contains a different model than the config: {listed}. Set model.flavor, model.vocab_size, "
        "[model.shape] and model.tokenizer_path to those of the weights, or model.hf_folder if they are in Hugging "
        "Face's format"
    )


def require_one_kind(folder: StoredCheckpoint | Path, weights: str) -> None:
    """Raise CheckpointError unless ``weights`` is "trained": ``folder`` is not of a run, and only runs have others."""
    if weights != "trained":
        raise CheckpointError(f"{folder} has one set of weights; {weights!r} needs the checkpoints of a run")


def checkpoint_folders(path: str | Path) -> list[str]:
    """Where the checkpoints of ``path`` may be, which is a run's folder, or the folder of its checkpoints."""
    folders = [f"{str(path).rstrip('/')}/checkpoint", str(path)]
    if not is_url(path) and (Path(path) / CONFIG).is_file() and not (Path(path) / MANIFEST).exists():
        with suppress(ConfigError):
            # Other options may be of a plugin that is not installed here.
            section = read_table(read_text(str(Path(path) / CONFIG)), CONFIG).get("checkpoint")
            given = {"folder": section["folder"]} if isinstance(section, dict) and "folder" in section else {}
            folders.insert(0, from_toml(CheckpointConfig, given, "checkpoint.").location(path))
    return folders


def find_checkpoint(path: str | Path) -> StoredCheckpoint:
    """The checkpoint that ``path``, a path or URL, names: itself, or the newest of a run's folder.

    Raises:
        CheckpointError: there is none.
        StorageError: the storage does not answer.
    """
    parent, _, name = str(path).rstrip("/").rpartition("/")
    if not is_url(path) and (Path(path) / MANIFEST).exists():
        return LocalCheckpoint(Path(path))
    if is_url(path) and (itself := open_storage(str(path)).itself()) is not None:
        return itself
    for folder in checkpoint_folders(path):
        storage = open_storage(folder)
        if steps := storage.steps():
            return storage.open(steps[-1])
    # Missing files are reported when it is read.
    if is_url(path) and (match := STEP.fullmatch(name)):
        return open_storage(parent).open(int(match[1]))
    if not is_url(path) and STEP.match(name):
        return LocalCheckpoint(Path(path))
    exists = is_url(path) or Path(path).exists()
    what = "has no checkpoint" if exists else "does not exist"
    if not is_url(path) and (Path(path) / CONFIG).is_file():
        what = "is the folder of a run that has saved no checkpoint; a run saves them with checkpoint.enable"
    elif not is_url(path) and (Path(path) / "config.json").is_file():
        if next(Path(path).glob("*.safetensors"), None):
            WEIGHT_FORMATS.check("huggingface", f"{path}: its format")
        what = "has a config.json, and no weights in safetensors files beside it"
    raise CheckpointError(
        f"{path} {what}; give a run's folder, such as outputs/debug_model, a step-N folder, or a Hugging Face folder "
        "with safetensors files"
    )


def find_weights(path: str | Path) -> StoredCheckpoint | Path:
    """The Path of a folder of one of the ``WEIGHT_FORMATS``, or of a copy of it, else the checkpoint that it names."""
    if is_url(path):
        return fetch_folder(str(path)) or find_checkpoint(path)
    if any(WEIGHT_FORMATS[name].recognizes(Path(path)) for name in WEIGHT_FORMATS):
        return Path(path)
    return find_checkpoint(path)


def fetch_folder(url: str) -> Path | None:
    """A local copy of ``url`` if it is a folder of one of the ``WEIGHT_FORMATS``. Raises as ``local_copy``."""
    if scheme_of(url) not in URL_READERS:  # the checkpoint storage of a plugin
        return None
    names = names_at(url, "the path")
    files = (WEIGHT_FORMATS[name].files_of(names) for name in WEIGHT_FORMATS)
    needed = next(filter(None, files), None)
    return None if needed is None else local_copy(url, "the path", needed)


def format_of(folder: Path) -> WeightFormat:
    """The format of ``folder``, which ``find_weights`` gave."""
    found: WeightFormat = next(
        form for form in map(WEIGHT_FORMATS.__getitem__, WEIGHT_FORMATS) if form.recognizes(folder)
    )
    return found


def load_weights(
    parts: Sequence[nn.Module], folder: StoredCheckpoint | Path, model: DecoderConfig, weights: str = "trained"
) -> None:
    """Write the weights in ``folder``, as ``find_weights`` gave it, into ``parts`` of ``model``. Collective.

    Layouts and dtypes may differ. ``check_same_architecture`` checks whether the weights fit the model.
    ``weights``: see ``STATES``.

    Raises:
        CheckpointError: a file is missing or damaged, a parameter is not in it, or not finite.
    """
    # Its run may still save: each rank may have found another newest checkpoint.
    folder = broadcast_from_rank0(lambda: folder)
    tensors = ModelState(parts, model.tied_embeddings).state_dict()
    if isinstance(folder, Path):
        require_one_kind(folder, weights)
        format_of(folder).load(tensors, folder, model)
    else:
        try:
            load_weight_tensors(tensors, weights, VerifiedReader(folder))
        except DamagedError as error:
            raise CheckpointError(f"{error}; give another step-N folder") from error
    for names in gather_from_all_ranks(lambda: [name for name, t in tensors.items() if not local(t).isfinite().all()]):
        if names:
            raise CheckpointError(f"{folder} has numbers that are not finite, in {', '.join(names[:5])}; take another")


def saved_config(folder: StoredCheckpoint | Path) -> JobConfig:
    """Return the config of the model whose weights are in ``folder``, a result of ``find_weights``."""
    if isinstance(folder, Path):
        model = format_of(folder).read_config(folder)
        return JobConfig(model=to_model_section(model, str(folder)), training=TrainingConfig(seq_len=model.max_seq_len))
    try:
        folder.size_bytes(CONFIG)
    except MISSING as error:
        raise CheckpointError(
            f"{folder} has no {CONFIG} and so is not a checkpoint; give a run's folder or a step-N in it"
        ) from error
    return read_config(folder, only_model=True)


def with_longest_context(config: JobConfig, saved: SavedRun) -> JobConfig:
    """Set the longest context of ``config``, unless it is set, to that of the weights that its run starts from.

    These are its own checkpoints or, without any, the weights in ``checkpoint.initial_load_path``.

    Raises:
        CheckpointError: these weights are missing.
    """
    shape, checkpoint = config.model.shape, config.checkpoint
    if shape.max_position_embeddings is not None:
        return config
    if saved.exists:  # a run that resumes does not need its initial weights
        found = saved.config.model.shape.max_position_embeddings if saved.config else None
    else:
        found = longest_context(saved_config(find_weights(checkpoint.initial_load_path)))
    return replace(config, model=replace(config.model, shape=replace(shape, max_position_embeddings=found)))


def resolve_model_section(model: ModelConfig) -> ModelConfig:
    """Replace ``hf_folder``, which must be set, by explicit options, so that the folder is no longer needed.

    Raises:
        CheckpointError: the folder does not contain a supported model.
    """
    folder = local_copy(model.hf_folder, "model.hf_folder", TOKENIZER_FILES)  # config.json is among them
    found = WEIGHT_FORMATS["huggingface"].read_config(folder)
    explicit = to_model_section(found, model.tokenizer_path or model.hf_folder)
    changes = given(model.shape)
    if "rope_scaling" in changes:
        changes["rope_scaling"] = replace(explicit.shape.rope_scaling, **changes["rope_scaling"])
    overrides = replace(explicit.shape, **changes)
    vocab_size = explicit.vocab_size if model.vocab_size is None else model.vocab_size
    return replace(explicit, shape=overrides, vocab_size=vocab_size, options={**explicit.options, **model.options})
