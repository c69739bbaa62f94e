"""Human-readable estimates: a verdict, tables, and a plot of memory."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.logging import aligned, counted, ranks_text
from torchtrain.plugins.planner.failures import best_interval, expected_seconds, expected_seconds_of_replicas
from torchtrain.plugins.planner.hardware import GIB
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.recorder import CATEGORIES
from torchtrain.plugins.planner.summary import Estimate
from torchtrain.plugins.planner.timing import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which the color-blind can distinguish, by category.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# Names of operations in words; the functional collectives of PyTorch have other names than those of its process groups.
COLLECTIVES = {
    "allgather": "all-gather",
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather of activations",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter of activations",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce of activations",
    "recv": "receive",
}


WIDTH = 80  # columns of a terminal


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate: the verdict and what it assumes, then tables of memory, FLOPs, collectives and time."""
    return "\n\n".join(
        (
            verdict(estimate),
            aligned(assumptions(estimate), WIDTH),
            format_memory(estimate.ranks),
            *format_costs(estimate),
        )
    )


# Titles of the columns of the memory of a rank, and their names in ``Estimate.ranks``.
MEMORY_COLUMNS = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered",
    "activations": "activations",
    "temp.": "temporary",
    "live": "peak_active",
    "reserved": "peak_reserved",
}


