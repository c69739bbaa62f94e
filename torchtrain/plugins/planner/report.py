"""Human-readable estimates: a verdict, tables, and a plot of memory."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.logging import counted
from torchtrain.plugins.planner.failures import best_interval, expected_seconds, expected_seconds_of_replicas
from torchtrain.plugins.planner.hardware import GIB
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.recorder import CATEGORIES
from torchtrain.plugins.planner.summary import Estimate

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


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate: the verdict and what it assumes, then tables of memory, FLOPs, collectives and time."""
    columns = {**{name: name for name in CATEGORIES}, "peak live": "peak_active", "reserved": "peak_reserved"}
    lines = [verdict(estimate), assumptions(estimate), ""]
    lines += ["GiB on each GPU; gathered, activations and temporary are those at the peak"]
    lines.append("".join(f"{title:>{len(title) + 2}}" for title in ("rank", *columns)) + "  peak at")
    for row in estimate.ranks:
        cells = [f"{row[f'{key}_gib']:.2f}" for key in columns.values()]
        widths = [len(title) + 2 for title in ("rank", *columns)]
        cells = [f"{cell:>{width}}" for cell, width in zip((row["rank"], *cells), widths, strict=True)]
        lines.append(f"{''.join(cells)}  {row['peak_at']}")
    flops = estimate.costs.flops_by_phase
    parts = ", ".join(f"{phase} {count / 1e12:,.4g}" for phase, count in flops.items())
    lines += ["", f"TFLOP per step on the busiest rank: {sum(flops.values()) / 1e12:,.4g} ({parts})", ""]
    lines.append(f"{'collectives per step on that rank':<52}{'count':>8}{'GiB':>12}")
    for entry in estimate.costs.collectives:
        name = f"{entry['axis']}: {COLLECTIVES.get(entry['op'], entry['op'])}, {entry['phase']}"
        lines.append(f"{name:<52}{entry['count']:>8.0f}{entry['bytes'] / GIB:>12.3f}")
    shown = {name: value for name, value in estimate.costs.seconds.items() if value > 5e-4 and name != "step"}
    lines += ["", f"seconds per step: {estimate.step_seconds:.3f}"]
    lines += [f"  {name:<32}{value:.3f}" for name, value in shown.items()]
    return "\n".join(lines)


def verdict(estimate: Estimate) -> str:
    """Whether the run fits and its speed; then its duration and, if that of a GPU is known, its price."""
    fits = "fits" if estimate.fits else "DOES NOT FIT"
    interval = estimate.gpu.interval
    low, high = (estimate.tokens_per_second_per_gpu * (1 + sign * interval) for sign in (-1, 1))
    values = (estimate.days, estimate.gpu_hours, estimate.dollars)
    days, hours, dollars = (_with_limits(value, interval) for value in values)
    price = f", {dollars} dollars" if estimate.dollars else ""
    return (
        f"{fits}: {estimate.peak_reserved_gib:.1f} of {estimate.gpu.memory_gib:.1f} GiB; {low:,.0f} to {high:,.0f} "
        f"tokens/s a GPU; MFU {estimate.mfu:.1%}\n{days} days, {hours} GPU-hours{price}{reservations(estimate)}"
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
    return " to ".join(_three_digits(value / (1 + sign * interval)) for sign in (1, -1))


def _three_digits(value: float) -> str:
    """``value`` with three significant digits, and with commas."""
    return f"{float(f'{value:.3g}'):,.10g}"


# The highest of the published runs in bfloat16 that are known to us, by compute capability (docs/estimate.md).
HIGHEST_PUBLISHED_MFU = {8: 0.68, 9: 0.625}
ATTENTION = {
    "cudnn": "cuDNN, as PyTorch chooses if it is newer than 9.15",
    "fa3": "FlashAttention 3",
    "flash": "FlashAttention 2",
    "flex": "flex_attention, with the speed of FlashAttention 2",
}


def assumptions(estimate: Estimate) -> str:
    """The model, the GPUs and the attention kernel, the layout and the length of the run."""
    gpu, tokens = estimate.gpu, estimate.steps * estimate.global_tokens
    network = gpu.network_bandwidth * estimate.gpus_per_node * 8e-9
    degrees = {name: degree for name, degree in asdict(estimate.degrees).items() if degree > 1}
    layout = ", ".join(f"{name} {degree}" for name, degree in degrees.items()) or "one rank"
    return (
        f"{format_tokens(estimate.parameters)} parameters, with a vocabulary of {estimate.vocab_size:,}; "
        f"on {counted(estimate.world_size, 'GPU')} of {gpu.flops_bfloat16 / 1e12:,.0f} TFLOP/s in bfloat16, "
        f"{gpu.link_bandwidth * 8e-9:,.0f} Gb/s between two of a machine\n"
        f"machines of {counted(estimate.gpus_per_node, 'GPU')} with {network:,.0f} Gb/s each; attention by "
        f"{ATTENTION[estimate.attention]}\n"
        f"{layout}; {format_tokens(estimate.global_tokens)} tokens in each of {counted(estimate.steps, 'step')}, "
        f"{format_tokens(tokens)} in all"
    )


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
    titles = ["GiB", "", "s/step", "tokens/s", "MFU", "steps", "tokens", "days", "GPU-hours"]
    dollars = sum(own.dollars for _, own in stages)
    if dollars:
        titles.append("dollars")
    width = max(len("whole run"), *(len(config.job.stage) for config, _ in stages))
    lines = [f"{'stage':<{width}}" + "".join(f"{title:>13}" for title in titles)]
    for config, estimate in stages:
        cells = (
            f"{estimate.peak_reserved_gib:.1f}",
            "fits" if estimate.fits else "DOES NOT FIT",
            f"{estimate.step_seconds:.3f}",
            f"{estimate.tokens_per_second_per_gpu:,.0f}",
            f"{estimate.mfu:.1%}",
            f"{estimate.steps:,}",
            format_tokens(estimate.steps * estimate.global_tokens),
            f"{estimate.days:.2f}",
            f"{estimate.gpu_hours:,.0f}",
            *([f"{estimate.dollars:,.0f}"] if dollars else []),
        )
        lines.append(f"{config.job.stage:<{width}}" + "".join(f"{cell:>13}" for cell in cells))
    days, hours = total_days(stages), sum(own.gpu_hours for _, own in stages)
    tokens = sum(own.steps * own.global_tokens for _, own in stages)
    price = [f"{dollars:,.0f}"] if dollars else []
    whole = ("", "", "", "", "", f"{sum(own.steps for _, own in stages):,}", format_tokens(tokens), f"{days:.2f}")
    lines.append(f"{'whole run':<{width}}" + "".join(f"{cell:>13}" for cell in (*whole, f"{hours:,.0f}", *price)))
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
    cells = [titles, *([str(row[name]) for name in titles] for row in rows)]
    widths = [2 + max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    common = ", ".join(f"{name} {value}" for name, value in same.items() if value != "")
    return "\n".join([*([f"in all of them {common}"] if common else []), *lines])


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
