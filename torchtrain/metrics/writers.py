"""Metrics writers: ``metrics.jsonl``, TensorBoard, and those that plugins register."""

import io
import json
import os
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tomli

from torchtrain.config.component import Component
from torchtrain.config.registry import CONFIG_SECTIONS, METRICS_WRITERS
from torchtrain.config.schema import JobConfig
from torchtrain.config.section import flat
from torchtrain.files import atomic_write, json_object, names_in
from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.history import UNDOING
from torchtrain.metrics.options import MetricsConfig

# Group and name of each curve; metrics that are not listed are in the group "other".
GROUPS = {
    "loss": "loss/average",
    "loss_mean": "loss/mean",
    "loss_max": "loss/max",
    "z_loss": "loss/z",
    "grad_norm": "optimization/grad_norm",
    "lr": "optimization/lr",
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "tokens": "data/tokens",
    "step_seconds": "throughput/step_seconds",
    "memory_gib": "memory/peak_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "memory_fraction": "memory/fraction",
    "memory_alloc_retries": "memory/alloc_retries",
    "data_wait_fraction": "data/wait_fraction",
}

EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def grouped(line: dict[str, Any]) -> dict[str, float]:
    """The numbers in a line by group and name, such as "loss/average"."""
    numbers = {}
    for name, value in line.items():
        if name != "step" and isinstance(value, (int, float)):
            group, separator, rest = name.partition("_")
            is_grouped = separator and group in ("validation", "source", "norm", "rms", "max")
            other = name if "/" in name else f"other/{name}"  # a hook's, which names its group
            numbers[GROUPS.get(name, f"{group}/{rest}" if is_grouped else other)] = value
    return numbers


def samples_as_markdown(samples: Sequence[Mapping[str, str]]) -> str:
    """Prompts and the texts that continue them, as blocks of code."""

    def block(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines() or [""])

    return "\n".join(f"Prompt:\n\n{block(one['prompt'])}\nText:\n\n{block(one['text'])}" for one in samples)


def check_writers(config: JobConfig) -> None:
    """Raise ConfigError if the package of a writer is not installed, or its options are invalid."""
    for name in writer_names(config.metrics):
        kind: type[MetricsWriter] = METRICS_WRITERS[name]
        kind.check(_options(kind, name, config.metrics), config)


def _options(kind: "type[MetricsWriter]", name: str, config: MetricsConfig) -> Any:
    return kind.read_options(config.options.get(name, {}), f"metrics.options.{name}")


def writer_names(config: MetricsConfig) -> list[str]:
    """Names in ``METRICS_WRITERS`` of the writers that ``config`` enables."""
    return list(dict.fromkeys([*(["tensorboard"] if config.enable_tensorboard else []), *config.writers]))


@dataclass(frozen=True)
class WriterContext:
    """Arguments for opening a writer."""

    config: MetricsConfig
    folder: Path
    """The dump folder."""
    config_toml: str = ""
    """The resolved config of the run."""
    start_step: int = 0
    """The step from which the run resumes; 0 in a new run."""
    run: str = ""
    """Id of the run, which it keeps when it resumes."""
    undone: bool = False
    """Whether earlier processes have written steps after ``start_step`` that come again with other values, because the
    run resumes with options that change it. Otherwise they come again with the same values, up to rounding."""
    options: Any = None
    """[metrics.options.NAME] of this writer, an instance of its ``Options``."""


