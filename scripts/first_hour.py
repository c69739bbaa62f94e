"""Run what one GPU can prove, and write the results of each part when it ends.

``scripts/first_hour.sh`` installs the missing packages and runs this script. What matters most comes first. The results
are in the folder of the environment variable OUT: a file for each part, and ``summary.md``, which is written again
after each part, so that a run that is cut short is a result, too: a second start runs the parts that have not passed.
No file is larger than 16 MiB. ``calibration.json`` has what the planner can be calibrated from. Each part has a time
limit. ``--dry-run`` runs the same parts with small models on a CPU.
"""

import importlib.util
import json
import os
import re
import statistics
import sys
import tarfile
from pathlib import Path

from gpu_parts import (
    LOCAL_DATA,
    PYTHON,
    ROOT,
    STEPS,
    TINY,
    Part,
    beside_the_planner,
    describe,
    lines_of,
    module,
    run_parts,
    step_of,
    train,
)

TINY_EXPERTS = [
    *("--model.shape.dim=32", "--model.shape.n_layers=2", "--model.shape.ffn_dim=32", "--training.seq_len=64"),
    *("--training.local_batch_size=2", "--job.device=cpu"),
]


def machine(dry_run: bool, calibration: Path) -> Part:
    """Versions, and the rates of the kernels."""
    measure = [
        PYTHON,
        "scripts/benchmarks/measure_kernels.py",
        *(["--tiny"] if dry_run else []),
        f"--output={calibration}",
    ]
    commands = [module("torch.utils.collect_env"), *([] if dry_run else [["nvidia-smi"]]), measure]

    def figures(output: str) -> str:
        names = ("PyTorch version", "CUDA used to build PyTorch", "Nvidia driver version", "GPU 0", "Python version")
        found = (re.search(rf"^{name}: (.*)$", output, re.MULTILINE) for name in names)
        rows = json.loads(calibration.read_text(encoding="utf-8"))["rows"]
        fractions = [row["fraction"] for row in rows if row["kind"] == "product" and row["dtype"] == "bfloat16"]
        known = [fraction for fraction in fractions if fraction]
        reached = f", bfloat16 products at {min(known):.0%} to {max(known):.0%} of the peak" if known else ""
        return ", ".join(f"{match[0]}" for match in found if match) + f"; {len(rows)} rates of kernels{reached}"

    return Part("machine", 80, commands, independent=True, figures=figures)


def steps(dry_run: bool, work: Path, calibration: Path) -> Part:
    """Four layers of 8B at 8,192 tokens: compiled, eager, float8, each beside the estimate; a profile of the first.

    The memory that is reserved shows whether gradients are free by the time that they are needed again.
    """
    model = ["--job.config_file=train_configs/llama3_8b.toml", *([] if dry_run else ["--model.shape.n_layers=4"])]
    profile = ["--profiling.enable_profiling", "--profiling.enable_memory_snapshot", "--profiling.profile_freq=10"]
    variants = {"compiled": model, "eager": [*model, "--compile.no-enable"]}
    if not dry_run:  # a CPU has no products in float8
        recipes = {"float8": "tensorwise", "float8-rowwise": "rowwise"}
        variants |= {name: [*model, f"--float8.recipe={recipe}"] for name, recipe in recipes.items()}

    def keep(results: Path) -> None:
        with tarfile.open(results / "compiled-profile.tar", "w") as archive:
            for path in sorted((work / "compiled").glob("traces/*/*")):
                archive.add(path, path.name)

    part = beside_the_planner("steps", 260, variants, dry_run, work, calibration, {"compiled": profile})
    part.keep = keep
    return part


def models(dry_run: bool, work: Path, calibration: Path) -> Part:
    """Whole models, recomputation of activations and Muon, each beside the estimate."""
    part_of_8b = ["--job.config_file=train_configs/llama3_8b.toml", *([] if dry_run else ["--model.shape.n_layers=4"])]
    of_1b = ["--job.config_file=train_configs/llama3_1b.toml", "--training.local_batch_size=1"]
    of_3b = ["--job.config_file=train_configs/llama3_3b.toml", "--training.local_batch_size=1"]
    variants = {"8B-selective": [*part_of_8b, "--activation_checkpoint.mode=selective"]}
    if not dry_run:
        variants |= {
            "8B-full": [*part_of_8b, "--activation_checkpoint.mode=full"],
            "3B-full": [*of_3b, "--activation_checkpoint.mode=full"],
            "1B-two-microbatches": [*of_1b, "--training.global_batch_size=2"],
            "1B-muon": [*of_1b, "--optimizer.name=muon"],
        }
    return beside_the_planner("models", 300, variants, dry_run, work, calibration)


