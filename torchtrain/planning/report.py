"""Human-readable estimates: tables and a memory plot."""

from collections.abc import Sequence
from dataclasses import asdict

from torchtrain.config.schema import EstimateConfig, JobConfig
from torchtrain.config.tokens import format_tokens
from torchtrain.planning.failures import best_interval, expected_seconds
from torchtrain.planning.hardware import GIB
from torchtrain.planning.recorder import CATEGORIES
from torchtrain.planning.summary import INTERVAL, Estimate


def format_estimate(estimate: Estimate) -> str:
    """Format an estimate as tables of memory, FLOPs, collectives and time."""
    columns = {**{name: name for name in CATEGORIES}, "peak live": "peak_active", "reserved": "peak_reserved"}
    lines = ["GiB on each GPU; gathered, activations and temporary are those at the peak", ""]
    lines.append("".join(f"{title:>12}" for title in ("rank", *columns)) + "  peak at")
    for row in estimate.ranks:
        cells = "".join(f"{row[f'{key}_gib']:>12.2f}" for key in columns.values())
        lines.append(f"{row['rank']:>12}{cells}  {row['peak_at']}")
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    lines += ["", f"{verdict}: {estimate.peak_reserved_gib:.1f} of {estimate.gpu.memory_gib:.1f} GiB"]
    flops = estimate.costs.flops_by_phase
    parts = ", ".join(f"{phase} {count / 1e12:.1f}" for phase, count in flops.items())
    lines += ["", f"TFLOP per step on the busiest rank: {sum(flops.values()) / 1e12:.1f} ({parts})", ""]
    lines.append(f"{'collectives per step on that rank':<44}{'count':>8}{'GiB':>10}")
    for entry in estimate.costs.collectives:
        name = f"{entry['axis']}: {entry['op']}, {entry['phase']}"
        lines.append(f"{name:<44}{entry['count']:>8.0f}{entry['bytes'] / GIB:>10.3f}")
    shown = {name: value for name, value in estimate.costs.seconds.items() if value > 5e-4 and name != "step"}
    low, high = (estimate.tokens_per_second_per_gpu * (1 + sign * INTERVAL) for sign in (-1, 1))
    tokens = estimate.steps * estimate.global_tokens
    parts = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
    lines += [
        "",
        f"seconds per step: {estimate.step_seconds:.3f} ({parts})",
        f"tokens per second per GPU: {low:,.0f} to {high:,.0f}; MFU {estimate.mfu:.1%}",
        f"{estimate.steps:,} steps, {tokens / 1e9:,.1f} billion tokens: {estimate.days:.1f} days, "
        f"{estimate.days * 24 * estimate.world_size:,.0f} GPU-hours",
    ]
    return "\n".join(lines)


def format_failures(days: float, step_seconds: float, world_size: int, options: EstimateConfig) -> str:
    """Format the expected duration of a run of ``days`` with failures, and the best interval of checkpoints."""
    mtbf_seconds = options.mtbf_hours * 3600 / world_size
    interval = best_interval(mtbf_seconds, options.save_seconds)
    costs = (mtbf_seconds, options.save_seconds, options.restart_seconds)
    expected = expected_seconds(days * 86400, interval, *costs) / 86400
    return (
        f"with a failure every {mtbf_seconds / 3600:,.1f} hours on {world_size:,} GPUs: {expected:.1f} days "
        f"({days / expected:.1%} of them training), {expected * 24 * world_size:,.0f} GPU-hours, "
        f"{expected * 86400 / mtbf_seconds:,.0f} failures\n"
        f"best checkpoint interval: {interval / 60:,.1f} minutes, checkpoint.interval = "
        f"{max(1, round(interval / step_seconds))}"
    )


