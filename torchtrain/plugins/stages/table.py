"""Table of the stages of a run: for the log at its start, and for the report."""

from collections.abc import Sequence

from torchtrain.config.run_plan import RunPlan
from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.optimizers.lr_schedule import LRSchedule

COLUMNS = ("stage", "steps", "tokens", "batch", "length", "learning rate", "data")


def stage_table(plan: RunPlan) -> list[tuple[str, ...]]:
    """A row for each stage of a run, below the names of the columns."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for number, own in enumerate(plan.stages):
        training, first = own.training, plan.first_step(number)
        rows.append(
            (
                own.job.stage,
                f"{first:,} to {training.steps:,}",
                format_tokens(plan.tokens_of(number)),
                f"{training.global_batch_size:,}",
                f"{training.seq_len:,}",
                _rates(own, first),
                _data(own),
            )
        )
    return rows


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """``rows`` as lines with aligned columns, indented by two spaces."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _rates(config: JobConfig, first: int) -> str:
    """The learning rate of the first step, its maximum if that is in between, and that of the last step."""
    options, last = config.lr_scheduler, config.training.steps
    schedule = LRSchedule(options, config.optimizer.lr, last)
    after_warmup = min(max(first, options.start_step + options.warmup_steps), last)
    at_first, at_peak, at_last = (f"{schedule.rate(step):.3g}" for step in (first, after_warmup, last))
    if float(at_peak) > max(float(at_first), float(at_last)):
        return f"{at_first} up to {at_peak} down to {at_last}"
    return at_first if at_first == at_last else f"{at_first} to {at_last}"


def _data(config: JobConfig) -> str:
    """The sources of the stage and their shares of its tokens."""
    sources = [source for source in config.data.all if source.weight]
    total = sum(source.weight for source in sources)
    names = [source.title or source.source_type for source in sources]
    if len(sources) == 1:
        return names[0]
    return ", ".join(f"{name} {source.weight / total:.3g}" for name, source in zip(names, sources, strict=True))