def documents(dry_run: bool, work: Path, calibration: Path) -> Part:
    """Document masks on sequences of 8,192 tokens; how long the compilation of the first step takes, and of what.

    The run without masks is the reference: attention within documents computes no more than that of whole sequences.
    """
    of_1b = ["--job.config_file=train_configs/llama3_1b.toml", "--training.local_batch_size=1"]
    variants = {"whole-sequences": of_1b, "masked": [*of_1b, "--data.document_mask"]}
    if not dry_run:
        variants["masked-eager"] = [*variants["masked"], "--compile.no-enable"]
    part = beside_the_planner("documents", 200, variants, dry_run, work, calibration)
    # Without this, a first step that does not end within the time limit leaves no trace of what it did.
    log = "TORCH_LOGS=recompiles,graph_breaks,autotuning,benchmarking"
    part.commands = [["env", log, *words] if "--data.document_mask" in words else words for words in part.commands]
    speeds = part.figures

    def figures(output: str) -> str:
        first = {name: next(iter(lines_of(work / name)), {}).get("step_seconds") for name in variants}
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in first.items() if value is not None)
        return f"{speeds(output)}; first step: {seconds or 'none'}"

    part.figures = figures
    return part


def grains(dry_run: bool, work: Path) -> Part:
    """Exact sums, and grains: the same bits from run to run, and what they cost beside fast sums."""
    model = ["--job.config_file=train_configs/llama3_1b.toml", *LOCAL_DATA, "--training.steps=8"]
    model += ["--metrics.log_freq=1", "--training.seq_len=2048", "--training.local_batch_size=2"]
    model += ["--training.global_batch_size=4", "--compile.no-enable", "--training.deterministic"]
    model += TINY if dry_run else ["--model.vocab_size=128256"]
    exact = [*model, "--training.sums=exact"]
    variants = {"fast": model, "exact": exact}
    for count in (1, 2) if dry_run else (1, 2, 4):
        variants[f"grains-{count}"] = [*exact, f"--grains.tensor={count}", f"--grains.context={count}"]
    variants["again"] = variants["grains-2"]
    commands = [train(1, *options, f"--job.dump_folder={work / name}") for name, options in variants.items()]

    def seconds(name: str) -> float:
        return statistics.median(line["step_seconds"] for line in lines_of(work / name)[2:])

    def figures(_: str) -> str:
        fast = seconds("fast")
        costs = [f"{name} {seconds(name) / fast:.2f}" for name in variants if name not in ("fast", "again")]
        one, other = ([(line["loss"], line["grad_norm"]) for line in lines_of(work / n)] for n in ("grains-2", "again"))
        bits = "the same bits" if one == other else "OTHER BITS"
        return f"step of {fast:.3f} s, times {', '.join(costs)}; {bits} in {len(one)} steps of a second run"

    return Part("grains", 180, commands, independent=True, figures=figures)


def experts(dry_run: bool, work: Path) -> Part:
    """A mixture of experts: on the GPU beside a CPU in float32, and the speed of OLMoE's layers with 64 experts."""
    packages = f"PYTHONPATH=scripts/moe:scripts/families:{os.environ.get('PYTHONPATH', '')}"
    debug = ["--job.config_file=scripts/moe/debug_moe.toml", "--job.import=torchtrain_moe", "--training.steps=5"]
    debug += ["--training.mixed_precision_param=float32", "--metrics.log_freq=1", *LOCAL_DATA]
    debug += ["--comparison.fingerprint_steps", "1", "2"]
    debug += ["--validation.no-enable", *(TINY_EXPERTS if dry_run else [])]
    runs = {"experts": debug, "experts_cpu": [*debug, "--job.device=cpu"]}
    if not dry_run:
        large = ["--job.import=torchtrain_moe", "--model.name=olmoe", "--model.flavor=1B-7B", *LOCAL_DATA]
        large += ["--model.shape.n_layers=4", "--model.vocab_size=50304", "--training.seq_len=4096"]
        large += ["--training.local_batch_size=2", f"--training.steps={STEPS}", "--metrics.log_freq=5"]
        runs |= {"OLMoE-4-layers": large, "OLMoE-4-layers-compiled": [*large, "--compile.enable"]}
    commands = [["env", packages, *train(1, *o, f"--job.dump_folder={work / name}")] for name, o in runs.items()]
    compare = module("torchtrain.compare", str(work / "experts"), str(work / "experts_cpu"), "--import=torchtrain_moe")
    commands.insert(2, ["env", packages, *compare])

    def figures(output: str) -> str:
        losses = [line.strip() for line in output.splitlines() if line.startswith("  loss:")]
        speeds = {name: step_of(work / name) for name in list(runs)[2:]}
        return "; ".join([*losses, *(f"{n}: {row.get('error') or describe(row)}" for n, row in speeds.items())])

    return Part("experts", 150, commands, independent=True, figures=figures)