def format_stages(stages: Sequence[tuple[JobConfig, Estimate]]) -> str:
    """Format the estimates of the stages of a run as a table, one row per stage, and their sum."""
    titles = ("GiB", "", "s/step", "tokens/s", "MFU", "steps", "tokens", "days", "GPU-hours")
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
            f"{estimate.days * 24 * estimate.world_size:,.0f}",
        )
        lines.append(f"{config.job.stage:<{width}}" + "".join(f"{cell:>13}" for cell in cells))
    days, hours = total_days(stages), sum(own.days * 24 * own.world_size for _, own in stages)
    tokens = sum(own.steps * own.global_tokens for _, own in stages)
    whole = ("", "", "", "", "", f"{sum(own.steps for _, own in stages):,}", format_tokens(tokens), f"{days:.2f}")
    lines.append(f"{'whole run':<{width}}" + "".join(f"{cell:>13}" for cell in (*whole, f"{hours:,.0f}")))
    low, high = (100 / (1 + sign * INTERVAL) - 100 for sign in (1, -1))
    lines.append(f"tokens/s are per GPU; days may differ by {low:.0f}% to +{high:.0f}%")
    return "\n".join(lines)


def total_days(stages: Sequence[tuple[JobConfig, Estimate]]) -> float:
    return sum(estimate.days for _, estimate in stages)


def format_ranking(best: Sequence[tuple[JobConfig, Estimate]]) -> str:
    """Format the layouts found by a search as a table, one row per layout."""
    titles = ("replicate", "shard", "tensor", "context", "pipeline", "schedule", "batch", "checkpoint", "reshard")
    rows: list[tuple[object, ...]] = [(*titles, "GiB", "tokens/s", "MFU")]
    for config, estimate in best:
        degrees = estimate.degrees
        rows.append(
            (
                *(degrees.replicate, degrees.shard, degrees.tensor, degrees.context, degrees.pipeline),
                config.parallelism.pipeline_parallel_schedule[:10] if degrees.pipeline > 1 else "",
                config.training.local_batch_size,
                config.activation_checkpoint.mode,
                config.parallelism.fsdp_reshard_after_forward,
                f"{estimate.peak_reserved_gib:.1f}",
                f"{estimate.tokens_per_second_per_gpu:,.0f}",
                f"{estimate.mfu:.1%}",
            )
        )
    return "\n".join("".join(f"{cell:>11}" for cell in row) for row in rows)


def format_layout(config: JobConfig, estimate: Estimate) -> str:
    """A layout with its estimate, such as "shard 4, tensor 2, batch 1, checkpoint full: 31.2 GiB, 9,120 tokens/s"."""
    degrees = {name: degree for name, degree in asdict(estimate.degrees).items() if degree > 1}
    words = [f"{name} {degree}" for name, degree in degrees.items()]
    words += [f"batch {config.training.local_batch_size}", f"checkpoint {config.activation_checkpoint.mode}"]
    speed = f"{estimate.tokens_per_second_per_gpu:,.0f} tokens/s" if estimate.fits else "does not fit"
    return f"{', '.join(words)}: {estimate.peak_reserved_gib:.1f} GiB, {speed}"


def draw_memory(estimate: Estimate, path: str) -> None:
    """Plot live memory by category over two steps, on the rank with the highest peak, to the PNG file ``path``."""
    from matplotlib.figure import Figure

    record = max(estimate.records, key=lambda record: max(sum(step.peak) for step in record.recorder.steps))
    points = [moment.sizes for step in record.recorder.steps for moment in step.timeline]
    figure = Figure(figsize=(10, 5), layout="tight")
    axes = figure.subplots()
    series = [[size / GIB for size in sizes] for sizes in zip(*points, strict=True)]
    axes.stackplot(range(len(points)), *series, labels=CATEGORIES)
    axes.axhline(estimate.gpu.memory_gib, color="black", linewidth=0.8, label="memory of the GPU")
    axes.set(xlabel="allocations and frees of two steps", ylabel="GiB live", title=f"rank {record.rank}")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
