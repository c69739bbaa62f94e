"""What a run needs and how fast it goes, before a GPU is paid for: ``python -m torchtrain.estimate ...``.

Takes every option of the trainer; its own are under "estimate". Needs no GPU, no compiler, no data, and no tokenizer:
without its file the vocabulary is the flavor's.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtrain.config.parse import parse, to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.log import door
from torchtrain.outputs import require_file, require_picture, writing

if TYPE_CHECKING:
    from torchtrain.distributed.mesh import Degrees
    from torchtrain.models.llama.model import TransformerConfig
    from torchtrain.planning.hardware import Gpu
    from torchtrain.planning.summary import Estimate

BEST = 10  # layouts that a search shows
# The first guess of memory is a rough one: what it says is this far above the GPU's is tried all the same.
ALLOWANCE = 1.15
SEARCH_SECONDS = 80  # of CPU time that a search rehearses for, up to 64 GPUs; five times as much beyond


@door
def main(argv: Sequence[str]) -> int:
    """Print the estimate; returns the exit code of the process."""
    return run(parse(argv, "torchtrain.estimate", __doc__))


def run(config: JobConfig) -> int:
    """Estimate the run of ``config``, or look for a better layout of it."""
    from torchtrain.shape import resolve_model

    config, picture = replace(config, model=resolve_model(config.model)), config.estimate.picture
    if config.estimate.search:
        if config.estimate.json or picture:
            raise ConfigError(
                "estimate.json and estimate.picture are of one layout, and estimate.search looks for one: give what it "
                "writes to another estimate"
            )
        return search(config)
    if picture:
        require_picture(picture, "estimate.picture")
    found = estimate_of(config)
    print_out(json.dumps(found.as_dict(), indent=1) if config.estimate.json else table(found))
    if picture:
        with writing(picture, "estimate.picture"):
            draw(found, picture)
    return 0


def print_out(text: str) -> None:
    sys.stdout.write(text + "\n")


def estimate_of(config: JobConfig) -> "Estimate":
    """Refuse what the trainer refuses; then rehearse."""
    from torchtrain.planning.summary import estimate

    gpu, shape = gpu_of(config), shape_of(config)
    refuse(config, shape, gpu)
    # A picture is of all layers.
    all_layers = config.estimate.all_layers or bool(config.estimate.picture)
    return estimate(config, shape, gpu, all_layers=all_layers, stand_ins=config.estimate.search)


def refuse(config: JobConfig, shape: "TransformerConfig", gpu: "Gpu") -> "Degrees":
    """The degrees; ConfigError for what the trainer would refuse on this GPU."""
    import torch

    from torchtrain.devices import planned_for_gpu
    from torchtrain.distributed.mesh import resolve_degrees
    from torchtrain.parallelisms.limits.layout import check_layout, resolve_global_batch_size
    from torchtrain.planning.summary import world_size_of

    degrees = resolve_degrees(config.parallelism, world_size_of(config))
    resolve_global_batch_size(config, degrees)
    with planned_for_gpu(gpu.capability):
        check_layout(config, torch.device("cuda"), degrees, shape)
    return degrees


def gpu_of(config: JobConfig) -> "Gpu":
    """The kind of GPU that ``config`` names, with numbers of one's own where it has some."""
    from torchtrain.planning.hardware import GPUS

    gpu, own = GPUS[config.estimate.gpu], config.estimate
    if own.memory_gib:
        gpu = replace(gpu, memory_gib=own.memory_gib)
    if own.network_gigabits:
        gpu = replace(gpu, network_bytes=own.network_gigabits * 1e9 / 8)
    return gpu


def shape_of(config: JobConfig) -> "TransformerConfig":
    """With the tokenizer's vocabulary, if its file is here; ConfigError where it is not one for the config."""
    from torchtrain.shape import document_start, model_shape
    from torchtrain.tokenizers import load_tokenizer, tokenizer_file

    path, tokenizer = config.model.tokenizer_path, None
    if tokenizer_file(path).is_file():
        tokenizer = load_tokenizer(path)
        document_start(config, tokenizer)
    return model_shape(config.model, tokenizer, config.training.seq_len)


def table(found: "Estimate") -> str:
    """For people."""
    from torchtrain.planning.summary import INTERVAL

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
    for row in found.ranks:
        values = [row.get(key, 0.0) for key in columns.values()]
        cells = (f"{value:>12}" if isinstance(value, int) else f"{value:>12.2f}" for value in values)
        lines.append("".join(cells) + f"  {row['peak_at']}")
    verdict = "fits" if found.fits else "DOES NOT FIT"
    lines += ["", f"{verdict}: {found.peak_reserved_gib:.1f} of {found.gpu.memory_gib:.1f} GiB"]
    work = found.figures.flops_by_phase
    parts = ", ".join(f"{phase} {count / 1e12:.1f}" for phase, count in work.items())
    lines += ["", f"TFLOP a step of the busiest rank: {sum(work.values()) / 1e12:.1f} ({parts})", ""]
    lines.append(f"{'collectives of its step':<44}{'count':>8}{'GiB':>10}")
    for entry in found.figures.collectives:
        name = f"{entry['axis']}: {entry['op']}, {entry['phase']}"
        lines.append(f"{name:<44}{entry['count']:>8.0f}{entry['bytes'] / 2**30:>10.3f}")
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


