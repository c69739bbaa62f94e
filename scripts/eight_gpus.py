"""Show in an hour what only a machine with eight GPUs can show, on one page.

``scripts/eight_gpus.sh`` runs this script. The parts, most valuable first: the health of the machine, the speed of 8B
beside the planner's, the losses of every layout beside a CPU's, the bits of exact sums and of grains, a replica that
dies, checkpoints of 8B, other layouts of 8B with asynchronous tensor parallelism, and a small model that is trained to
the end. Each part has a time limit, and a second start runs the parts that have not passed. ``summary.md`` in the
folder of the environment variable OUT says what holds; it is written again after each part. ``--dry-run`` runs the same
parts with small models on CPUs. RANKS sets another number of GPUs.
"""

import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_parts import (
    LOCAL_DATA,
    PYTHON,
    STEPS,
    TINY,
    Claim,
    Part,
    beside_the_planner,
    launch,
    lines_of,
    module,
    most_memory,
    run_parts,
    train,
)

ROWS = 8  # of the global batch of the small models
EVEN = 0.95  # rate of the slowest GPU, in those of the median
FRACTION = 0.75  # of the data sheet's bandwidth, which the planner assumes
LOSS_BOUND, NORM_BOUND = 1e-5, 1e-3  # relative differences of float32 runs, in five steps
SPEED_BOUND, MEMORY_BOUND = 0.15, 0.05  # relative errors of the planner
CHECKPOINT_ROOM = 250e9  # bytes for two checkpoints of 8B, of 96 GB each
AXES = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "context": "context_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
}
SCHEDULES = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")  # beside 1F1B


def machine(dry_run: bool, ranks: int, out: Path) -> Part:
    """The GPUs alone and between each other, beside the data sheet."""
    result = out / "collectives.json"
    script = ["scripts/benchmarks/measure_collectives.py", f"--output={result}", *(["--tiny"] if dry_run else [])]
    commands = [module("torch.utils.collect_env")]
    commands += [] if dry_run else [["nvidia-smi"], ["nvidia-smi", "topo", "-m"]]
    commands.append(launch(ranks, *script))

    def claims(_: str) -> Iterator[Claim]:
        results = json.loads(result.read_text(encoding="utf-8"))
        rows = results["rows"]
        for row in (row for row in rows if row["kind"] == "alone" and not dry_run):
            rates = f"{min(row['rates']):,.0f} to {max(row['rates']):,.0f}"
            yield Claim(f"no GPU is slower than the others: {row['name']}", row["slowest"] >= EVEN, rates)
        measured = [row for row in rows if row["kind"] == "collective"]
        largest = max(row["bytes"] for row in measured)
        for row in (row for row in measured if row["bytes"] == largest and not dry_run):
            text = f"{row['name']} of {largest >> 20:,} MiB has the bandwidth that is planned"
            figures = f"{row['bus_gb_per_second']:,.0f} GB/s"
            if results["link_bandwidth"] is None:
                yield Claim(text, False, f"{figures}; the planner does not know {results['device']}")
                continue
            fraction = row["fraction_of_data_sheet"]
            figures += f" of {results['link_bandwidth'] / 1e9:,.0f}, {fraction:.0%}"
            figures += f"; {row['seconds'] * 1e3:.2f} ms, planned {row['planned_seconds'] * 1e3:.2f}"
            yield Claim(text, fraction >= FRACTION, figures)
        exact = rows[-1]
        text = "all-reduces of whole numbers are exact on each rank"
        yield Claim(text, not sum(exact["wrong"]), f"{exact['elements']:,} elements, {sum(exact['wrong']):.0f} wrong")

    return Part("machine", 180, commands, independent=True, claims=lambda output: list(claims(output)))


