"""Estimates for people: tables and a picture."""

from collections.abc import Sequence

from torchtrain.config.schema import JobConfig
from torchtrain.planning.hardware import GIB
from torchtrain.planning.ledger import KINDS
from torchtrain.planning.summary import INTERVAL, Estimate


def table(found: Estimate) -> str:
    """For people."""
    columns = {**dict(zip(KINDS, KINDS, strict=True)), "peak live": "peak_active", "reserved": "peak_reserved"}
    lines = ["GiB on each GPU; gathered, activations and temporary as they are at the peak", ""]
    lines.append("".join(f"{title:>12}" for title in ("rank", *columns)) + "  peak at")
    for row in found.ranks:
        cells = "".join(f"{row[f'{key}_gib']:>12.2f}" for key in columns.values())
        lines.append(f"{row['rank']:>12}{cells}  {row['peak_at']}")
    verdict = "fits" if found.fits else "DOES NOT FIT"
    lines += ["", f"{verdict}: {found.peak_reserved_gib:.1f} of {found.gpu.memory_gib:.1f} GiB"]
    work = found.figures.flops_by_phase
    parts = ", ".join(f"{phase} {count / 1e12:.1f}" for phase, count in work.items())
    lines += ["", f"TFLOP a step of the busiest rank: {sum(work.values()) / 1e12:.1f} ({parts})", ""]
    lines.append(f"{'collectives of its step':<44}{'count':>8}{'GiB':>10}")
    for entry in found.figures.collectives:
        name = f"{entry['axis']}: {entry['op']}, {entry['phase']}"
        lines.append(f"{name:<44}{entry['count']:>8.0f}{entry['bytes'] / GIB:>10.3f}")
    shown = {name: value for name, value in found.figures.seconds.items() if value > 5e-4 and name != "step"}
    low, high = (found.tokens_per_second_per_gpu * (1 + sign * INTERVAL) for sign in (-1, 1))
    tokens = found.steps * found.global_tokens
    parts = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
    lines += [
        "",
        f"seconds a step: {found.step_seconds:.3f} ({parts})",
        f"tokens a second and GPU: {low:,.0f} to {high:,.0f}; MFU {found.mfu:.1%}",
        f"{found.steps:,} steps, {tokens / 1e9:,.1f} billion tokens: {found.days:.1f} days, "
        f"{found.days * 24 * found.world_size:,.0f} GPU-hours",
    ]
    return "\n".join(lines)


def ranking_table(best: Sequence[tuple[JobConfig, Estimate]]) -> str:
    """For people."""
    titles = ("replicate", "shard", "tensor", "context", "pipeline", "schedule", "batch", "checkpoint", "reshard")
    rows: list[tuple[object, ...]] = [(*titles, "GiB", "tokens/s", "MFU")]
    for config, found in best:
        degrees = found.degrees
        rows.append(
            (
                *(degrees.replicate, degrees.shard, degrees.tensor, degrees.context, degrees.pipeline),
                config.parallelism.pipeline_parallel_schedule[:10] if degrees.pipeline > 1 else "",
                config.training.local_batch_size,
                config.activation_checkpoint.mode,
                config.parallelism.fsdp_reshard_after_forward,
                f"{found.peak_reserved_gib:.1f}",
                f"{found.tokens_per_second_per_gpu:,.0f}",
                f"{found.mfu:.1%}",
            )
        )
    return "\n".join("".join(f"{cell:>11}" for cell in row) for row in rows)


def draw(found: Estimate, path: str) -> None:
    """Live memory by kind over the two steps of the rank that needs the most."""
    from matplotlib.figure import Figure

    record = max(found.records, key=lambda record: max(sum(step.peak) for step in record.ledger.steps))
    points = [moment.sizes for step in record.ledger.steps for moment in step.timeline]
    figure = Figure(figsize=(10, 5), layout="tight")
    axes = figure.subplots()
    series = [[size / GIB for size in sizes] for sizes in zip(*points, strict=True)]
    axes.stackplot(range(len(points)), *series, labels=KINDS)
    axes.axhline(found.gpu.memory_gib, color="black", linewidth=0.8, label="memory of the GPU")
    axes.set(xlabel="allocations and frees of two steps", ylabel="GiB live", title=f"rank {record.rank}")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
