"""Where numbers go: ``metrics.jsonl`` always, TensorBoard and Weights & Biases by config."""

import importlib.util
import json
import math
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import tomli

from torchtrain.config.schema import Metrics
from torchtrain.errors import ConfigError

# What belongs together stands together; a number that is not here goes to "other".
GROUPS = {
    "loss": "loss/average",
    "loss_max": "loss/max",
    "grad_norm": "optimization/grad_norm",
    "lr": "optimization/lr",
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "step_seconds": "throughput/step_seconds",
    "memory_gib": "memory/peak_gib",
    "data_wait_fraction": "data/wait_fraction",
}


def grouped(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line under the names that TensorBoard and Weights & Biases show them by."""
    numbers = {name: value for name, value in line.items() if name != "step" and isinstance(value, (int, float))}
    return {
        GROUPS.get(
            name, f"validation/{name.removeprefix('validation_')}" if "validation" in name else f"other/{name}"
        ): v
        for name, v in numbers.items()
    }


def check_writers(config: Metrics) -> None:
    """ConfigError where the config asks for a writer that is not installed."""
    if config.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError("metrics.enable_wandb = true needs the package wandb: pip install 'torchtrain[wandb]'")


class Writer(Protocol):
    """Takes lines with ``step``: numbers, or, with ``event``, something that happened."""

    def write(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """``metrics.jsonl``: a line is an object. A number that is not finite, which JSON cannot say, is null."""

    def __init__(self, file: Path):
        self.file = file.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Curves by group, events as running counts under faults/, the config as text and as hyperparameters."""

    def __init__(self, folder: Path, config_toml: str, first_step: int):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Steps that an earlier process reached after the checkpoint that this one goes on from are not shown twice.
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)
        self.counts: dict[str, int] = {}
        self.writer.add_text("config", f"```toml\n{config_toml}\n```", first_step)
        # Not add_hparams, which opens a run of its own beside this one.
        file_writer = self.writer._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(flat(tomli.loads(config_toml)), {"loss/average": 0.0}):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def write(self, line: dict[str, Any]) -> None:
        if "event" in line:
            name = f"faults/{line['event']}"
            self.counts[name] = self.counts.get(name, 0) + 1
            self.writer.add_scalar(name, self.counts[name], line["step"])
            return
        for name, value in grouped(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """The same in Weights & Biases. One run there for one dump folder: a resumed run goes on in it."""

    def __init__(self, folder: Path, config: Metrics, config_toml: str):
        import wandb

        name = folder.resolve().name
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        self.run = wandb.init(
            project=config.wandb_project,
            name=name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=folder,
            config=flat(tomli.loads(config_toml)),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, line: dict[str, Any]) -> None:
        values = {f"faults/{line['event']}": 1} if "event" in line else grouped(line)
        self.run.log(values, step=line["step"])

    def close(self) -> None:
        self.run.finish()


class Writers:
    """All writers that the config asks for; a context manager. Only the first rank has any."""

    def __init__(self, config: Metrics, folder: Path, config_toml: str, first_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.writers: list[Writer] = [JsonLines(folder / "metrics.jsonl")]
        if config.enable_tensorboard:
            self.writers.append(TensorBoard(folder / "tensorboard", config_toml, first_step))
        if config.enable_wandb:
            self.writers.append(WeightsAndBiases(folder, config, config_toml))

    def write(self, line: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(line)

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self.writers:
            writer.close()


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists become text, which is all that hyperparameters may be."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = str(value) if isinstance(value, list) else value
    return values
