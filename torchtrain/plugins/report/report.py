"""``report.md``, with curves, in the dump folder: what a run has reached."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from torchtrain.config.run_plan import plan_of
from torchtrain.files import atomic_write
from torchtrain.logging import BestEffort
from torchtrain.metrics.hooks import Hook, RunResults
from torchtrain.metrics.writers import samples_as_markdown

REPORT, CURVES = "report.md", "curves.png"


class ReportWriter(Hook):
    """Writes the report when the run is complete, and if checkpoints are in a bucket, after each save."""

    kept_files = (REPORT, CURVES)

    def __init__(self) -> None:
        self._drawing = BestEffort(CURVES)

    def write_kept_files(self, results: RunResults) -> None:
        write_report(Path(results.config.job.dump_folder), results, self._drawing)

    def results(self, results: RunResults) -> Sequence[tuple[str, str]]:
        folder = Path(results.config.job.dump_folder)
        with BestEffort(REPORT):
            write_report(folder, results, self._drawing)
            return [("report", str(folder / REPORT))]
        return ()


def write_report(folder: Path, results: RunResults, drawing: BestEffort) -> None:
    """Write ``report.md`` to ``folder``, and ``curves.png`` beside it, by ``drawing``, if matplotlib is installed."""
    run, description = results.run, results.description
    stages = plan_of(results.config).table()
    lines = [f"# {run.name}", "", *_table(results.rows), ""]
    if importlib.util.find_spec("matplotlib") is not None:
        with drawing:
            from torchtrain.plugins.report.curves import plot

            with atomic_write(folder / CURVES) as file:  # which may be copied meanwhile
                plot([run], file)
            lines += ["## Curves", "", f"![Curves of the run]({CURVES})", ""]
    else:
        lines += ["No curves: matplotlib is not installed (`pip install matplotlib`).", ""]
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
    if results.next_commands:
        lines += ["## Next", "", "```bash", *results.next_commands, "```", ""]
    with atomic_write(folder / REPORT) as file:
        file.write("\n".join(lines).encode())


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str] = ("", "")) -> list[str]:
    """Rows as a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
