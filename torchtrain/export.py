"""The weights of a run that has done all its steps, as transformers loads them: ``hf/`` in its dump folder."""

import os
from pathlib import Path

from torchtrain.build import Run
from torchtrain.checkpoint.hf import save_hf
from torchtrain.checkpoint.history import step_folder
from torchtrain.checkpoint.states import STATES
from torchtrain.config.schema import JobConfig
from torchtrain.distributed.agreement import of_first_rank
from torchtrain.log import logger
from torchtrain.reading import patiently


def needs_export(config: JobConfig, run: Run) -> bool:
    """Whether ``hf/`` is older than the checkpoint of ``run.step``, or missing. Collective."""
    folder = Path(config.job.dump_folder)

    def modified(path: Path) -> float:
        return patiently(lambda: os.stat(path).st_mtime, path)

    def is_older() -> bool:
        try:
            return modified(folder / "hf") < modified(step_folder(folder / "checkpoint", run.step))
        except FileNotFoundError:
            return True

    return config.checkpoint.last_save_in_hf and of_first_rank(is_older, run.side_group)


def export_hf(config: JobConfig, run: Run) -> None:
    """Write the weights to ``hf/`` in the dump folder, as transformers loads them. Collective."""
    folder = Path(config.job.dump_folder) / "hf"
    state = run.checkpoint.states[STATES[config.checkpoint.export_weights]]
    weights = state.state_dict()
    save_hf(weights, folder, run.plan.model, config.checkpoint.export_dtype, config.model.tokenizer_path)
    logger.info("wrote %s", folder)
