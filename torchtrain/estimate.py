"""What a run needs and how fast it goes, before a GPU is paid for: ``python -m torchtrain.estimate --estimate.gpu ...``.

Takes every option of the trainer. Needs no GPU, no compiler, no data, and no tokenizer: without its file the vocabulary
is the flavor's.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtrain.config.parse import parse
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.log import run_door

if TYPE_CHECKING:
    from torchtrain.planning.hardware import Gpu
    from torchtrain.planning.summary import Estimate


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimate; returns the exit code of the process."""
    return run_door(lambda: run(parse(sys.argv[1:] if argv is None else argv)))


def run(config: JobConfig) -> int:
    """Estimate the run of ``config``, or look for a better layout of it."""
    from torchtrain.planning.summary import world_size_of

    if config.estimate.search:
        return search(config)
    found = estimate_of(config)
    if config.estimate.picture:
        draw(found, Path(config.estimate.picture))
    print_out(json.dumps(found.as_dict(), indent=1) if config.estimate.json else table(found, world_size_of(config)))
    return 0


def print_out(text: str) -> None:
    sys.stdout.write(text + "\n")


def estimate_of(config: JobConfig) -> "Estimate":
    """Refuse what the trainer refuses; then rehearse."""
    import torch

    from torchtrain.build import check_run, model_shape, resolve_global_batch_size
    from torchtrain.devices import planned_for_gpu
    from torchtrain.distributed.mesh import resolve_degrees
    from torchtrain.planning.summary import estimate, world_size_of

    gpu = gpu_of(config)
    degrees = resolve_degrees(config.parallelism, world_size_of(config))
    global_batch_size = resolve_global_batch_size(config, degrees)
    shape = model_shape(config, vocabulary(config))
    with planned_for_gpu(gpu.capability):
        check_run(config, torch.device("cuda"), degrees, shape)
    return estimate(config, shape, global_batch_size, gpu)


def gpu_of(config: JobConfig) -> "Gpu":
    """The kind of GPU that ``config`` names, with numbers of one's own where it has some."""
    from torchtrain.planning.hardware import GPUS

    gpu, own = GPUS[config.estimate.gpu], config.estimate
    if own.memory_gib:
        gpu = replace(gpu, memory_gib=own.memory_gib)
    if own.network_gigabits:
        gpu = replace(gpu, network_bytes=own.network_gigabits * 1e9 / 8)
    return gpu


def vocabulary(config: JobConfig) -> int | None:
    """The tokenizer's, if its file is here."""
    from torchtrain.tokenizers import load_tokenizer

    path = config.model.tokenizer_path
    return None if path and not Path(path).exists() else load_tokenizer(path).vocab_size


def table(found: "Estimate", world_size: int) -> str:
    """For people."""
    from torchtrain.planning.summary import INTERVAL, collectives, flops, flops_by_phase

    rows = found.as_dict()["ranks"]
    columns = {
        "rank": "rank",
        "parameters": "parameters_gib",
        "gradients": "gradients_gib",
        "optimizer": "optimizer_gib",
        "gathered": "gathered_gib",
        "activations": "activations_gib",
        "temporary": "temporary_gib",
        "peak live": "peak_active_gib",
        "reserved": "peak_reserved_gib",
    }
    lines = ["GiB on each GPU; gathered, activations and temporary as they are at the peak", ""]
    lines.append("".join(f"{title:>12}" for title in columns) + "  peak at")
    for row in rows:
        values = [row.get(key, 0.0) for key in columns.values()]
        lines.append("".join(f"{v:>12}" if isinstance(v, int) else f"{v:>12.2f}" for v in values) + f"  {row['peak_at']}")
    verdict = "fits" if found.fits else "DOES NOT FIT"
    lines += ["", f"{verdict}: {found.peak_reserved_gib:.1f} of {found.gpu.memory_gib:.1f} GiB"]
    busiest = max(found.records, key=flops)
    work = ", ".join(f"{phase} {count / 1e12:.1f}" for phase, count in flops_by_phase(busiest).items() if count)
    lines += ["", f"TFLOP a step, rank {busiest.rank}: {flops(busiest) / 1e12:.1f} ({work})", ""]
    lines.append(f"{'collectives of a step':<24}{'count':>8}{'GiB':>10}")
    for (axis, op, phase), (count, size) in sorted(collectives(busiest).items()):
        lines.append(f"{f'{axis} {op}, {phase}':<40.40}{count:>8}{size / 2**30:>10.3f}")
    time = found.times[busiest.rank]
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in time.by_phase.items())
    idle = ", ".join(f"{name} {seconds:.3f}" for name, seconds in time.waiting.items() if seconds > 5e-4) or "nothing"
    low, high = (found.tokens_per_second_per_gpu * (1 + sign * INTERVAL) for sign in (-1, 1))
    lines += [
        "",
        f"seconds a step: {found.step_seconds:.3f} (computing: {parts}; waiting for: {idle})",
        f"tokens a second and GPU: {low:,.0f} to {high:,.0f}; MFU {found.mfu:.1%}",
        f"{found.steps:,} steps, {found.steps * found.global_tokens / 1e9:,.1f} billion tokens: {found.days:.1f} days, "
        f"{found.days * 24 * world_size:,.0f} GPU-hours",
    ]
    return "\n".join(lines)


def draw(found: "Estimate", path: Path) -> None:
    """Live memory by kind over the two steps of the rank that needs the most."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(f"estimate.picture needs matplotlib: pip install 'torchtrain[plot]' ({error})") from None

    from torchtrain.planning.ledger import KINDS
    from torchtrain.planning.summary import reserved_gib

    record = max(found.records, key=reserved_gib)
    points = [sizes for step in record.ledger.steps for sizes in step.timeline]
    figure, axes = pyplot.subplots(figsize=(10, 5))
    series = [[sizes[i] / 2**30 for sizes in points] for i in range(len(KINDS))]
    axes.stackplot(range(len(points)), *series, labels=KINDS)
    axes.axhline(found.gpu.memory_gib, color="black", linewidth=0.8, label="memory of the GPU")
    axes.set(xlabel="allocations and frees of two steps", ylabel="GiB live", title=f"rank {record.rank}")
    axes.legend(loc="upper right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def search(config: JobConfig) -> int:
    """Print the ten best layouts, and write the best as a TOML file."""
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main())
