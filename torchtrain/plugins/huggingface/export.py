"""Export the weights of a completed run in Hugging Face's format, to ``hf/`` in its dump folder."""

import json
from pathlib import Path

import torch.distributed as dist
import xxhash

from torchtrain.checkpoint.states import STATES
from torchtrain.checkpoint.storage import MANIFEST, checkpoint_storage
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.agreement import on_rank0
from torchtrain.distributed.process_group import set_timeout
from torchtrain.files import MISSING, atomic_write, json_object, read_file
from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.hooks import Hook
from torchtrain.plugins.huggingface.config import CONFIG_FILE
from torchtrain.plugins.huggingface.options import HuggingFaceConfig
from torchtrain.plugins.huggingface.safetensors_folder import save_hf
from torchtrain.trainer import Trainer

ORIGIN = "hf_made_from.json"  # beside hf/, whose files depend only on the weights
EXPORT_SECONDS = 3600  # for which the other ranks wait while rank 0 consolidates the files


class HuggingFaceExport(Hook):
    """``huggingface.export``."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def misses_export(self, step: int) -> bool:
        return is_export_missing(self.trainer.config_of_run(), step, self.trainer.gloo_group)

    def export(self, step: int) -> None:
        config = self.trainer.config_of_run()
        folder = Path(config.job.dump_folder) / "hf"
        set_timeout(EXPORT_SECONDS)
        options = _options(config)
        weights = self.trainer.checkpointer.states[STATES[options.export_weights]].state_dict()
        model, tokenizer = self.trainer.model_config, config.model.tokenizer_path
        save_hf(weights, folder, model, options.export_dtype, tokenizer, replace_old=True)
        logger.info("wrote %s", folder)
        if dist.get_rank() == 0 and config.checkpoint.enable:
            origin = json.dumps(export_origin(config, step)).encode()
            # The dump folder may be lost with its node.
            if stored := checkpoint_storage(config).store_export(folder, origin):
                logger.info("wrote %s", stored)
            with (
                BestEffort(ORIGIN),
                atomic_write(folder.with_name(ORIGIN)) as file,
            ):  # else it is exported again
                file.write(origin)


def is_export_missing(config: JobConfig, step: int, group: dist.ProcessGroup) -> bool:
    """Whether ``hf/`` is missing, or was exported from a checkpoint other than that of ``step``, or with other options.

    Collective over the gloo ``group``, whose timeout it may exceed, because requests to a store are retried.
    """

    def is_outdated() -> bool:
        folder = Path(config.job.dump_folder)
        try:
            origin = checkpoint_storage(config).read_export_origin()
            if origin is None:
                read_file(folder / "hf" / CONFIG_FILE)
                origin = read_file(folder / ORIGIN)
        except MISSING:
            return True
        made_from = json_object(origin)
        return made_from is None or made_from != export_origin(config, step)

    return not config.checkpoint.enable or on_rank0(is_outdated, group)


def _options(config: JobConfig) -> HuggingFaceConfig:
    return section_of(config, HuggingFaceConfig)


def export_origin(config: JobConfig, step: int) -> dict[str, str]:
    """Identifies an export: the hash of the manifest of its checkpoint, and the options of the export."""
    manifest = checkpoint_storage(config).open(step).read(MANIFEST)
    options = {"weights": _options(config).export_weights, "dtype": _options(config).export_dtype}
    return {"manifest": xxhash.xxh3_128_hexdigest(manifest), **options}
