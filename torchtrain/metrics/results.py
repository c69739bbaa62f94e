"""What a run has reached: a summary in the log."""

import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.config.tokens import format_tokens
from torchtrain.files import is_url
from torchtrain.logging import BestEffort, aligned, counted, log_with_commands, logger, terminal_width
from torchtrain.metrics.history import Run, read_run
from torchtrain.metrics.hooks import Hooks, RunResults
from torchtrain.metrics.recorder import duration
from torchtrain.metrics.run_description import RunDescription

# Names of validation metrics; what follows is the name of a source, or of a task and its score.
LOSS = re.compile(r"validation_(ema_)?loss(_|$)")
TASK = re.compile(r"validation_(ema_)?task_")


def log_results(config: JobConfig, description: RunDescription, step: int, hooks: Hooks, *, is_complete: bool) -> None:
    """Log the results after the last ``step`` of a run, and the commands that come next.

    Args:
        config: its config.
        description: that of the last stage of the run, if there are several.
        step: the last step.
        hooks: they may do more with the results if the run is complete.
        is_complete: the run has ended, and was not stopped before: a run that is stopped has little time left.
    """
    with BestEffort("the summary of the run"):
        results = run_results(config, description, step, is_complete=is_complete)
        more = hooks.results(results) if is_complete else ()
        rows = [*results.rows, *more]
        commands: Sequence[str] = ()
        if is_complete:
            commands = results.next_commands
        else:  # a sentence
            rows += [("next", text) for text in results.next_commands]
        log_with_commands(f"results of {results.run.name}:\n{aligned(rows, terminal_width())}", "  next", commands)


def run_results(
    config: JobConfig,
    description: RunDescription,
    step: int,
    *,
    is_complete: bool,
    warn: Callable[[str], None] = logger.warning,
) -> RunResults:
    """The results of a run after ``step``, which is saved; arguments as for ``log_results`` and ``read_run``.

    Raises:
        TorchtrainError: the dump folder has no metrics of a step.
    """
    folder = Path(config.job.dump_folder)
    run = read_run(folder, warn)
    rows = summarize(run)
    if config.checkpoint.enable:
        rows.append(("checkpoints", f"{config.checkpoint.location(folder)}, the last one step-{step}"))
    return RunResults(config, run, description, rows, next_commands(config, step, is_complete=is_complete))


def summarize(run: Run) -> list[tuple[str, str]]:
    """Labels and texts of time, tokens, loss and validation; of each step what was computed last."""
    steps = [line for line in run.lines if "step_seconds" in line]
    rows = []
    if steps:
        before = [run.starts[0]["step"] if run.starts else 0, *(line["step"] for line in steps)]
        counts = [line["step"] - earlier for line, earlier in zip(steps, before, strict=False)]
        seconds = sum(count * line["step_seconds"] for count, line in zip(counts, steps, strict=True))
        text = f"{duration(seconds)} in {counted(sum(counts), 'training step')}"
        if run.starts:
            wall = duration(time.time() - run.starts[-1]["time"])
            starts = len(run.starts)
            text += (
                f" of {starts} starts; {wall} since the last one"
                if starts > 1
                else f", {wall} with validation and saves"
            )
        rows.append(("time", text))
        first, last = steps[0], steps[-1]
        if "tokens" in last and seconds:
            tokens = last["tokens"] * sum(counts) / last["step"]  # those of the steps in the file
            rows.append(("tokens", f"{format_tokens(last['tokens'])}, on average {tokens / seconds:,.0f} per second"))
        losses = (f"{_number(line['loss'])} in step {line['step']:,}" for line in (last, first))
        means = (
            f"; mean since the line before {_number(line['loss_mean'])}" for line in (last,) if "loss_mean" in line
        )
        rows.append(("loss", ", ".join(losses) + "".join(means)))
    rows += sources_by_stage(run)
    names = dict.fromkeys(name for line in run.lines for name in line)
    for name in (name for name in names if LOSS.match(name)):
        found = [(line.get("stage", ""), line["step"], line[name]) for line in run.lines if line.get(name) is not None]
        if found:
            stage, _, last_value = found[-1]
            # Other stages of the run may have validated on other data.
            best, at_best = min((value, step) for other, step, value in found if other == stage)
            label = name.removeprefix("validation_").replace("_", " ")
            of_stage = f" of {stage}" if stage else ""
            text = f"{label} {_number(last_value)}, the best{of_stage} {_number(best)} after step {at_best:,}"
            rows.append(("validation", text))
    for name in (name for name in names if TASK.match(name)):
        step, value = next((line["step"], line[name]) for line in reversed(run.lines) if name in line)
        label = name.removeprefix("validation_").replace("task_", "", 1).replace("_", " ")
        rows.append(("tasks", f"{label} {'not finite' if value is None else f'{value:.4g}'} after step {step:,}"))
    return rows


def sources_by_stage(run: Run) -> list[tuple[str, str]]:
    """A row for each data source: its tokens and mean loss in each stage (``diagnostics.enable_loss_by_source``)."""
    prefix = "source_tokens_"
    sums: dict[str, dict[str, list[float]]] = {}  # by source and stage: tokens, nats
    for line in run.lines:
        for key in (key for key in line if key.startswith(prefix)):
            source = key.removeprefix(prefix)
            tokens, loss = line[key], line.get(f"source_loss_{source}")
            if loss is not None:
                of_stage = sums.setdefault(source, {}).setdefault(line.get("stage", ""), [0, 0.0])
                of_stage[0] += tokens
                of_stage[1] += tokens * loss
    rows = []
    for source, stages in sums.items():
        texts = [
            f"{stage}{': ' * bool(stage)}loss {nats / tokens:.4f} of {format_tokens(tokens)} tokens"
            for stage, (tokens, nats) in stages.items()
        ]
        rows.append((f"source {source}", "; ".join(texts)))
    return rows


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def next_commands(config: JobConfig, step: int, *, is_complete: bool) -> list[str]:
    """Commands that use what the run has saved."""
    folder = config.job.dump_folder
    if not config.checkpoint.enable:
        return []
    if not is_complete:
        return ["the same command again resumes the run" if step else "the same command starts the run again"]
    # Checkpoints by their URL, if they have one: it is valid on other machines, too.
    checkpoints = config.checkpoint.folder
    path = shlex.quote(checkpoints if is_url(checkpoints) else folder)
    imports = " --import " + " ".join(config.job.import_) if config.job.import_ else ""
    sections = [section_of(config, CONFIG_SECTIONS[name]) for name in CONFIG_SECTIONS]
    return [f"{command}{imports}" for section in sections for command in section.next_commands(config, path)]
