"""What a run has reached: a summary in the log, and ``report.md`` with curves in the dump folder."""

import importlib.util
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.files import atomic_write, is_url
from torchtrain.logging import BestEffort, aligned, logger, terminal_width
from torchtrain.metrics.history import Run, read_run
from torchtrain.metrics.recorder import duration
from torchtrain.metrics.run_description import RunDescription
from torchtrain.metrics.stage_table import stage_table
from torchtrain.metrics.writers import samples_as_markdown

REPORT, CURVES = "report.md", "curves.png"
# Names of validation metrics; what follows is the name of a source, or of a task and its score.
LOSS = re.compile(r"validation_(ema_)?loss(_|$)")
TASK = re.compile(r"validation_(ema_)?task_")


def report_end(config: JobConfig, description: RunDescription, step: int, *, is_complete: bool) -> None:
    """Log the results after the last ``step`` of a run and the commands that come next; write the report.

    Args:
        is_complete: the run has ended, and was not stopped before. Only then is a report written: a run that is
            stopped has little time left.
    """
    folder = Path(config.job.dump_folder)
    with BestEffort("the summary of the run"):
        run = read_run(folder)
        results, commands = summarize(run), next_commands(config, step, is_complete=is_complete)
        written = []
        if config.checkpoint.enable:
            results.append(("checkpoints", f"{config.checkpoint.location(folder)}, the last one step-{step}"))
        if is_complete and config.metrics.enable_report:
            with BestEffort(REPORT):
                write_report(folder, run, description, results, commands, stage_table(config) if config.stages else ())
                written = [("report", str(folder / REPORT))]
        rows = [*results, *written, *(("next", command) for command in commands)]
        logger.info("results of %s:\n%s", run.name, aligned(rows, terminal_width()))


def summarize(run: Run) -> list[tuple[str, str]]:
    """Labels and texts of time, tokens, loss and validation; of each step what was computed last."""
    steps = [line for line in run.lines if "step_seconds" in line]
    rows = []
    if steps:
        before = [run.starts[0]["step"] if run.starts else 0, *(line["step"] for line in steps)]
        counts = [line["step"] - earlier for line, earlier in zip(steps, before, strict=False)]
        seconds = sum(count * line["step_seconds"] for count, line in zip(counts, steps, strict=True))
        starts = f", {len(run.starts)} starts" if len(run.starts) > 1 else ""
        wall = f"{duration(time.time() - run.starts[-1]['time'])}, " if run.starts else ""
        rows.append(("time", f"{wall}{duration(seconds)} in {sum(counts):,} training steps{starts}"))
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
        found = [(line["step"], line[name]) for line in run.lines if line.get(name) is not None]
        if found:
            at_best, best = min(found, key=lambda pair: pair[1])
            label = name.removeprefix("validation_").replace("_", " ")
            last_value = _number(found[-1][1])
            rows.append(("validation", f"{label} {last_value}, the best {_number(best)} after step {at_best:,}"))
    for name in (name for name in names if TASK.match(name)):
        step, value = next((line["step"], line[name]) for line in reversed(run.lines) if name in line)
        label = name.removeprefix("validation_").replace("task_", "", 1).replace("_", " ")
        rows.append(("tasks", f"{label} {'not finite' if value is None else f'{value:.4g}'} after step {step:,}"))
    return rows


def sources_by_stage(run: Run) -> list[tuple[str, str]]:
    """A row for each data source: its tokens and its mean loss in each stage (``metrics.enable_loss_by_source``)."""
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
    # Checkpoints in a bucket by their URL, which is valid on other machines, too.
    checkpoints = config.checkpoint.folder
    path = shlex.quote(checkpoints if is_url(checkpoints) else folder)
    imports = " --import " + " ".join(config.job.import_) if config.job.import_ else ""
    commands = [f'python -m torchtrain.generate {path} --prompt "..."{imports}']
    if MODELS[config.model.name].hf is not None:
        commands.append(f"python -m torchtrain.convert {path} {shlex.quote(folder.rstrip('/') + '_hf')}{imports}")
    return commands


def write_report(
    folder: Path,
    run: Run,
    description: RunDescription,
    results: Sequence[tuple[str, str]],
    commands: Sequence[str],
    stages: Sequence[Sequence[str]] = (),
) -> None:
    """Write ``report.md`` to ``folder``, and ``curves.png`` beside it if matplotlib is installed.

    Args:
        description: that of the last stage, if the run has stages.
        stages: the rows of ``stage_table``; empty if the run has none.
    """
    lines = [f"# {run.name}", "", *_table(results), ""]
    if importlib.util.find_spec("matplotlib") is not None:
        with BestEffort(CURVES):
            from torchtrain.metrics.curves import plot

            plot([run], folder / CURVES)
            lines += ["## Curves", "", f"![Curves of the run]({CURVES})", ""]
    else:
        lines += ["No curves: matplotlib is not installed (`pip install 'torchtrain[plot]'`).", ""]
    for line in [line for line in run.lines if "validation_samples" in line or "validation_ema_samples" in line][-1:]:
        for name in (name for name in line if name.endswith("_samples") and isinstance(line[name], list)):
            weights = " with the averaged weights" if "ema" in name else ""
            lines += [f"## Samples after step {line['step']:,}{weights}", "", samples_as_markdown(line[name])]
    if stages:
        lines += ["## Stages", "", *_table(stages[1:], stages[0]), ""]
    lines += ["## The last stage" if stages else "## The run", "", f"`{description.title}`", ""]
    lines += [*_table(description.rows), ""]
    if run.faults:
        lines += ["## Events", "", "| step | event |", "| --- | --- |"]
        lines += [f"| {step} | {event.replace('_', ' ')} |" for step, event in run.faults]
        lines += [""]
    if commands:
        lines += ["## Next", "", "```bash", *commands, "```", ""]
    with atomic_write(folder / REPORT) as file:
        file.write("\n".join(lines).encode())


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str] = ("", "")) -> list[str]:
    """Rows as a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