def planned_claims(rows: dict[str, dict[str, Any]]) -> Iterator[Claim]:
    """Speed and memory of each variant beside the planner's."""
    for name, row in rows.items():
        if "error" in row or "planned" not in row:
            yield Claim(f"{name} trains, with an estimate", False, row.get("error", "no estimate"))
            continue
        planned = row["planned"]
        tokens = planned["tokens_per_second_per_gpu"]
        error = tokens / row["tokens_per_second"] - 1
        mfu = f", MFU {row['mfu']:.1%}, planned {planned['mfu']:.1%}" if row["mfu"] else ""
        figures = f"{row['tokens_per_second']:,.0f} tokens/s a GPU, planned {tokens:,.0f} ({error:+.1%}){mfu}"
        is_gpu = bool(row["memory_reserved_gib"])
        yield Claim(f"{name} is as fast as planned", not is_gpu or abs(error) <= SPEED_BOUND, figures)
        if is_gpu:
            peak = most_memory(planned)
            for key, measured in (("active", row["memory_gib"]), ("reserved", row["memory_reserved_gib"])):
                expected = peak[f"peak_{key}_gib"]
                error = expected / measured - 1
                text = f"{name} needs the memory that is planned, {key}"
                figures = f"{measured:.2f} GiB, planned {expected:.2f} ({error:+.1%})"
                yield Claim(text, abs(error) <= MEMORY_BOUND, figures)


def speed(dry_run: bool, ranks: int, work: Path, out: Path) -> Part:
    """8B on all GPUs, in bfloat16 and float8, beside the planner."""
    model = ["--job.config_file=train_configs/llama3_8b.toml", f"--training.global_batch_size={2 * ranks}"]
    variants = {"8B in bfloat16": model}
    if not dry_run:  # a CPU has no products in float8
        variants["8B in float8"] = [*model, "--float8.recipe=tensorwise"]
    traced = {"8B in bfloat16": ["--profiling.enable_profiling", "--profiling.profile_freq=10"]} if not dry_run else {}
    part = beside_the_planner(
        "speed",
        420,
        variants,
        dry_run,
        work,
        out / "calibration.json",
        traced,
        ranks=ranks,
        claims=lambda rows: list(planned_claims(rows)),
    )

    def keep(results: Path) -> None:
        traces = sorted((work / "8B in bfloat16").glob("traces/*/*"))
        if traces:
            shutil.copy(traces[0], results / f"speed-{traces[0].name}")

    part.keep = keep
    return part


def layouts_of_8b(dry_run: bool, ranks: int, work: Path, out: Path) -> Part:
    """8B with other parallel dimensions, each beside the planner, and with asynchronous tensor parallelism."""
    model = ["--job.config_file=train_configs/llama3_8b.toml", "--training.local_batch_size=2"]
    tensor, half = min(4, ranks), ranks // 2
    model += [f"--training.global_batch_size={4 * ranks // tensor}"]
    tensor_options = [*model, f"--parallelism.tensor_parallel_degree={tensor}"]
    variants = {"8B with tensor parallelism": tensor_options}
    if not dry_run:
        pipeline = [f"--training.local_batch_size={ranks}", f"--training.global_batch_size={half * ranks}"]
        variants |= {
            # It needs compiled blocks and symmetric memory, which a CPU does not have.
            "8B with async tensor parallelism": [*tensor_options, "--parallelism.enable_async_tensor_parallel"],
            "8B with context parallelism": [*model, "--training.local_batch_size=1", *degree("context", 2)],
            "8B with a pipeline": [*model, *pipeline, *degree("pipeline", 2), "--activation_checkpoint.mode=full"],
        }

    def claims(rows: dict[str, dict[str, Any]]) -> list[Claim]:
        found = list(planned_claims(rows))
        plain, overlapped = (rows.get(f"8B with {name}tensor parallelism", {}) for name in ("", "async "))
        if "tokens_per_second" in plain and "tokens_per_second" in overlapped:
            gain = overlapped["tokens_per_second"] / plain["tokens_per_second"] - 1
            found.append(Claim("asynchronous tensor parallelism is faster", gain > 0, f"{gain:+.1%}"))
            difference = abs(overlapped["loss"] / plain["loss"] - 1)
            text = "asynchronous tensor parallelism trains the same loss"
            found.append(Claim(text, difference < 5e-3, f"{difference:.1e} apart after {STEPS} steps"))
        return found

    return beside_the_planner(
        "layouts-of-8B", 480, variants, dry_run, work, out / "calibration.json", ranks=ranks, claims=claims
    )


def degree(axis: str, number: int) -> list[str]:
    """The option that gives ``axis``, one of ``AXES``, this degree."""
    return [f"--parallelism.{AXES[axis]}={number}"]


