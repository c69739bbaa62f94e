"""Run what one GPU can prove in less than twenty minutes, and write the results of each part when it ends.

``scripts/first_hour.sh`` installs the missing packages and runs this script. What matters most comes first: the rates
of kernels, then training steps beside the planner's prediction, then the tests. The results are in the folder of the
environment variable OUT: a file for each part, and ``summary.md``, which is written again after each part, so that a
run that is cut short is a result, too. No file is larger than 16 MiB. ``calibration.json`` has what the
planner can be calibrated from. Each part has a time limit. ``--dry-run`` runs the same parts with small models on a
CPU.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("PYTHON") or sys.executable
MAX_BYTES = 16 << 20  # of a file of results
STEPS = 15
GRACE_SECONDS = 10  # for a command to end after the time limit
# The data and the tokenizer of the repository. Options that a config on clusters sets are set back.
LOCAL_DATA = [
    *("--data.name=", "--data.subset=", "--model.tokenizer_path=", "--lr_scheduler.warmup_steps=2"),
    *("--checkpoint.no-enable", "--metrics.no-enable_tensorboard", "--report.no-enable"),
]
TINY = [
    *("--model.shape.dim=64", "--model.shape.n_layers=2", "--model.shape.n_heads=4", "--model.shape.n_kv_heads=2"),
    *("--model.shape.ffn_dim=128", "--training.seq_len=64", "--training.local_batch_size=1", "--job.device=cpu"),
]


@dataclass
class Part:
    """Commands that run one after the other, until the time is over."""

    name: str
    limit_seconds: int
    commands: list[list[str]]
    independent: bool = False
    """Whether later commands run also if one fails."""
    keep: Callable[[Path], None] = lambda _: None
    """Copies files of the part to the folder of the results."""
    figures: Callable[[str], str] = lambda _: ""
    """The cell of the summary, from the output of the part."""
    result: str = field(default="not run", init=False)
    seconds: float = field(default=0.0, init=False)
    cell: str = field(default="", init=False)

    def run(self, out: Path) -> None:
        """Run the commands; their output is in ``out``."""
        log, start = out / f"{self.name}.txt", time.monotonic()
        self.result = "pass"
        with log.open("w", encoding="utf-8") as file:
            for command in self.commands:
                print(f"$ {' '.join(command)}", file=file, flush=True)
                rest = self.limit_seconds - (time.monotonic() - start)
                result = execute(command, file, rest)
                if result != "pass":
                    print(f"{result}: {' '.join(command)}", file=file)
                    self.result = result if self.result == "pass" else self.result
                    if not self.independent or rest <= 0:
                        break
        self.seconds = time.monotonic() - start
        output = log.read_text(encoding="utf-8", errors="replace")
        try:
            self.keep(out)
            self.cell = self.figures(output)
        except Exception as error:  # the results of a part that failed may be of any form
            self.cell = f"no figures: {error!r}"
        for file_path in out.iterdir():
            if file_path.stat().st_size > MAX_BYTES:
                shorten(file_path)


def execute(command: list[str], output: Any, seconds: float) -> str:
    """Run a command, with all processes that it starts; returns "pass", or why it failed."""
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        return f"FAIL ({error})"
    try:
        code = process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then prints the failures so far
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "FAIL (time limit)"
    return "pass" if code == 0 else f"FAIL (exit code {code})"


def shorten(path: Path) -> None:
    """Keep the end of a text file that is too large; remove another file."""
    if path.suffix == ".txt":
        path.write_bytes(path.read_bytes()[-MAX_BYTES:])
    else:
        path.unlink()


def summary(parts: list[Part], dry_run: bool) -> str:
    lines = ["# First hour on a GPU" if not dry_run else "# Dry run on a CPU", ""]
    lines += ["| part | result | seconds | figures |", "| --- | --- | ---: | --- |"]
    lines += [f"| {part.name} | {part.result} | {part.seconds:.0f} | {part.cell} |" for part in parts]
    return "\n".join(lines) + "\n"


def module(name: str, *options: str) -> list[str]:
    return [PYTHON, "-m", name, *options]


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
    """Four layers of 8B at 8,192 tokens: eager, compiled, float8, each beside the estimate; a profile of the second."""
    model = ["--job.config_file=train_configs/llama3_8b.toml", *([] if dry_run else ["--model.shape.n_layers=4"])]
    profile = ["--profiling.enable_profiling", "--profiling.enable_memory_snapshot", "--profiling.profile_freq=10"]
    variants = {"eager": [*model, "--compile.no-enable"], "compiled": model}
    if not dry_run:  # a CPU has no products in float8
        variants["float8"] = [*model, "--float8.recipe=tensorwise"]

    def keep(results: Path) -> None:
        with tarfile.open(results / "compiled-profile.tar", "w") as archive:
            for path in sorted((work / "compiled").glob("traces/*/*")):
                archive.add(path, path.name)

    part = beside_the_planner("steps", 220, variants, dry_run, work, calibration, {"compiled": profile})
    part.keep = keep
    return part


def models(dry_run: bool, work: Path, calibration: Path) -> Part:
    """Whole models, recomputation of activations, Muon and document masks, each beside the estimate."""
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
            "1B-document-mask": [*of_1b, "--data.document_mask"],
        }
    return beside_the_planner("models", 300, variants, dry_run, work, calibration)


def beside_the_planner(
    name: str,
    limit_seconds: int,
    variants: dict[str, list[str]],
    dry_run: bool,
    work: Path,
    calibration: Path,
    traced: dict[str, list[str]] | None = None,
) -> Part:
    """A part that trains with the options of each variant, and estimates the speed and memory of the same options.

    ``traced``: options of training alone. The rows are added to ``calibration``, under the part's name.
    """
    common = [*LOCAL_DATA, "--training.global_batch_size=1", f"--training.steps={STEPS}", "--metrics.log_freq=5"]
    tiny = [*TINY, "--compile.no-enable"] if dry_run else ["--model.vocab_size=128256"]
    variants = {key: [options[0], *common, *tiny, *options[1:]] for key, options in variants.items()}
    commands, estimates = [], []
    for key, options in variants.items():
        outputs = f"--job.dump_folder={work / key}"
        commands.append(module("torchtrain.train", *options, *(traced or {}).get(key, []), outputs))
        planned = module("torchtrain.estimate", *options, "--estimate.world_size=1", "--estimate.json")
        estimates.append(f"{shlex.join(planned)} > {work / key}.json")
    # First, so that no time limit cuts them off; at the same time, because they need no GPU.
    commands.insert(0, ["sh", "-c", " & ".join([*estimates, "wait"])])

    def figures(_: str) -> str:
        rows = [{"name": key, "options": options, **step_of(work / key)} for key, options in variants.items()]
        known = json.loads(calibration.read_text(encoding="utf-8")) if calibration.is_file() else {}
        calibration.write_text(json.dumps(known | {name: rows}), encoding="utf-8")
        return "; ".join(f"{row['name']}: {row['error'] if 'error' in row else describe(row)}" for row in rows)

    return Part(name, limit_seconds, commands, independent=True, figures=figures)


def step_of(folder: Path) -> dict[str, Any]:
    """What a run measured in its last interval, and what was planned for it."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if "tokens_per_second" in line]
        last = lines[-1]
    except (OSError, IndexError):
        return {"error": "no step"}
    row = {name: last.get(name) for name in ("tokens_per_second", "step_seconds", "mfu", "loss", "data_wait_fraction")}
    for memory in ("memory_gib", "memory_reserved_gib"):
        row[memory] = max(line.get(memory, 0.0) for line in lines)  # a CPU has nothing reserved
    planned = folder.with_suffix(".json")
    if planned.is_file() and planned.stat().st_size:
        row["planned"] = json.loads(planned.read_text(encoding="utf-8"))
    return row


