"""Metrics writer for Weights & Biases."""

import importlib.util
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.config.section import Section, require
from torchtrain.errors import ConfigError
from torchtrain.logging import logger
from torchtrain.metrics.history import read_run
from torchtrain.metrics.writers import MetricsWriter, WriterContext, grouped, hyperparameters
from torchtrain.optional_packages import install_command
from torchtrain.plugins.huggingface.options import HuggingFaceConfig


@dataclass(frozen=True)
class WandbOptions(Section, name="metrics.options.wandb"):
    """Options of the writer, [metrics.options.wandb]."""

    project: str = "torchtrain"
    """Project name in Weights & Biases."""
    log_export: bool = False
    """Log the export of the run (huggingface.export) as an artifact of type "model"."""


def options_of(config: JobConfig) -> WandbOptions:
    """[metrics.options.wandb] of ``config``."""
    options: WandbOptions = WeightsAndBiases.read_options(
        config.metrics.options.get("wandb", {}), "metrics.options.wandb"
    )
    return options


def stored_run_id(folder: Path) -> str | None:
    """The id of the W&B run of the run in ``folder``; None if it has none yet."""
    file = folder / "wandb_id"
    stored = file.read_text(encoding="utf-8") if file.exists() else ""
    return stored or None  # a full disk leaves an empty file


class WeightsAndBiases(MetricsWriter):
    """Weights & Biases. A resumed run continues its W&B run, whose id is stored in the dump folder.

    W&B cannot change steps that it has. When steps are undone, a new W&B run of the same group begins, with the earlier
    steps of metrics.jsonl; the one before keeps what was undone.
    """

    label = "Weights & Biases"
    output_files = ("wandb_id",)
    Options = WandbOptions

    @classmethod
    def check(cls, options: WandbOptions, config: JobConfig) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(f"metrics.writers = ['wandb'] needs the package wandb: {install_command('wandb')}")
        require(
            not options.log_export or section_of(config, HuggingFaceConfig).export,
            "metrics.options.wandb.log_export = true needs an export to log: set huggingface.export = true",
        )

    def __init__(self, context: WriterContext) -> None:
        self.context = context
        self.again_from = context.start_step
        self.run: Any = None
        stored = stored_run_id(context.folder)
        if context.undone:
            self._begin_again(context.start_step)
        elif stored is not None:
            self.run = self._open(stored)
        else:
            self.run = self._open_new()

    def _open_new(self, after: str = "") -> Any:
        """Open a new W&B run, and store its id."""
        new_id = uuid.uuid4().hex[:8]
        (self.context.folder / "wandb_id").write_text(new_id, encoding="utf-8")
        return self._open(new_id, after)

    def _open(self, run_id: str, after: str = "") -> Any:
        import wandb

        context, name = self.context, self.context.folder.resolve().name
        return wandb.init(
            project=context.options.project,
            name=f"{name}{after}",
            group=f"{name}-{context.run[:8]}" if context.run else None,
            id=run_id,
            resume="allow",
            dir=context.folder,
            config=hyperparameters(context.config_toml),
            settings=wandb.Settings(console="off", silent=True),
        )

    def undo(self, step: int) -> None:
        undone, self.run = self.run, None
        self.again_from = step
        if undone is not None:
            undone.summary["undone_after_step"] = step
            undone.finish()
        self._begin_again(step)

    def _begin_again(self, step: int) -> None:
        """Open a new W&B run with the lines up to ``step``, from which the run continues."""
        self.run = self._open_new(f" (again from step {step})")
        logger.info(f"Weights & Biases: steps after {step} are undone; the run continues as the W&B run {self.run.id}")
        for line in read_run(self.context.folder, lambda _: None).lines:
            if line["step"] <= step:
                self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        if self.run is None:  # the last attempt to open it has failed
            self._begin_again(self.again_from)
        values = {f"faults/{line['event']}": 1} if "event" in line else grouped(line)
        self.run.log(values, step=line["step"])

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
