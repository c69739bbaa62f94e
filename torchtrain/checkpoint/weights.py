"""Loading only the weights, to start a run from them or to use them without training. Files are not changed."""

from collections.abc import Collection, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn

from torchtrain.checkpoint.hf import check_same_shape, is_hf_folder, load_hf
from torchtrain.checkpoint.history import saved_steps, step_folder
from torchtrain.checkpoint.manifest import MANIFEST, read_manifest, verify_file
from torchtrain.checkpoint.states import ModelState, flatten, load_tensors
from torchtrain.checkpoint.storage import VerifiedReader
from torchtrain.distributed.agreement import of_all_ranks, of_first_rank
from torchtrain.errors import CheckpointError
from torchtrain.models.families import read_hf_config
from torchtrain.models.llama.model import TransformerConfig


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` names: itself, or the newest in a run's folder or in its ``checkpoint``."""
    if (path / MANIFEST).exists() or path.name.startswith("step-"):
        return path
    for folder in (path / "checkpoint", path):
        if steps := saved_steps(folder):
            return step_folder(folder, steps[-1])
    what = "has no checkpoint" if path.is_dir() else "does not exist"
    raise CheckpointError(f"{path} {what}; give a run's folder, such as outputs/debug_model, or a step-N folder")


def find_weights(path: Path) -> Path:
    """``path`` if it is a Hugging Face folder, else the checkpoint that it names."""
    return path if is_hf_folder(path) else find_checkpoint(path)


def load_weights(
    parts: Sequence[nn.Module], folder: Path, model: TransformerConfig, wanted: Collection[str] = ()
) -> None:
    """Write the weights in ``folder``, as ``find_weights`` gave it, into ``parts`` of ``model``. Collective.

    Layouts and dtypes need not be alike. ``wanted``: as for ``check_same_shape``.

    Raises:
        CheckpointError: a file is missing or damaged, a parameter is not in it, or it is for another model.
    """
    state = ModelState(parts, model.tied_embeddings)
    if is_hf_folder(folder):
        check_same_shape(of_first_rank(lambda: read_hf_config(folder)), model, folder, wanted)
        load_hf(state.state_dict(), folder, model)
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def problem() -> str | None:
        own = (verify_file(folder, record) for record in read_manifest(folder).files[rank::ranks])
        return next((problem for problem in own if problem), None)

    for found in of_all_ranks(problem):
        if found:
            raise CheckpointError(f"{found}; give another step-N folder")
    load_tensors(flatten({"model": state}), VerifiedReader(folder), folder, None)