def format_memory(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Format the memory of the simulated ranks as a table, and where it peaks."""
    rows = [["rank", *MEMORY_COLUMNS]]
    rows += [[str(row["rank"]), *(f"{row[f'{key}_gib']:.2f}" for key in MEMORY_COLUMNS.values())] for row in ranks]
    peaks: dict[str, list[int]] = {}
    for row in ranks:
        peaks.setdefault(row["peak_at"], []).append(row["rank"])
    where = "; ".join(f"{at} on {ranks_text(numbers)}" for at, numbers in peaks.items())
    title = "GiB on each GPU; gathered, activations, temporary and live are those at the peak"
    return "\n".join([title, *_table(rows), *textwrap.wrap(f"peak in {where}", WIDTH)])


def format_costs(estimate: Estimate) -> list[str]:
    """FLOPs, collectives if there are any, and seconds of a step by phase and kernel, on the busiest rank."""
    costs = estimate.costs
    flops = [f"  {phase:<32}{_digits(count / 1e12, 4)}" for phase, count in costs.flops_by_phase.items()]
    tables = [[f"TFLOP per step on the busiest rank: {_digits(sum(costs.flops_by_phase.values()) / 1e12, 4)}", *flops]]
    if costs.collectives:
        rows = [["collectives per step on that rank", "count", "GiB"]]
        for entry in costs.collectives:
            name = f"{entry['axis']}: {COLLECTIVES.get(entry['op'], entry['op'])}, {entry['phase']}"
            rows.append([name, f"{entry['count']:,.0f}", f"{entry['bytes'] / GIB:,.3f}"])
        tables.append(_table(rows, left=1))
    rows = [[f"seconds per step: {estimate.step_seconds:.3f}", *KINDS, "all"]]
    for name, value in costs.seconds.items():
        if value > 5e-4 and name != "step":
            kernels = [costs.kernels.get(f"{name}, {kind}", 0.0) for kind in KINDS]
            cells = [f"{seconds:.3f}" if seconds > 5e-4 else "" for seconds in kernels]
            rows.append([f"  {name}", *cells, f"{value:.3f}"])
    tables.append(_table(rows, left=1))
    return ["\n".join(lines) for lines in tables]


def _table(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Lines of a table whose columns are as wide as their cells, the first ``left`` of them aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if number < left else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("" if left else "  ") + "  ".join(cells).rstrip())
    return lines


def verdict(estimate: Estimate) -> str:
    """Whether the run fits and its speed; then its duration and, if that of a GPU is known, its price."""
    fits = "fits" if estimate.fits else "DOES NOT FIT"
    interval = estimate.gpu.interval
    low, high = (estimate.tokens_per_second_per_gpu * (1 + sign * interval) for sign in (-1, 1))
    factor, unit = next((of for of in UNITS if estimate.days * of[0] >= 1), UNITS[-1])
    duration, hours, dollars = (
        _with_limits(value, interval) for value in (estimate.days * factor, estimate.gpu_hours, estimate.dollars)
    )
    price = f", {dollars} dollars" if estimate.dollars else ""
    return (
        f"{fits}: {estimate.peak_reserved_gib:.1f} of {estimate.gpu.memory_gib:.1f} GiB; {low:,.0f} to {high:,.0f} "
        f"tokens/s a GPU; MFU {estimate.mfu:.1%}\n{duration} {unit}, {hours} GPU-hours{price}{reservations(estimate)}"
    )


def reservations(estimate: Estimate) -> str:
    """What to know before one relies on the speed, each on a line of its own."""
    lines = []
    highest = HIGHEST_PUBLISHED_MFU.get(estimate.gpu.capability[0])
    if highest is None:
        lines.append("nothing is fitted to runs on this GPU: compare layouts by it, and do not plan days with it")
    elif not estimate.is_float8 and estimate.mfu > highest:
        lines.append(f"the highest MFU in bfloat16 known of such a GPU is {highest:.0%}: expect the lower speed")
    return "".join(f"\n{line}" for line in lines)


def _with_limits(value: float, interval: float) -> str:
    """The range of a ``value`` that is proportional to the time of a step, whose speed has the relative error
    ``interval``."""
    low, high = (value / (1 + sign * interval) for sign in (1, -1))
    return f"{_digits(low)} to {_digits(high)}" if high >= SMALLEST else f"under {SMALLEST}"


def _digits(value: float, count: int = 3) -> str:
    """``value`` with ``count`` significant digits, and with commas."""
    return f"{float(f'{value:.{count}g}'):,.10g}"


UNITS = ((1, "days"), (24, "hours"), (1440, "minutes"), (86400, "seconds"))  # of a duration, and how many are a day
SMALLEST = 0.01  # number of days, GPU-hours or dollars that is printed
# The highest of the published runs in bfloat16 known to us, by compute capability (docs/development/planner.md).
HIGHEST_PUBLISHED_MFU = {8: 0.68, 9: 0.625}
ATTENTION = {
    "cudnn": "cuDNN, as PyTorch chooses if it is newer than 9.15",
    "fa3": "FlashAttention 3",
    "flash": "FlashAttention 2",
    "flex": "flex_attention, with the speed of FlashAttention 2",
}


def assumptions(estimate: Estimate) -> list[tuple[str, str]]:
    """Labels and texts of the model, the GPUs, the attention kernel, the layout and the length of the run."""
    gpu, tokens = estimate.gpu, estimate.steps * estimate.global_tokens
    vocabulary = f"vocabulary of {estimate.vocab_size:,} from {estimate.vocabulary_source}"
    network = gpu.network_bandwidth * estimate.gpus_per_node * 8e-9
    degrees = {name: degree for name, degree in asdict(estimate.degrees).items() if degree > 1}
    gpus = f"{estimate.world_size:,} of {gpu.flops_bfloat16 / 1e12:,.0f} TFLOP/s in bfloat16"
    machines = (
        f"{counted(estimate.gpus_per_node, 'GPU')} each, {gpu.link_bandwidth * 8e-9:,.0f} Gb/s between two of them"
    )
    return [
        ("model", f"{format_tokens(estimate.parameters)} parameters, {vocabulary}"),
        ("GPUs", gpus),
        ("machines", f"{machines}; {network:,.0f} Gb/s to others"),
        ("attention", ATTENTION[estimate.attention]),
        ("layout", ", ".join(f"{name} {degree}" for name, degree in degrees.items()) or "one rank"),
        (
            "length",
            f"{counted(estimate.steps, 'step')} of {format_tokens(estimate.global_tokens)} tokens, "
            f"{format_tokens(tokens)} in all",
        ),
    ]


def format_failures(days: float, step_seconds: float, world_size: int, options: EstimateConfig) -> str:
    """Format the expected duration of a run of ``days`` with failures, and the best interval of checkpoints."""
    of_gpus, of_nodes = world_size, math.ceil(world_size / options.gpus_per_node)
    per_hour = sum(
        count / hours for count, hours in ((of_gpus, options.mtbf_hours), (of_nodes, options.node_mtbf_hours)) if hours
    )
    mtbf_seconds = 3600 / per_hour
    interval = best_interval(mtbf_seconds, options.save_seconds)
    costs = (mtbf_seconds, options.save_seconds, options.restart_seconds)
    expected = expected_seconds(days * 86400, interval, *costs) / 86400
    failures = counted(round(expected * 86400 / mtbf_seconds), "failure")
    text = (
        f"with a failure every {mtbf_seconds / 3600:,.1f} hours on {counted(world_size, 'GPU')}: {expected:.1f} days "
        f"({days / expected:.1%} of them training), {expected * 24 * world_size:,.0f} GPU-hours, {failures}\n"
        f"best checkpoint interval: {interval / 60:,.1f} minutes, checkpoint.interval = "
        f"{max(1, round(interval / step_seconds))}"
    )
    if not options.replicas:
        return text
    lost = options.replica_lost_seconds + step_seconds
    ours = expected_seconds_of_replicas(days * 86400, interval, *costs, options.replicas, lost) / 86400
    restarts = options.restart_seconds + interval / 2
    return (
        f"{text}\nin {options.replicas} replicas that may die (docs/replicas.md): {ours:.1f} days "
        f"({days / ours:.1%} of them training), {ours * 24 * world_size:,.0f} GPU-hours; "
        f"a failure costs {lost:,.0f} s, and {1 / options.replicas:.0%} of the speed for "
        f"{options.restart_seconds:,.0f} s, in place of {restarts:,.0f} s"
    )


def format_recheck(interval: int, microbatches: int) -> str:
    """Format the cost of a recheck every ``interval`` steps, which repeats one of the ``microbatches`` of a rank."""
    return (
        f"recheck.interval = {interval}: {1 / microbatches / interval:.2%} more time, for one microbatch more in each "
        f"{interval}th step of {microbatches}"
    )


def format_stages(stages: Sequence[tuple[JobConfig, Estimate]]) -> str:
    """Format the estimates of the stages of a run as a table, one row per stage, and their sum."""
    rows: list[dict[str, str]] = []
    for config, estimate in stages:
        rows.append(
            {
                "stage": config.job.stage,
                "GiB": f"{estimate.peak_reserved_gib:.1f}",
                "fits": "yes" if estimate.fits else "NO",
                "s/step": f"{estimate.step_seconds:.3f}",
                "tokens/s": f"{estimate.tokens_per_second_per_gpu:,.0f}",
                "MFU": f"{estimate.mfu:.1%}",
                "steps": f"{estimate.steps:,}",
                "tokens": format_tokens(estimate.steps * estimate.global_tokens),
                "days": f"{estimate.days:.2f}",
                "GPU-hours": f"{estimate.gpu_hours:,.0f}",
                "dollars": f"{estimate.dollars:,.0f}",
            }
        )
    dollars = sum(own.dollars for _, own in stages)
    whole = dict.fromkeys(rows[0], "") | {
        "stage": "whole run",
        "steps": f"{sum(own.steps for _, own in stages):,}",
        "tokens": format_tokens(sum(own.steps * own.global_tokens for _, own in stages)),
        "days": f"{total_days(stages):.2f}",
        "GPU-hours": f"{sum(own.gpu_hours for _, own in stages):,.0f}",
        "dollars": f"{dollars:,.0f}",
    }
    titles = [title for title in rows[0] if title != "dollars" or dollars]
    lines: list[str] = []
    for left_out in ("", "s/step", "tokens"):  # until the table fits: other columns say the same
        titles = [title for title in titles if title != left_out]
        lines = _table([titles, *([row[title] for title in titles] for row in (*rows, whole))], left=1)
        if max(map(len, lines)) <= WIDTH:
            break
    low, high = (100 / (1 + sign * stages[0][1].gpu.interval) - 100 for sign in (1, -1))
    lines.append(f"tokens/s are per GPU; days may differ by {low:.0f}% to +{high:.0f}%")
    _, longest = max(stages, key=lambda stage: stage[1].days)
    return "\n".join(lines) + reservations(longest)


def total_days(stages: Sequence[tuple[JobConfig, Estimate]]) -> float:
    return sum(estimate.days for _, estimate in stages)


def format_ranking(best: Sequence[tuple[JobConfig, Estimate]]) -> str:
    """Format the layouts found by a search as a table, one row per layout, after what is the same in all of them."""
    rows: list[dict[str, object]] = []
    for config, estimate in best:
        schedule = config.parallelism.pipeline_parallel_schedule if estimate.degrees.pipeline > 1 else ""
        rows.append(
            {
                **asdict(estimate.degrees),
                "schedule": schedule,
                "batch": config.training.local_batch_size,
                "checkpoint": config.activation_checkpoint.mode,
                "reshard": config.parallelism.fsdp_reshard_after_forward,
                "GiB": f"{estimate.peak_reserved_gib:.1f}",
                "tokens/s": f"{estimate.tokens_per_second_per_gpu:,.0f}",
                "MFU": f"{estimate.mfu:.1%}",
            }
        )
    results = ("GiB", "tokens/s", "MFU")
    same = {name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)}
    same = {name: value for name, value in same.items() if name not in results and len(rows) > 1}
    titles = [name for name in rows[0] if name not in same]
    lines = _table([titles, *([str(row[name]) for name in titles] for row in rows)])
    if max(map(len, lines)) > WIDTH:
        lines = _ranking_in_words(rows, [name for name in titles if name not in results], results)
    common = ", ".join(f"{name} {value}" for name, value in same.items() if value != "")
    head = textwrap.wrap(f"in all of them {common}", WIDTH, subsequent_indent="  ") if common else []
    return "\n".join([*head, *lines])


def _ranking_in_words(rows: Sequence[Mapping[str, object]], names: Sequence[str], results: Sequence[str]) -> list[str]:
    """A narrow table: the ``results`` of each layout, then the options ``names``, of degrees those that are not 1."""
    lines = _table([[*results, "layout"], *([*(str(row[name]) for name in results), ""] for row in rows)])
    indent = " " * lines[0].index("layout")
    wrapped = [lines[0]]
    for line, row in zip(lines[1:], rows, strict=True):
        words = [f"{name} {row[name]}" for name in names if row[name] not in (1, "") or name == "batch"]
        begin = f"{line:<{len(indent)}}"
        wrapped += textwrap.wrap(", ".join(words), WIDTH, initial_indent=begin, subsequent_indent=indent)
    return wrapped


def format_layout(config: JobConfig, estimate: Estimate) -> str:
    """A layout with its estimate, such as "shard 4, tensor 2, batch 1, checkpoint full: 31.2 GiB, 9,120 tokens/s"."""
    degrees = {name: degree for name, degree in asdict(estimate.degrees).items() if degree > 1}
    words = [f"{name} {degree}" for name, degree in degrees.items()]
    words += [f"batch {config.training.local_batch_size}", f"checkpoint {config.activation_checkpoint.mode}"]
    speed = f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s" if estimate.fits else "does not fit"
    return f"{', '.join(words)}: {estimate.peak_reserved_gib:.1f} GiB, {speed}"


def draw_memory(estimate: Estimate, path: str) -> "Figure":
    """Plot live memory by category over two steps, on the rank with the highest peak, to the PNG file ``path``."""
    from matplotlib.figure import Figure

    record = max(estimate.records, key=lambda record: max(sum(step.peak) for step in record.recorder.steps))
    points = [moment for step in record.recorder.steps for moment in step.timeline]
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots()
    series = [[size / GIB for size in sizes] for sizes in zip(*(moment.sizes for moment in points), strict=True)]
    axes.stackplot(range(len(points)), *series, labels=CATEGORIES, colors=COLORS)
    peak, memory = max(sum(moment.sizes) for moment in points) / GIB, estimate.gpu.memory_gib
    top = 1.3 * peak  # with room for the names of microbatches
    if memory < 2.5 * peak:  # else the curves would be flat
        axes.axhline(memory, color="black", linewidth=1.2, label="memory of the GPU")
        top = max(top, 1.05 * memory)
    axes.set(ylabel="Live memory (GiB)", xlim=(0, len(points)), ylim=(0, top))
    above = axes.get_xaxis_transform()  # x in data, y as a fraction of the height
    begin = 0
    labels_at: dict[float, str] = {}
    for number, step in enumerate(record.recorder.steps, 1):
        axes.axvline(begin, color="black", linewidth=1.2)
        axes.text(begin, 1.01, f"step {number}", transform=above, va="bottom", fontsize=9)
        phases = merged_phases([moment.phase for moment in step.timeline])
        labels_at |= {begin + (first + last) / 2: name for name, first, last in phases}
        # A pipeline has several microbatches at a time.
        forwards = [begin + first for name, first, _ in phases if name == "forward" and estimate.degrees.pipeline == 1]
        for microbatch, first in enumerate(forwards, 1):
            axes.axvline(first, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
            text = f" microbatch {microbatch}"
            axes.text(first, 0.99, text, transform=above, rotation=90, va="top", fontsize=8)
        begin += len(step.timeline)
    axes.set_xticks(list(labels_at), list(labels_at.values()))
    axes.tick_params(axis="x", rotation=90 if len(labels_at) > 8 else 0, length=0)
    axes.set_title(f"Rank {record.rank} of a GPU with {memory:.1f} GiB, in the order of allocations and frees", pad=18)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)  # in the order of the areas
    figure.savefig(path, dpi=120)
    return figure


def merged_phases(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Consecutive equal phases: name, first index, index after the last. Those below 2% belong to the one before."""
    phases: list[tuple[str, int, int]] = []
    for i, name in enumerate(names):
        if phases and phases[-1][0] == name:
            phases[-1] = (name, phases[-1][1], i + 1)
        else:
            phases.append((name, i, i + 1))
    merged: list[tuple[str, int, int]] = []
    for name, first, last in phases:
        if merged and (last - first < len(names) / 50 or merged[-1][0] == name):
            merged[-1] = (merged[-1][0], merged[-1][1], last)
        else:
            merged.append((name, first, last))
    return merged
