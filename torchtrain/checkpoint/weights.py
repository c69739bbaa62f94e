"""Loading only the weights, to start a run from them or to use them without training. Files are not changed."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from torchtrain.checkpoint.format import CONFIG, MANIFEST, VerifiedReader, read_manifest
from torchtrain.checkpoint.hf.config import CONFIG_FILE
from torchtrain.checkpoint.hf.weights import find_tensors, is_hf_folder, read_into
from torchtrain.checkpoint.states import ModelState, load_weight_tensors
from torchtrain.checkpoint.storage import STEP, saved_steps, step_folder
from torchtrain.datasets.tokenizers import JsonTokenizer, Tokenizer
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.mesh import local
from torchtrain.errors import CheckpointError, DamagedError
from torchtrain.files import printable
from torchtrain.models.spec import DecoderConfig


def require_one_kind(folder: Path, weights: str) -> None:
    """Raise CheckpointError where ``weights`` are asked for that only a run has, of ``folder``, which is not one's."""
    if weights != "trained":
        raise CheckpointError(f"{folder} has one set of weights; {weights!r} needs the checkpoints of a run")


def begins_with_bos(folder: Path, tokenizer: Tokenizer) -> bool:
    """Whether the model in ``folder``, as ``find_weights`` gave it, knows texts that begin with bos.

    A run's documents do, and so do those of Meta's models. Another model of Hugging Face's is used as its tokenizer's
    own files say, also where ``convert`` has made a checkpoint of it.
    """
    if is_hf_folder(folder):
        return False
    return read_manifest(folder).run is not None or not isinstance(tokenizer, JsonTokenizer)


def check_tokenizer(folder: Path, tokenizer: Tokenizer, path: str) -> None:
    """Raise CheckpointError where ``tokenizer``, which lies in ``path`` now, is not that of the run that made
    ``folder``."""
    saved = read_manifest(folder).data.get("model.tokenizer_path", tokenizer.identity)
    if saved != tokenizer.identity:
        raise CheckpointError(
            f"{folder} is of a run whose tokenizer in model.tokenizer_path = {path!r} was another one "
            f"({printable(saved)}, now {tokenizer.identity}): put it back, or name the one to use by tokenizer_path"
        )


def find_checkpoints(path: Path, count: int) -> list[Path]:
    """The newest ``count`` checkpoints of the run in ``path``; for 1, that of ``find_checkpoint``. CheckpointError."""
    newest = find_checkpoint(path)
    if count == 1:
        return [newest]
    steps = saved_steps(newest.parent)[-count:]
    if path == newest or len(steps) < count:
        has = "is one" if path == newest else f"has {len(steps)}"
        raise CheckpointError(f"the mean of {count} checkpoints was asked for, and {path} {has}; give a run's folder")
    folders = [step_folder(newest.parent, step) for step in steps]
    if len({read_manifest(folder).run for folder in folders}) > 1:
        raise CheckpointError(f"the newest {count} checkpoints in {newest.parent} are not of one run")
    return folders


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` names: itself, or the newest in a run's folder or in its ``checkpoint``."""
    if (path / MANIFEST).exists():
        return path
    for folder in (path / "checkpoint", path):
        if steps := saved_steps(folder):
            return step_folder(folder, steps[-1])
    if STEP.match(path.name):
        return path  # missing files are reported when it is read
    what = "has no checkpoint" if path.exists() else "does not exist"
    if (path / CONFIG).is_file():
        what = "is the folder of a run that has saved no checkpoint; a run saves them with checkpoint.enable"
    elif (path / CONFIG_FILE).is_file():
        what = f"has a {CONFIG_FILE}, and no weights in safetensors files beside it"
    raise CheckpointError(
        f"{path} {what}; give a run's folder, such as outputs/debug_model, a step-N folder, or a Hugging Face folder "
        "with safetensors files"
    )


def find_weights(path: Path) -> Path:
    """``path`` if it is a Hugging Face folder, else the checkpoint that it names."""
    return path if is_hf_folder(path) else find_checkpoint(path)


def load_weights(parts: Sequence[nn.Module], folder: Path, model: DecoderConfig, weights: str = "trained") -> None:
    """Write the weights in ``folder``, as ``find_weights`` gave it, into ``parts`` of ``model``. Collective.

    Layouts and dtypes may differ. Whether the weights are of the same architecture is checked by ``check_same_shape``.
    ``weights``: see ``STATES``.

    Raises:
        CheckpointError: a file is missing or damaged, a parameter is not in it, or not finite.
    """
    # Its run may still save: each rank may have found another newest checkpoint.
    folder = broadcast_from_rank0(lambda: folder)
    tensors = ModelState(parts, model.tied_embeddings).state_dict()
    if is_hf_folder(folder):
        require_one_kind(folder, weights)
        found = broadcast_from_rank0(lambda: find_tensors(folder, model))
        gather_from_all_ranks(lambda: read_into(tensors, found))
    else:
        try:
            load_weight_tensors(tensors, weights, VerifiedReader(folder))
        except DamagedError as error:
            raise CheckpointError(f"{error}; give another step-N folder") from error
    for names in gather_from_all_ranks(lambda: [name for name, t in tensors.items() if not local(t).isfinite().all()]):
        if names:
            raise CheckpointError(f"{folder} has numbers that are not finite, in {', '.join(names[:5])}; take another")