def describe(row: dict[str, Any]) -> str:
    mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
    text = f"{row['tokens_per_second']:,.0f} tokens/s{mfu}, {row['memory_gib']:.2f} GiB"
    text += f", {row['memory_reserved_gib']:.2f} reserved" if row["memory_reserved_gib"] else ""
    if "planned" in row:
        seconds, rank = row["planned"]["step_seconds"], row["planned"]["ranks"][0]
        tokens = row["tokens_per_second"] * row["step_seconds"] / seconds
        text += f" (planned {tokens:,.0f}, {rank['peak_active_gib']:.2f}, {rank['peak_reserved_gib']:.2f})"
    return text


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


def main(argv: list[str] | None = None) -> int:
    """Run the parts; returns 0 if all pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small models, on a CPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="names of parts")
    arguments = parser.parse_args(argv)
    dry_run: bool = arguments.dry_run
    out = Path(os.environ.get("OUT") or ROOT / "outputs" / "first_hour")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        calibration = out / "calibration.json"
        parts = [machine(dry_run, calibration), steps(dry_run, work, calibration), tests(dry_run)]
        parts += [configs(dry_run, work), benchmark(dry_run, work), models(dry_run, work, calibration)]
        for part in parts:
            part.limit_seconds *= 10 if dry_run else 1  # it may be a busy machine
            if not arguments.only or part.name in arguments.only:
                part.run(out)
                (out / "summary.md").write_text(summary(parts, dry_run), encoding="utf-8")
                print(f"{part.name}: {part.result} in {part.seconds:.0f} s  {part.cell}", flush=True)
    return 0 if all(part.result in ("pass", "not run") for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())
