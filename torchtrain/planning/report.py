"""Human-readable estimates: tables and a memory plot."""

from collections.abc import Sequence

from torchtrain.config.schema import JobConfig
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
