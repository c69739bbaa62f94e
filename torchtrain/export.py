"""The weights of a run that has done all its steps, as transformers loads them: ``hf/`` in its dump folder."""

import os
from pathlib import Path

import torch.distributed as dist

from torchtrain.checkpoint.hf import save_hf
from torchtrain.checkpoint.history import step_folder
from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.states import STATES
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.agreement import of_first_rank
from torchtrain.distributed.process_group import set_timeout
from torchtrain.log import logger
from torchtrain.models.llama import TransformerConfig
from torchtrain.reading import patiently

EXPORT_SECONDS = 3600  # for which the other ranks wait while the first one puts the files together


def needs_export(config: JobConfig, step: int, group: dist.ProcessGroup) -> bool:
    """Whether ``hf/`` is missing, or older than the checkpoint of ``step``. Collective over ``group``."""
    folder = Path(config.job.dump_folder)

    def modified(path: Path) -> float:
        return patiently(lambda: os.stat(path).st_mtime, path)

    def is_older() -> bool:
        try:
            return modified(folder / "hf") < modified(step_folder(folder / "checkpoint", step))
        except FileNotFoundError:
            return True

    return config.checkpoint.last_save_in_hf and of_first_rank(is_older, group)


def export_hf(config: JobConfig, checkpoint: CheckpointManager, model: TransformerConfig) -> None:
    """Write the weights that ``checkpoint`` saves to ``hf/``. Collective."""
    folder = Path(config.job.dump_folder) / "hf"
    set_timeout(EXPORT_SECONDS)
    weights = checkpoint.states[STATES[config.checkpoint.export_weights]].state_dict()
    save_hf(weights, folder, model, config.checkpoint.export_dtype, config.model.tokenizer_path)
    logger.info("wrote %s", folder)