def tests(dry_run: bool) -> Part:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]
    marked.sort(key=lambda name: name.endswith("test_gpu.py"))  # last, because it takes the longest
    options = ["-p", "no:cacheprovider", "-mgpu", "-vv", "-rA", "--durations=10", "-otimeout=100", *marked]
    if importlib.util.find_spec("xdist") and not dry_run:
        options += ["-n", str(min(8, os.cpu_count() or 1)), "-p", "no:benchmark"]  # its plugin rejects pytest-xdist
    # Without a GPU all would be skipped: that they are found is all there is to see.
    command = module("pytest", *(["--collect-only", "-q"] if dry_run else []), *options)

    def figures(output: str) -> str:
        last = [line for line in output.splitlines() if re.search(r"\d (passed|failed|skipped)|tests? collected", line)]
        if last:
            return last[-1].strip("= ")
        passed, failed = (len(re.findall(rf"\b{word}\b", output)) for word in ("PASSED", "FAILED"))
        return f"{passed} passed, {failed} failed, the others were not reached"

    return Part("tests", 200, [command], figures=figures)


def configs(dry_run: bool, work: Path) -> Part:
    """The debug model on the GPU and on a CPU, in float32 and with fingerprints; 1B compiled and not."""
    debug = ["--job.config_file=train_configs/debug_model.toml", "--training.steps=10", "--metrics.log_freq=1"]
    debug += ["--training.mixed_precision_param=float32", "--comparison.fingerprint_steps", "1", "2"]
    debug += [*LOCAL_DATA, *(TINY if dry_run else [])]
    runs = {"debug_model": debug, "debug_model_cpu": [*debug, "--job.device=cpu"]}
    pairs = [("debug_model", "debug_model_cpu")]
    if not dry_run:
        large = ["--job.config_file=train_configs/llama3_1b.toml", "--training.steps=10", "--metrics.log_freq=1"]
        large += [*LOCAL_DATA, "--training.seq_len=2048", "--training.local_batch_size=2"]
        large += ["--training.global_batch_size=4", "--model.vocab_size=128256"]
        runs |= {"llama3_1b": large, "llama3_1b_eager": [*large, "--compile.no-enable"]}
        pairs.append(("llama3_1b", "llama3_1b_eager"))
    commands = []
    for pair in pairs:
        commands += [module("torchtrain.train", *runs[name], f"--job.dump_folder={work / name}") for name in pair]
        commands.append(module("torchtrain.compare", *(str(work / name) for name in pair)))

    def figures(output: str) -> str:
        return "; ".join(line.strip() for line in output.splitlines() if line.startswith("  loss:"))

    return Part("configs", 110, commands, figures=figures)


def benchmark(dry_run: bool, work: Path) -> Part:
    which = ["--tiny", "--threads=1"] if dry_run else ["--gpu", "--only", "1B seq 2048 compiled"]
    command = [PYTHON, "scripts/benchmarks/benchmark.py", *which, "--rounds=1", f"--output={work / 'benchmark.json'}"]

    def figures(_: str) -> str:
        rows = json.loads((work / "benchmark.json").read_text(encoding="utf-8"))["rows"]
        return "; ".join(
            f"{row['entrant']}: {row['tokens_per_second']:,.0f} tokens/s, {row['memory_gib']:.2f} GiB" for row in rows
        )

    return Part("benchmark", 100, [command], figures=figures)


def parts(dry_run: bool, work: Path, out: Path) -> list[Part]:
    """All parts; the first 15 minutes have those of which least is known."""
    calibration = out / "calibration.json"
    return [
        machine(dry_run, calibration),
        steps(dry_run, work, calibration),
        documents(dry_run, work, calibration),
        benchmark(dry_run, work),
        experts(dry_run, work),
        grains(dry_run, work),
        tests(dry_run),
        configs(dry_run, work),
        models(dry_run, work, calibration),
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the parts; returns 0 if all pass."""
    title = "What one GPU shows"
    return run_parts(__doc__ or "", title, "first_hour", parts, argv)


if __name__ == "__main__":
    sys.exit(main())
