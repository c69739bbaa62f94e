"""Export the weights of a completed run in Hugging Face's format, to ``hf/`` in its dump folder."""

import json
from pathlib import Path

import torch.distributed as dist
import xxhash

from torchtrain.checkpoint.hf.config import CONFIG_FILE
from torchtrain.checkpoint.hf.weights import require_exportable, save_hf
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.object_storage import ObjectStore
from torchtrain.checkpoint.states import STATES
from torchtrain.checkpoint.storage import MANIFEST, checkpoint_storage
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.agreement import on_rank0
from torchtrain.distributed.process_group import set_timeout
from torchtrain.errors import ConfigError
from torchtrain.files import MISSING, is_url, read_file, require_folder
from torchtrain.logging import BestEffort, logger
from torchtrain.models.spec import DecoderConfig

NOTE = "made_from.json"  # in hf/
EXPORT_SECONDS = 3600  # for which the other ranks wait while rank 0 consolidates the files


def check_export(config: JobConfig, model: DecoderConfig) -> None:
    """Raise ConfigError if ``model`` cannot be exported, or ``hf/`` cannot be written at the end of the run."""
    folder = Path(config.job.dump_folder) / "hf"
    if folder.is_symlink():
        raise ConfigError(
            f"{folder} is a link, and checkpoint.last_save_in_hf writes a folder of that name: remove or rename the "
            "link, or name another job.dump_folder"
        )
    if folder.exists():
        require_folder(folder, f"{folder}, in whose place checkpoint.last_save_in_hf writes the export,")
    require_exportable(model, config.checkpoint.export_dtype)


def needs_export(config: JobConfig, step: int, group: dist.ProcessGroup) -> bool:
    """Whether ``hf/`` is missing, or was exported from a checkpoint other than that of ``step``, or with other options.

    Collective over ``group``, whose timeout it may exceed, because requests to a store are retried.
    """

    def is_outdated() -> bool:
        try:
            if is_url(config.checkpoint.folder):
                note = ObjectStore(config.checkpoint.folder, "checkpoint.folder").read(f"hf/{NOTE}")
            else:
                note = read_file(Path(config.job.dump_folder) / "hf" / NOTE)
            return bool(json.loads(note) != _origin(config, step))
        except (*MISSING, ValueError):
            return True

    return not config.checkpoint.enable or on_rank0(is_outdated, group)


def _origin(config: JobConfig, step: int) -> dict[str, str]:
    """Identifies an export: the hash of the manifest of its checkpoint, and the options of the export."""
    manifest = checkpoint_storage(config).open(step).read(MANIFEST)
    checkpoint = config.checkpoint
    options = {"weights": checkpoint.export_weights, "dtype": checkpoint.export_dtype}
    return {"manifest": xxhash.xxh3_128_hexdigest(manifest), **options}


def export_hf(config: JobConfig, step: int, checkpoint: CheckpointManager, model: DecoderConfig) -> None:
    """Export the weights after ``step``, the last step, to ``hf/``. Collective."""
    folder = Path(config.job.dump_folder) / "hf"
    set_timeout(EXPORT_SECONDS)
    weights = checkpoint.states[STATES[config.checkpoint.export_weights]].state_dict()
    save_hf(weights, folder, model, config.checkpoint.export_dtype, config.model.tokenizer_path, replace_old=True)
    if dist.get_rank() == 0 and config.checkpoint.enable:
        with BestEffort(str(folder / NOTE)):  # if it fails, the next start exports again
            (folder / NOTE).write_text(json.dumps(_origin(config, step)), encoding="utf-8")
    logger.info("wrote %s", folder)
    if dist.get_rank() == 0 and is_url(config.checkpoint.folder):
        # The dump folder may be lost with its node.
        store = ObjectStore(config.checkpoint.folder, "checkpoint.folder")
        store.delete(f"hf/{NOTE}")  # first, so that an interrupted export is repeated
        store.delete_folder("hf")
        store.upload(folder, "hf", last=(CONFIG_FILE, NOTE))
        logger.info("wrote %s", store.url_of("hf"))
