"""Log the export in Hugging Face's format as an artifact in Weights & Biases."""

import json
import re
from pathlib import Path

import torch.distributed as dist

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.agreement import on_rank0
from torchtrain.errors import TorchtrainError
from torchtrain.files import MISSING, atomic_write, json_object, read_file
from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.hooks import Hook
from torchtrain.plugins.huggingface.config import CONFIG_FILE
from torchtrain.plugins.huggingface.export import export_origin, is_export_missing
from torchtrain.plugins.wandb.writer import options_of, stored_run_id
from torchtrain.trainer import Trainer

LOGGED = "wandb_artifact.json"  # identifies the export that is logged


class ExportArtifact(Hook):
    """``log_export``: hf/ in the dump folder as an artifact of type "model" of the W&B run. It is exported before."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def misses_export(self, step: int) -> bool:
        config, group = self.trainer.config_of_run(), self.trainer.gloo_group

        def is_not_logged() -> bool:
            try:
                logged = json_object(read_file(Path(config.job.dump_folder) / LOGGED))
            except MISSING:
                return True
            return logged != export_origin(config, step)

        return is_export_missing(config, step, group) or on_rank0(is_not_logged, group)

    def export(self, step: int) -> None:
        if dist.get_rank() == 0:
            with BestEffort("the artifact in Weights & Biases"):  # else the next start of the run logs it
                log_artifact(self.trainer.config_of_run(), step)


def log_artifact(config: JobConfig, step: int) -> None:
    """Log hf/ in the dump folder, and wait until it is uploaded; with WANDB_MODE=offline ``wandb sync`` uploads it."""
    import wandb

    folder = Path(config.job.dump_folder).resolve()
    if not (folder / "hf" / CONFIG_FILE).is_file():
        raise TorchtrainError(f"{folder / 'hf'} is not there; start the run where it has been exported")
    origin = export_origin(config, step) if config.checkpoint.enable else {}
    run = wandb.init(
        project=options_of(config).project,
        id=stored_run_id(folder),
        resume="allow",
        dir=folder,
        settings=wandb.Settings(console="off", silent=True),
    )
    name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"{folder.name}-hf")[-128:]
    artifact = wandb.Artifact(name, type="model", metadata={"step": step, **origin})
    artifact.add_dir(str(folder / "hf"), policy="immutable")  # else all files are copied first
    run.log_artifact(artifact, aliases=["latest", f"step-{step}"])
    run.finish()
    logger.info(f"Weights & Biases has {folder / 'hf'} as the artifact {name}")
    if origin:
        with atomic_write(folder / LOGGED) as file:
            file.write(json.dumps(origin).encode())