def divisions(ranks: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All ways to divide ``ranks`` among ``axes``; degrees of 1 are left out."""
    if len(axes) == 1:
        yield {axes[0]: ranks} if ranks > 1 else {}
        return
    for own in (number for number in range(1, ranks + 1) if ranks % number == 0):
        for others in divisions(ranks // own, axes[1:]):
            yield {**({axes[0]: own} if own > 1 else {}), **others}


def layout_options(degrees: dict[str, int], schedule: str = "1F1B", rows: int = 0) -> list[str]:
    """Options of a layout with ``ROWS`` rows in a step.

    ``rows``: of a microbatch; 0: half of those of a rank, so that there are two microbatches.
    """
    per_rank = ROWS // (degrees.get("replicate", 1) * degrees.get("shard", 1))
    pipeline = degrees.get("pipeline", 1) > 1
    options = [option for axis in AXES for option in degree(axis, degrees.get(axis, 1))]
    options += [f"--training.local_batch_size={per_rank if pipeline else rows or max(1, per_rank // 2)}"]
    return [*options, f"--parallelism.pipeline_parallel_schedule={schedule}"] if pipeline else options


def name_of(degrees: dict[str, int], schedule: str = "1F1B") -> str:
    text = ",".join(f"{axis}={number}" for axis, number in degrees.items())
    return f"{text},{schedule}" if schedule != "1F1B" else text


def small_model(dry_run: bool, ranks: int) -> list[str]:
    """A model that every layout of ``ranks`` ranks divides, in float32."""
    heads, layers = max(4, ranks), 2 * max(2, ranks // 2)
    width = 16 * heads if dry_run else 64 * heads
    options = ["--job.config_file=train_configs/debug_model.toml", *LOCAL_DATA, "--validation.no-enable"]
    options += [f"--model.shape.dim={width}", f"--model.shape.n_heads={heads}", f"--model.shape.n_kv_heads={heads}"]
    options += [f"--model.shape.ffn_dim={2 * width}", f"--model.shape.n_layers={layers}", "--metrics.log_freq=1"]
    options += [f"--training.seq_len={64 if dry_run else 256}", "--training.mixed_precision_param=float32"]
    options += [f"--training.global_batch_size={ROWS}", "--lr_scheduler.total_steps=100"]
    return [*options, *(["--job.device=cpu"] if dry_run else [])]


def layouts(dry_run: bool, ranks: int, work: Path) -> Part:
    """Losses and gradient norms of every layout in float32, beside those of one rank on a CPU."""
    model = [*small_model(dry_run, ranks), "--training.steps=5"]
    runs = {name_of(degrees): layout_options(degrees) for degrees in divisions(ranks, list(AXES))}
    if not dry_run:
        pairs = {"shard": ranks // 2, "pipeline": 2}
        runs |= {name_of(pairs, schedule): layout_options(pairs, schedule) for schedule in SCHEDULES}
        half = {"shard": ranks // 2, "tensor": 2}
        without = [*layout_options(half), "--parallelism.no-enable_sequence_parallel"]
        runs[f"{name_of(half)},sequence_parallel=false"] = without
    reference = ["--job.device=cpu", f"--training.local_batch_size={ROWS // 2}", f"--job.dump_folder={work / 'cpu'}"]
    commands = [train(1, *model, *reference)]
    commands += [train(ranks, *model, *o, f"--job.dump_folder={work / name}") for name, o in runs.items()]

    def claims(_: str) -> list[Claim]:
        expected = lines_of(work / "cpu")
        differences, failed = {}, []
        for name in runs:
            found = lines_of(work / name)
            if not expected or len(found) != len(expected):
                failed.append(name)
                continue
            differences[name] = [
                max(abs(one[key] / other[key] - 1) for one, other in zip(found, expected, strict=True))
                for key in ("loss", "grad_norm")
            ]
        wrong = [n for n, (loss, norm) in differences.items() if loss > LOSS_BOUND or norm > NORM_BOUND]
        text = f"each layout of {ranks} ranks trains the losses of a CPU, in float32"
        figures = f"{len(differences) - len(wrong)} of {len(runs)}"
        if differences:
            worst = max(differences, key=lambda name: differences[name][0])
            figures += f"; losses at most {differences[worst][0]:.1e} apart ({worst})"
            figures += f", gradient norms {max(norm for _, norm in differences.values()):.1e}"
        figures += f"; other losses: {', '.join(wrong)}" if wrong else ""
        figures += f"; without an end: {', '.join(failed)}" if failed else ""
        return [Claim(text, not wrong and not failed, figures)]

    return Part("layouts", 900, commands, independent=True, claims=claims)


def bits(dry_run: bool, ranks: int, work: Path) -> Part:
    """Exact sums have the bits of one GPU on shards and replicas, and with grains on any layout."""
    model = [*small_model(dry_run, ranks), "--training.steps=10", "--training.sums=exact", "--training.deterministic"]
    model += ["--huggingface.export", "--huggingface.export_dtype=float32", "--report.no-enable"]
    half = ranks // 2
    families: dict[str, tuple[list[str], list[dict[str, int]]]] = {
        "exact sums": ([], [{"shard": ranks}, {"replicate": 2, "shard": half}]),
        "grains": (
            ["--grains.tensor=2", "--grains.context=4"],
            [{"tensor": 2, "context": min(2, half), "shard": half // 2}, {"pipeline": 2, "shard": half}],
        ),
    }
    if dry_run:
        families = {name: (options, those[:1]) for name, (options, those) in families.items()}
    commands, places = [], {}
    for family, (options, those) in families.items():
        for degrees in ({}, *those):
            degrees = {axis: number for axis, number in degrees.items() if number > 1}
            name = f"{family} {name_of(degrees) or 'one GPU'}"
            own = [*options, *layout_options(degrees, rows=1), f"--job.dump_folder={work / name}"]
            commands.append(train(ranks if degrees else 1, *model, *own))
            places.setdefault(family, []).append(name)

    def claims(_: str) -> list[Claim]:
        found = []
        for family, (one, *others) in places.items():
            for other in others:
                same, figures = same_bits(work / one, work / other)
                layout = other.removeprefix(f"{family} ")
                found.append(Claim(f"{family}: {layout} has the bits of one GPU", same, figures))
        return found

    return Part("bits", 300, commands, independent=True, claims=claims)


def same_bits(one: Path, other: Path) -> tuple[bool, str]:
    """Whether two runs have the same losses, gradient norms and exported weights; with what was compared."""
    steps = [[(line["loss"], line["grad_norm"]) for line in lines_of(folder)] for folder in (one, other)]
    weights = [[file.read_bytes() for file in sorted((folder / "hf").glob("*.safetensors"))] for folder in (one, other)]
    if not all(steps) or not all(weights):
        return False, "a run has no end"
    equal = sum(a == b for a, b in zip(*steps, strict=False))
    same_weights = weights[0] == weights[1]
    figures = f"{equal} of {len(steps[0])} steps, {'the same' if same_weights else 'OTHER'} weights"
    return steps[0] == steps[1] and same_weights, figures


def replicas(dry_run: bool, ranks: int, work: Path) -> Part:
    """A GPU dies in a run of two replicas, which continues and has the bits of an undisturbed run."""
    per_replica = ranks // 2
    result = work / "replicas.json"
    model = [*small_model(dry_run, per_replica), "--training.deterministic", "--training.local_batch_size=1"]
    script = [PYTHON, "scripts/faults/kill_replica.py", str(work / "replicas"), f"--ranks={per_replica}"]
    commands = [[*script, f"--output={result}", *model]]

    def claims(_: str) -> list[Claim]:
        found = json.loads(result.read_text(encoding="utf-8"))
        figures = f"{found['steps']} steps, {found['tensors']} tensors; killed after step {found['killed_after']}"
        figures += f", the others continued after {found['lost_seconds']:.1f} s, it joined again after"
        figures += f" {found['joined_seconds']:.1f} s"
        figures += "".join(f"; {name} differs" for name in found["different"][:5])
        text = "a run of which a GPU is killed continues, and has the bits of an undisturbed one"
        return [Claim(text, not found["different"], figures)]

    return Part("replicas", 300, commands, claims=claims)


def checkpoint(dry_run: bool, ranks: int, work: Path) -> Part:
    """Checkpoints of 8B: for how long training waits, how long a save takes, and a resume."""
    steps, interval = 9, 4
    model = ["--job.config_file=train_configs/llama3_8b.toml", *LOCAL_DATA, f"--training.global_batch_size={ranks}"]
    model += [*TINY, "--compile.no-enable"] if dry_run else ["--model.vocab_size=128256"]
    model += ["--metrics.log_freq=1", "--checkpoint.enable", f"--checkpoint.interval={interval}"]
    model += ["--checkpoint.keep_latest_k=1", "--lr_scheduler.total_steps=100", "--checkpoint.interval_minutes=0"]
    model += [f"--job.dump_folder={work / 'saved'}"]
    has_room = dry_run or shutil.disk_usage(work).free > CHECKPOINT_ROOM
    if not has_room:
        model += ["--model.shape.n_layers=8"]
    commands = [train(ranks, *model, f"--training.steps={count}") for count in (steps, steps + 2)]

    def claims(output: str) -> list[Claim]:
        lines = {line["step"]: line["step_seconds"] for line in lines_of(work / "saved")}
        saves = [float(seconds) for seconds in re.findall(r"saved \S+ in ([\d.]+) s", output)]
        size = sum(file.stat().st_size for file in (work / "saved" / "checkpoint").rglob("*") if file.is_file())
        usual = statistics.median(lines[step] for step in (3, 4, 7, 8))
        after = [lines[step] - usual for step in (interval + 1, 2 * interval + 1)]
        figures = "" if has_room else f"8 layers, because WORK has less than {CHECKPOINT_ROOM / 1e9:.0f} GB; "
        figures += f"{size / 1e9:.3g} GB in {', '.join(f'{seconds:.1f}' for seconds in saves)} s"
        figures += f"; steps of {usual:.2f} s, after a save {' and '.join(f'{seconds:+.2f}' for seconds in after)} s"
        resumed = f"resumed from {work / 'saved' / 'checkpoint'}/step-{steps}" in output and steps + 2 in lines
        return [
            Claim("checkpoints are saved while training continues", len(saves) >= 3, figures),
            Claim("a run resumes from a checkpoint", resumed, f"to step {max(lines)}"),
        ]

    return Part("checkpoint", 480, commands, claims=claims)


def trained(dry_run: bool, ranks: int, work: Path) -> Part:
    """A small model that is trained to the end on one GPU and on all of them, with a picture of both."""
    model = ["--job.config_file=train_configs/debug_english.toml", f"--training.global_batch_size={ROWS}"]
    model += ["--data.held_out=0.02", "--validation.interval=500", "--validation.steps=8", "--checkpoint.no-enable"]
    model += ["--report.no-enable"]
    if dry_run:
        model += [*TINY, "--training.steps=6", "--validation.interval=3", "--metrics.log_freq=1"]
    runs = {"one GPU": {}, name_of({"shard": ranks}): {"shard": ranks}}
    commands = [
        train(ranks if degrees else 1, *model, *layout_options(degrees), f"--job.dump_folder={work / name}")
        for name, degrees in runs.items()
    ]
    picture = work / "trained.png"
    folders = [str(work / name) for name in runs]
    if find_spec("matplotlib"):
        commands.append([PYTHON, "scripts/plot.py", *folders, "-o", str(picture)])

    def keep(out: Path) -> None:
        if picture.is_file():
            shutil.copy(picture, out)

    def claims(_: str) -> list[Claim]:
        ends = []
        for name in runs:
            lines = (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            validations = [line for line in map(json.loads, lines) if "validation_loss" in line]
            ends.append((lines_of(work / name)[-1], validations[-1]["validation_loss"], validations[0]))
        (one, one_loss, _), (last, loss, first) = ends
        figures = f"validation loss {loss:.4f} after {last['step']:,} steps, {one_loss:.4f} on one GPU"
        figures += f"; {last['step_seconds']:.3f} s a step, {one['step_seconds']:.3f} on one"
        figures += "; ![losses](trained.png)" if picture.is_file() else "; no picture: matplotlib is not installed"
        text = f"a small model is trained to the end on {ranks} GPUs, to the loss of one"
        return [Claim(text, abs(loss - one_loss) < 0.05 and loss < first["validation_loss"], figures)]

    return Part("trained", 420, commands, keep=keep, claims=claims)


def parts(dry_run: bool, work: Path, out: Path, ranks: int) -> list[Part]:
    """All parts, most valuable first: 58 minutes, if each of them takes all of its time."""
    return [
        machine(dry_run, ranks, out),
        speed(dry_run, ranks, work, out),
        layouts(dry_run, ranks, work),
        bits(dry_run, ranks, work),
        replicas(dry_run, ranks, work),
        checkpoint(dry_run, ranks, work),
        layouts_of_8b(dry_run, ranks, work, out),
        trained(dry_run, ranks, work),
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the parts; returns 0 if all pass, and what they claim holds."""
    ranks = int(os.environ.get("RANKS", "8"))
    return run_parts(__doc__ or "", f"What {ranks} GPUs show", "eight_gpus", partial(parts, ranks=ranks), argv)


if __name__ == "__main__":
    sys.exit(main())