def draw(found: "Estimate", path: str) -> None:
    """Live memory by kind over the two steps of the rank that needs the most."""
    from matplotlib.figure import Figure

    from torchtrain.planning.ledger import KINDS

    record = max(found.records, key=lambda record: max(sum(step.peak) for step in record.ledger.steps))
    points = [sizes for step in record.ledger.steps for sizes in step.timeline]
    figure = Figure(figsize=(10, 5), layout="tight")
    axes = figure.subplots()
    series = [[sizes[i] / 2**30 for sizes in points] for i in range(len(KINDS))]
    axes.stackplot(range(len(points)), *series, labels=KINDS)
    axes.axhline(found.gpu.memory_gib, color="black", linewidth=0.8, label="memory of the GPU")
    axes.set(xlabel="allocations and frees of two steps", ylabel="GiB live", title=f"rank {record.rank}")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)


def search(config: JobConfig) -> int:
    """Print the ten best layouts, and write the best as a TOML file; returns 0.

    Raises:
        ConfigError: none fits.
    """
    from torchtrain.distributed.mesh import resolve_degrees
    from torchtrain.parallelisms.limits.layout import resolve_global_batch_size
    from torchtrain.planning.search import forwards, guess, layouts
    from torchtrain.planning.summary import world_size_of

    gpu, shape, size = gpu_of(config), shape_of(config), world_size_of(config)
    batch = config.training.global_batch_size
    if batch == -1:
        batch = resolve_global_batch_size(config, resolve_degrees(config.parallelism, size))
    config = replace(config, training=replace(config.training, global_batch_size=batch))
    own, guesses = [], []
    with suppress(ConfigError):
        degrees = refuse(config, shape, gpu)
        own = [replace(config, parallelism=replace(config.parallelism, data_parallel_shard_degree=degrees.shard))]
    for layout in layouts(config, shape):
        with suppress(ConfigError):
            guesses.append((*guess(layout, shape, refuse(layout, shape, gpu), gpu), layout))
    if not (own or guesses):
        refuse(config, shape, gpu)  # says what is wrong with all of them, as far as it is with this one
    path = config.estimate.output or str(Path(config.job.dump_folder) / "layout.toml")
    require_file(path, "estimate.output")
    guesses.sort(key=lambda candidate: candidate[:2])
    promising = [layout for _, memory_gib, layout in guesses if memory_gib <= gpu.memory_gib * ALLOWANCE]
    tried, work, passed_over, began = [], 0, 0, time.process_time()
    budget = SEARCH_SECONDS if size <= 64 else 5 * SEARCH_SECONDS
    # First the config as it is: what is found is no slower.
    for layout in own + [layout for layout in promising if layout not in own]:
        spent, more = time.process_time() - began, forwards(layout, shape)
        # What would take too long, pipelines of many microbatches, is passed over.
        if work and spent + spent / work * more > budget:
            passed_over += 1
            continue
        tried.append((layout, estimate_of(layout)))
        work += more
    fitting = [(layout, found) for layout, found in tried if found.fits]
    best = sorted(fitting, key=lambda pair: -pair[1].tokens_per_second_per_gpu)[:BEST]
    if not best:
        raise ConfigError(
            f"none of the {len(tried)} most promising of {len(guesses)} layouts of {size} GPUs fits in "
            f"{gpu.memory_gib} GiB; take more GPUs, or training.enable_cpu_offload"
        )
    spent = time.process_time() - began
    print_out(
        f"{len(guesses)} layouts, {len(promising)} of which may fit; {len(tried)} rehearsed in {spent:.0f} s of CPU "
        f"time, {len(fitting)} of them fit; {passed_over} passed over for lack of time"
    )
    print_out(ranking_table(best))
    with writing(path, "estimate.output"):
        # Without what was only asked of the planner.
        Path(path).write_text(to_toml(replace(best[0][0], estimate=type(config.estimate)())), encoding="utf-8")
    print_out(f"the first of them, as a config for the trainer: {path}")
    return 0


def ranking_table(best: "Sequence[tuple[JobConfig, Estimate]]") -> str:
    """For people."""
    titles = ("replicate", "shard", "tensor", "context", "pipeline", "schedule", "batch", "checkpoint", "reshard")
    lines = ["".join(f"{title:>11}" for title in (*titles, "GiB", "tokens/s", "MFU"))]
    for config, found in best:
        degrees = found.degrees
        cells = (
            *(degrees.replicate, degrees.shard, degrees.tensor, degrees.context, degrees.pipeline),
            config.parallelism.pipeline_parallel_schedule[:10] if degrees.pipeline > 1 else "",
            config.training.local_batch_size,
            config.activation_checkpoint.mode,
            config.parallelism.fsdp_reshard_after_forward,
            f"{found.peak_reserved_gib:.1f}",
            f"{found.tokens_per_second_per_gpu:,.0f}",
            f"{found.mfu:.1%}",
        )
        lines.append("".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
