"""Metrics writer for Trackio."""

import importlib.util
import io
import uuid
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

from torchtrain.config.schema import JobConfig
from torchtrain.config.section import Section, require
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.files import atomic_write
from torchtrain.logging import logger
from torchtrain.metrics.history import read_run
from torchtrain.metrics.writers import MetricsWriter, WriterContext, grouped, hyperparameters
from torchtrain.optional_packages import install_command

NAME_FILE = "trackio_run"  # in the dump folder and in checkpoints: the name of the Trackio run


@dataclass(frozen=True)
class TrackioOptions(Section, name="metrics.options.trackio"):
    """Options of the writer, [metrics.options.trackio]."""

    project: str = "torchtrain"
    """Project name in Trackio."""
    space_id: str = ""
    """Space on the Hugging Face hub, such as "name/space". "": TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, or else a
    database on this machine."""
    private: bool = True
    """Whether a Space that does not exist is created as a private one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.project != "", 'metrics.options.trackio.project = "" must be a name')


class Trackio(MetricsWriter):
    """Trackio. A resumed run continues its Trackio run, whose name is stored in the dump folder.

    Trackio cannot remove metrics. When steps are undone, a new Trackio run of the same group begins, with the earlier
    steps of metrics.jsonl; the one before keeps what was undone. Trackio sends metrics in a thread of its own.
    """

    label = "Trackio"
    output_files = (NAME_FILE,)
    Options = TrackioOptions

    @classmethod
    def check(cls, options: TrackioOptions, config: JobConfig) -> None:  # noqa: ARG003
        if importlib.util.find_spec("trackio") is None:
            command = install_command("trackio", with_constraints=False)  # it requires other versions
            raise ConfigError(f"metrics.writers = ['trackio'] needs the package trackio: {command}")

    def __init__(self, context: WriterContext) -> None:
        self.context = context
        self.again_from = context.start_step
        self.run: Any = None
        file = context.folder / NAME_FILE
        stored = file.read_text(encoding="utf-8") if file.exists() else ""
        if context.undone:
            self._begin_again(context.start_step)
        else:
            self._open(stored or self._new_name())

    def _new_name(self) -> str:
        return f"{self.context.folder.resolve().name}-{uuid.uuid4().hex[:8]}"

    def _open(self, name: str) -> None:
        """Continue the Trackio run ``name``, or begin it, and store its name."""
        import trackio

        options, folder = self.context.options, self.context.folder
        with redirect_stdout(io.StringIO()):
            self.run = trackio.init(
                project=options.project,
                name=name,
                group=f"{folder.resolve().name}-{self.context.run[:8]}",
                space_id=options.space_id or None,
                private=options.private,
                config=hyperparameters(self.context.config_toml),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        with atomic_write(folder / NAME_FILE) as file:
            file.write(name.encode())

    def _close(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            with redirect_stdout(io.StringIO()):
                run.finish()

    def undo(self, step: int) -> None:
        self.again_from = step
        self._close()
        self._begin_again(step)

    def _begin_again(self, step: int) -> None:
        """Begin a new Trackio run with the lines up to ``step``, from which the run continues."""
        self._open(f"{self._new_name()}-from-step-{step}")
        logger.info(f"Trackio: steps after {step} are undone; the run continues as the Trackio run {self.run.name}")
        with suppress(TorchtrainError):  # metrics.jsonl has no steps
            for line in read_run(self.context.folder, lambda _: None).lines:
                if line["step"] <= step:
                    self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        if self.run is None:  # the last attempt to open it has failed
            self._begin_again(self.again_from)
        values = {f"faults/{line['event']}": 1} if "event" in line else grouped(line)
        self.run.log(values, step=line["step"])

    def close(self) -> None:
        self._close()
