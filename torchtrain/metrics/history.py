"""Read what a run has written to ``metrics.jsonl``."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtrain.errors import TorchtrainError
from torchtrain.files import json_object
from torchtrain.logging import logger

UNDOING = ("start", "rolled_back")
"""Events after whose step all lines written before are undone."""


@dataclass(frozen=True)
class Run:
    name: str
    lines: list[dict[str, Any]]  # numbers by step, ascending, each step once
    starts: list[dict[str, Any]]  # the events "start" of processes, not those of later stages in one process
    restarts: list[int]
    faults: list[tuple[int, str]]  # step, event
    borders: list[tuple[int, str]] = field(default_factory=list)  # the step after which a stage begins, and its name


def validation_losses(folder: Path) -> dict[int, tuple[str, float]]:
    """After each step of the run in ``folder`` that has a finite one, the stage of the run and its validation loss.

    Undone steps do not count. The stage is empty if there is only one.
    """
    losses: dict[int, tuple[str, float]] = {}
    try:
        content = (folder / "metrics.jsonl").read_bytes()
    except OSError:  # there are no metrics yet
        return losses
    for text in content.splitlines():
        if b'"validation' not in text and b'"event"' not in text:
            continue  # of a long run, parsing all lines takes seconds, and it is done beside training
        line = json_object(text)
        if line is None or not isinstance(line.get("step"), int):  # cut short, as by a kill
            continue
        step, loss = line["step"], line.get("validation_loss", line.get("validation_ema_loss"))
        if line.get("event") in UNDOING:
            losses = {earlier: loss for earlier, loss in losses.items() if earlier <= step}
        elif isinstance(loss, float) and math.isfinite(loss):
            losses[step] = line.get("stage", ""), loss
    return losses


def read_run(path: Path, warn: Callable[[str], None] = logger.warning) -> Run:
    """The run in ``path``, its folder or its metrics.jsonl. ``warn`` is called with a message about each damaged line.

    Raises:
        TorchtrainError: there is none, or it has no step yet.
    """
    file = path if path.is_file() else path / "metrics.jsonl"
    if not file.is_file():
        raise TorchtrainError(f"{path} has no metrics.jsonl; give the folder of a run, such as outputs/debug_model")
    by_step: dict[int, dict[str, Any]] = {}
    starts: list[dict[str, Any]] = []
    restarts, faults = [], []
    stages: dict[str, int] = {}
    try:
        content = file.read_bytes()
    except OSError as error:
        raise TorchtrainError(f"{file} cannot be read: {error.strerror}") from None
    for number, text in enumerate(content.splitlines(), 1):
        line = json_object(text)
        if line is None or not isinstance(line.get("step"), int):
            warn(f"{file}: line {number} is cut short, as by a kill, or no line of a run; passed over")
            continue
        event = line.get("event")
        if event is None:
            by_step.setdefault(line["step"], {}).update(line)
        elif event in UNDOING:
            stage: Any = line.get("stage")
            if stage is not None:
                stages.setdefault(stage, line["step"])
            if event == "start" and not line.get("same_process"):
                starts.append(line)
                if by_step:
                    restarts.append(line["step"])
            by_step = {step: own for step, own in by_step.items() if step <= line["step"]}
        else:
            faults.append((line["step"], event))
    if not by_step:
        raise TorchtrainError(f"{file} has no step yet; wait for the first line of the log")
    borders = [(step, stage) for stage, step in stages.items()]
    lines = [by_step[step] for step in sorted(by_step)]
    return Run(file.parent.resolve().name, lines, starts, restarts, faults, borders)