class MetricsWriter(Component, ABC):
    """Writes metrics of a run. Rank 0 has one, from the start of training to its end.

    An error of a method is logged, and training continues; lines are dropped until the writer works again.
    """

    label: ClassVar[str]
    """A name for messages."""
    output_files: ClassVar[tuple[str, ...]] = ()
    """Files and folders that it writes to the dump folder, and that are renamed if another run begins there."""

    @classmethod
    def check(cls, options: Any, config: JobConfig) -> None:
        """Called on all ranks before training; raises ConfigError for a missing package, or for ``options``, an
        instance of ``Options``, that do not go with ``config``."""

    @abstractmethod
    def __init__(self, context: WriterContext) -> None:
        """Open the writer; called before its first line."""

    @abstractmethod
    def write(self, line: dict[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``: ``step`` and numbers (see ``grouped``), or ``step``, ``event`` and values.

        ``validation_samples`` is a list of tables with ``prompt`` and ``text`` (``evaluation.prompts``). After a resume
        or a rollback, steps may repeat; see ``WriterContext.undone`` and ``undo``.
        """

    def undo(self, step: int) -> None:
        """Called after a rollback to ``step``: what was written of later steps does not count any more.

        These steps come again with other values. ``metrics.jsonl`` in the dump folder has the event already.
        """

    def close(self) -> None:
        """Called at the end of training, also after an error."""


def append(path: Path, piece: bytes, after: bytes = b"") -> None:
    """Append ``piece`` to a file; if the file does not end with the byte ``after``, add that byte first.

    If the disk is full, nothing is appended. The file is opened for each piece, so that writing works again as soon as
    the disk has free space or is mounted again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if after and size and os.pread(descriptor, 1, size - 1) != after:
            piece = after + piece  # a process was killed during a write
        try:
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


class JsonLines(MetricsWriter):
    """``metrics.jsonl``: one JSON object per line. Numbers that are not finite are null, because JSON has none."""

    label = "metrics.jsonl"

    def __init__(self, context: WriterContext) -> None:
        self.path = context.folder / "metrics.jsonl"

    def write(self, line: dict[str, Any]) -> None:
        finite = json.loads(json.dumps(line), parse_constant=lambda _: None)
        append(self.path, json.dumps(finite).encode() + b"\n", after=b"\n")

    def undo(self, step: int) -> None:
        self.write({"step": step, "event": "rolled_back", "time": time.time()})


def output_names() -> list[str]:
    """Outputs in the dump folder that do not contain the id of their run, unlike checkpoints and exports."""
    names = ["config.toml", "metrics.jsonl", "traces"]
    names += [name for key in CONFIG_SECTIONS for name in CONFIG_SECTIONS[key].output_files]
    for key in METRICS_WRITERS:
        with suppress(Exception):  # that of a writer that this run does not use, whose import fails
            names += METRICS_WRITERS[key].output_files
    return names


NUMBERED = re.compile(r"[a-z_]+\.([1-9][0-9]*)(?:\.[a-z]+)?")


def numbered(name: str, number: int) -> str:
    """The name of an output of another run, such as metrics.1.jsonl; 0 for the name itself."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}.{number}{dot}{suffix}" if number else name


def rename_files_of_other_run(folder: Path, run: str, resumed: bool) -> None:
    """Rename the ``output_names`` in ``folder`` that are of another run than ``run``, to NAME.1.SUFFIX or higher.

    If the files of ``run`` were renamed before, they get their names back.

    Args:
        resumed: the run resumes from a checkpoint, so that files without the id of a run belong to it.
    """
    previous = last_start(folder / "metrics.jsonl")
    if previous["run"] == run if "run" in previous else resumed:
        return
    names, outputs = names_in(folder), output_names()
    earlier = [int(match[1]) for match in map(NUMBERED.fullmatch, names) if match]
    numbers = {number for number in earlier if any(numbered(name, number) in names for name in outputs)}
    found = [name for name in outputs if name in names]
    if found:
        number = 1 + max(numbers, default=0)
        _renumber(folder, found, 0, number)
        listed = ", ".join(numbered(name, number) for name in found)
        logger.info(f"{folder} has files of another run: they are renamed to {listed}")
    for number in sorted(numbers, reverse=True):
        if run and last_start(folder / numbered("metrics.jsonl", number)).get("run") == run:
            own = [name for name in outputs if numbered(name, number) in names]
            _renumber(folder, own, number, 0)
            logger.info(f"{folder}: files of this run had been renamed: they are {', '.join(own)} again")
            break


def _renumber(folder: Path, names: Sequence[str], old: int, new: int) -> None:
    """Change the number in the names of outputs, also in the links of Markdown files to them."""
    for name in names:
        path = (folder / numbered(name, old)).rename(folder / numbered(name, new))
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            for target in names:
                text = text.replace(f"]({numbered(target, old)})", f"]({numbered(target, new)})")
            with atomic_write(path) as file:
                file.write(text.encode())


def last_start(path: Path) -> dict[str, Any]:
    """The last event "start" in a metrics.jsonl; empty if there is none."""
    last: dict[str, Any] = {}
    with suppress(OSError):
        for text in path.read_bytes().splitlines():
            if b'"event": "start"' in text:
                last = json_object(text) or last  # else a truncated line
    return last


def changes_steps(path: Path, step: int, options: str, stage: str = "") -> bool:
    """Whether ``path`` (metrics.jsonl) has steps after ``step`` of a process with other options, in the same stage.

    ``options`` and ``stage``: of the process that now continues from ``step``, as in the events "start".
    """
    lines: list[dict[str, Any]] = []
    with suppress(OSError):  # there is none
        for text in path.read_bytes().splitlines():
            line = json_object(text)
            if line is None or not isinstance(line.get("step"), int):  # a truncated line
                continue
            if line.get("event") in UNDOING:
                lines = [earlier for earlier in lines if earlier["step"] <= line["step"]]
            if line.get("event") in (None, "start"):
                lines.append(line)
    if not any(line["step"] > step and "event" not in line for line in lines):
        return False
    starts = [line for line in lines if line.get("event") == "start"]
    before = [start for start in starts if start["step"] <= step][-1:]
    later = [start for start in starts if start["step"] > step]
    return any(start.get("options") != options for start in (*before, *later) if start.get("stage", "") == stage)


def has_validation(path: Path, step: int) -> bool:
    """Whether ``path`` (metrics.jsonl) has a validation of ``step`` that no later rollback or start has undone."""
    found = False
    with suppress(OSError):  # the run only validates again
        for text in path.read_bytes().splitlines():
            if any(part in text for part in (b'"validation_', *(f'"event": "{event}"'.encode() for event in UNDOING))):
                line = json_object(text)
                if line is None or not isinstance(line.get("step"), int):  # a truncated line
                    continue
                found = found and line["step"] >= step if "event" in line else found or line["step"] == step
    return found


class TensorBoard(MetricsWriter):
    """TensorBoard: curves by group, cumulative counts of events under faults/, the config as text and hyperparameters.

    It does not use torch's SummaryWriter, whose writer thread ends with the first error.
    """

    label = "TensorBoard"
    output_files = ("tensorboard",)

    def __init__(self, context: WriterContext) -> None:
        folder, config_toml, start_step = context.folder / "tensorboard", context.config_toml, context.start_step
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard.summary import hparams, text

        # TensorBoard reads event files in the order of their names: so the number increases even if the clock does not.
        earlier = [int(match[1]) for match in map(EVENTS.match, names_in(folder)) if match]
        number = max([round(time.time()), *(number + 1 for number in earlier)])
        name = f"events.out.tfevents.{number:010}.{socket.gethostname()}.{os.getpid()}.0"
        self.path = folder / name
        self.counts: dict[str, int] = {}
        self._add(Event(file_version="brain.Event:2"))
        # TensorBoard then hides steps that an earlier process logged after the checkpoint that this one resumes from.
        self._add(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))
        as_text = text("config", f"```toml\n{config_toml}\n```")  # type: ignore[no-untyped-call]
        self._add(Event(step=start_step, summary=as_text))
        for summary in hparams(hyperparameters(config_toml), {"loss/average": 0.0}):  # type: ignore[no-untyped-call]
            self._add(Event(summary=summary))

    def undo(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        append(self.path, record.getvalue())

    def write(self, line: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import scalar, text

        values = grouped(line)
        if "event" in line:
            name = f"faults/{line['event']}"
            self.counts[name] = self.counts.get(name, 0) + 1
            values = {name: self.counts[name]}
        for name, value in values.items():
            self._add(Event(step=line["step"], summary=scalar(name, value)))  # type: ignore[no-untyped-call]
        for name, samples in line.items():
            if name.endswith("_samples") and isinstance(samples, list):  # not the loss of a source named samples
                summary = text(name.replace("_", "/", 1), samples_as_markdown(samples))  # type: ignore[no-untyped-call]
                self._add(Event(step=line["step"], summary=summary))


class Writers:
    """All writers that the config enables, on rank 0. Errors of a writer affect neither the run nor other writers."""

    def __init__(
        self, config: MetricsConfig, folder: Path, config_toml: str, start_step: int, run: str, undone: bool
    ) -> None:
        self.types: dict[str, type[MetricsWriter]] = {"metrics.jsonl": JsonLines}
        self.types |= {name: METRICS_WRITERS[name] for name in writer_names(config)}
        self.contexts = {
            name: WriterContext(config, folder, config_toml, start_step, run, undone, _options(kind, name, config))
            for name, kind in self.types.items()
        }
        self.efforts = {name: BestEffort(of.label) for name, of in self.types.items()}
        self.opened: dict[str, MetricsWriter] = {}

    def write(self, line: dict[str, Any]) -> None:
        self._for_each(lambda writer: writer.write(line))

    def undo(self, step: int) -> None:
        self._for_each(lambda writer: writer.undo(step))

    def _for_each(self, call: Callable[[MetricsWriter], None]) -> None:
        for name, effort in self.efforts.items():
            with effort:
                if name not in self.opened:
                    self.opened[name] = self.types[name](self.contexts[name])
                call(self.opened[name])

    def close(self) -> None:
        for name, writer in self.opened.items():
            with self.efforts[name]:
                writer.close()


def hyperparameters(config_toml: str) -> dict[str, Any]:
    """The options of a config by full name; lists as text, because TensorBoard accepts only numbers and text."""
    options = flat(tomli.loads(config_toml))
    return {name: str(value) if isinstance(value, list) else value for name, value in options.items()}
