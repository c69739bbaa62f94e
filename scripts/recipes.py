"""Run the experiments of docs/recipes.md: optimizers, schedules, z-loss and averaged weights, on any machine.

    python scripts/recipes.py --output outputs/recipes                     # all parts: takes hours; may be interrupted
    python scripts/recipes.py --output outputs/recipes --parts rates seeds --size 2M --tokens 200000
    python scripts/recipes.py --output outputs/recipes --report --picture docs/recipes.png

The runs train on the sources of Python's standard library. They validate on one file in 20, chosen by a hash of its
name. Each finished run is a line of results.jsonl in the output folder, and is not repeated; an interrupted run resumes
from its checkpoint. Parts depend on earlier parts: they use the best learning rate and decay found so far.

    rates     AdamW and Muon, each over RATES, with decay 0.1
    decays    each at its best rate, over DECAYS
    seeds     each at its best rate and decay, seeds 0 to 2; every run validates averaged weights, too
    schedules the same with a stable rate and a linear decay over the last fifth, where the others have a cosine
    z         the same with a z-loss of 1e-4
    mup       three widths over RATES, with and without [mup], AdamW, on a quarter of the tokens
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from torchtrain.config.tokens import format_tokens
from torchtrain.datasets.standard_library import standard_library_files
from torchtrain.metrics.writers import append

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
DECAYS = (0.0, 0.1, 0.3)
SEEDS = (0, 1, 2)
OPTIMIZERS = ("adamw", "muon")
PARTS = ("rates", "decays", "seeds", "schedules", "z", "mup")
SIZES = {"10M": (320, 6), "2M": (128, 4)}  # width and layers; with the embeddings of the default tokenizer
HEAD_DIM = 32
SEQ_LEN, ROWS = 256, 8
VALIDATION_BATCHES, VALIDATIONS = 8, 5


@dataclass(frozen=True)
class Recipe:
    """One run. ``base_dim``: that of [mup]; None: off."""

    optimizer: str
    lr: float
    decay: float = 0.1
    seed: int = 0
    schedule: str = "cosine"
    z: float = 0.0
    dim: int = 0
    layers: int = 0
    tokens: int = 0
    base_dim: int | None = None

    @property
    def steps(self) -> int:
        return max(VALIDATIONS, self.tokens // (SEQ_LEN * ROWS))

    @property
    def name(self) -> str:
        return "_".join(f"{key}-{value}" for key, value in asdict(self).items() if value is not None)

    def options(self, data: Path, folder: Path) -> list[str]:
        heads = self.dim // HEAD_DIM
        values: dict[str, Any] = {
            "job.dump_folder": folder,
            "model.flavor": "debugmodel",
            "model.shape.dim": self.dim,
            "model.shape.n_layers": self.layers,
            "model.shape.n_heads": heads,
            "model.shape.n_kv_heads": heads,
            "model.shape.ffn_dim": self.dim * 11 // 4 // 32 * 32,
            "optimizer.lr": self.lr,
            "optimizer.weight_decay": self.decay,
            "lr_scheduler.warmup_steps": self.steps // 20,
            "lr_scheduler.decay_type": "cosine" if self.schedule == "cosine" else "linear",
            "lr_scheduler.min_lr_factor": 0.0,
            "training.steps": self.steps,
            "training.seed": self.seed,
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": ROWS,
            "training.mixed_precision_param": "float32",
            "training.z_loss_weight": self.z,
            "data.path": data / "train",
            "ema.decay": 0.99,
            "validation.path": data / "held_out",
            "validation.steps": VALIDATION_BATCHES,
            "validation.interval": self.steps // VALIDATIONS,
            "validation.weights": "both",
            "metrics.log_freq": max(1, self.steps // 50),
            "checkpoint.interval": max(1, self.steps // 4),
            "checkpoint.keep_latest_k": 1,
        }
        if self.optimizer != "adamw":
            values["optimizer.name"] = self.optimizer
        if self.schedule != "cosine":
            values["lr_scheduler.decay_ratio"] = 0.2
        if self.base_dim is not None:
            values["mup.base_dim"] = self.base_dim
        flags = ["--ema.enable", "--validation.enable", "--checkpoint.enable", "--metrics.no-enable_tensorboard"]
        return [*flags, *(text for key, value in values.items() for text in (f"--{key}", str(value)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for data, runs and results.jsonl")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--size", choices=SIZES, default="10M", help="parameters, about")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of a run")
    parser.add_argument("--rates", type=float, nargs="+", choices=RATES, default=RATES, help="of parts rates and mup")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the one process")
    parser.add_argument("--report", action="store_true", help="run nothing, and print tables of what has been run")
    parser.add_argument("--picture", type=Path, help="with --report: also draw the curves of the best runs")
    arguments = parser.parse_args()
    dim, layers = SIZES[arguments.size]
    start = Recipe("adamw", 0.0, dim=dim, layers=layers, tokens=arguments.tokens)
    results = Results(arguments.output / "results.jsonl")
    if arguments.report:
        report(results, start, arguments.picture)
        return
    data = prepare(arguments.output)
    for part in arguments.parts:
        for recipe in recipes_of(part, start, results, arguments):
            if recipe.name not in results.lines:
                results.add(recipe, *train(recipe, data, arguments.output / "runs" / recipe.name, arguments.threads))


def recipes_of(part: str, start: Recipe, results: "Results", chosen: argparse.Namespace) -> Iterator[Recipe]:
    """The runs of ``part``, each made when it is asked for: it may depend on those before."""
    if part == "mup":
        small = replace(start, tokens=start.tokens // 4)
        for width in (start.dim // 2, start.dim, start.dim * 2):
            for lr in chosen.rates:
                yield replace(small, dim=width, lr=lr)
                if width != start.dim // 2:  # the base is the same with it and without
                    yield replace(small, dim=width, lr=lr, base_dim=start.dim // 2)
        return
    for optimizer in chosen.optimizers:
        first = replace(start, optimizer=optimizer)
        if part == "rates":
            yield from (replace(first, lr=lr) for lr in chosen.rates)
            continue
        best = results.best(first)
        if best is None:
            sys.exit(f"error: part {part} needs the best rate of {optimizer}: run --parts rates with it first")
        if part == "decays":
            yield from (replace(best, decay=decay) for decay in DECAYS)
        for seed in SEEDS:
            if part == "seeds":
                yield replace(best, seed=seed)
            if part == "schedules":
                yield replace(best, seed=seed, schedule="stable")
            if part == "z":
                yield replace(best, seed=seed, z=1e-4)


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The objects in ``file``, none where there is no file; without those that a kill or a full disk has cut."""
    for text in file.read_text().splitlines() if file.is_file() else ():
        with suppress(ValueError):
            yield json.loads(text)


class Results:
    """Runs that have ended, by name, with their losses on held-out files by step."""

    def __init__(self, file: Path):
        self.file = file
        self.lines: dict[str, dict[str, Any]] = {line["name"]: line for line in lines_of(file)}

    def add(self, recipe: Recipe, curve: list[dict[str, float]], step_seconds: float, threads: int) -> None:
        line = {"name": recipe.name, **asdict(recipe), "curve": curve, "step_seconds": step_seconds, "threads": threads}
        self.lines[recipe.name] = line = {**line, "torch": torch.__version__}
        append(self.file, json.dumps(line).encode() + b"\n", after=b"\n")

    def of(self, recipe: Recipe) -> dict[str, Any] | None:
        return self.lines.get(recipe.name)

    def final(self, recipe: Recipe, key: str = "loss") -> float | None:
        line = self.of(recipe)
        return None if line is None else float(line["curve"][-1][key])

    def best(self, first: Recipe) -> Recipe | None:
        """Of seed 0, cosine and no z-loss, the rate and decay of ``first``'s optimizer with the lowest last loss."""
        tried = [replace(first, lr=lr, decay=decay) for lr in RATES for decay in DECAYS]
        losses = {recipe: loss for recipe in tried if (loss := self.final(recipe)) is not None}
        return min(losses, key=losses.__getitem__) if losses else None


def prepare(output: Path) -> Path:
    """Tokenize the files to train on and those held out, once; returns the folder."""
    folder = output / "data"
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for file in standard_library_files():
        is_held_out = blake2b("/".join(file.parts[-2:]).encode()).digest()[0] % 20 == 0
        text = file.read_text(encoding="utf-8", errors="replace")
        parts["held_out" if is_held_out else "train"].append(json.dumps({"text": text}) + "\n")
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(lines))
        options = ["--data.path", str(folder / f"{name}.jsonl"), "--prepare.output", str(folder / name)]
        subprocess.run([sys.executable, "-m", "torchtrain.prepare", *options], check=True)
    (folder / "done").touch()
    return folder


def train(recipe: Recipe, data: Path, folder: Path, threads: int) -> tuple[list[dict[str, float]], float, int]:
    """Validation losses by step, seconds of its fastest steps, and threads."""
    print(f"{time.strftime('%H:%M:%S')} {recipe.name}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torchtrain.train", *recipe.options(data, folder)]
    with (folder / "log.txt").open("a") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        code = subprocess.run(command, stderr=log, stdout=log, env=environment, check=False).returncode
    if code:
        print(f"error: the run ended with exit code {code}; {folder}/log.txt says why", file=sys.stderr)
        sys.exit(code)
    curve, seconds = [], []
    for line in lines_of(folder / "metrics.jsonl"):
        if "validation_loss" in line:
            curve.append({"step": line["step"], "loss": line["validation_loss"], "ema": line["validation_ema_loss"]})
        elif "step_seconds" in line:
            seconds.append(line["step_seconds"])
    by_step = {point["step"]: point for point in curve}
    return [by_step[step] for step in sorted(by_step)], min(seconds), threads


def report(results: Results, start: Recipe, picture: Path | None) -> None:
    """Print as Markdown what has been run, and what has not."""
    print(f"Width {start.dim}, {start.layers} layers, {start.tokens:,} tokens a run\n")
    print(row("last loss, decay 0.1", *(f"{lr:g}" for lr in RATES)) + "\n" + row(*["---"] * (len(RATES) + 1)))
    for name in OPTIMIZERS:
        print(row(name, *(shown(results.final(replace(start, optimizer=name, lr=lr))) for lr in RATES)))
    best = {name: results.best(replace(start, optimizer=name)) for name in OPTIMIZERS}
    for name, recipe in best.items():
        if recipe is not None:
            decays = ", ".join(f"{d:g}: {shown(results.final(replace(recipe, decay=d)))}" for d in DECAYS)
            print(f"\n{name} at its best rate, {recipe.lr:g}, by decay: {decays}")
    print("\n" + row("best of its grid", "seeds", "loss (range)", "averaged weights", "stable, then linear", "z-loss"))
    print(row(*["---"] * 6))
    for name, recipe in best.items():
        if recipe is None:
            print(row(name, "not run", *[""] * 4))
            continue
        done = [replace(recipe, seed=seed) for seed in SEEDS if results.of(replace(recipe, seed=seed))]
        cells = [spread(results, done), spread(results, done, "ema")]
        cells += [spread(results, [replace(r, schedule="stable") for r in done])]
        cells += [spread(results, [replace(r, z=1e-4) for r in done])]
        print(row(name, str(len(done)), *cells))
    if (adamw := best["adamw"]) is not None and best["muon"] is not None:
        target = results.final(adamw)
        assert target is not None
        for name, recipe in best.items():
            assert recipe is not None
            line = results.of(recipe)
            assert line is not None
            tokens = reaches(line["curve"], target, SEQ_LEN * ROWS)
            # Of all runs the fastest steps: other work on the machine shows in them least.
            fastest = min(other["step_seconds"] for other in results.lines.values() if is_like(other, recipe))
            when = "not reached"
            if tokens is not None:
                when = (
                    f"after {tokens:,.0f} tokens, {fastest * tokens / (SEQ_LEN * ROWS):.0f} s of {fastest:.2f} a step"
                )
            print(f"\n{name}, seed 0: AdamW's last loss, {target:.3f}: {when}")
    print("\n" + row("mup: last loss", *(f"{lr:g}" for lr in RATES)) + "\n" + row(*["---"] * (len(RATES) + 1)))
    for width in (start.dim // 2, start.dim, start.dim * 2):
        for base in (None, start.dim // 2)[: 1 if width == start.dim // 2 else 2]:
            small = replace(start, tokens=start.tokens // 4, dim=width, base_dim=base)
            losses = (shown(results.final(replace(small, lr=lr))) for lr in RATES)
            print(row(f"width {width}{'' if base is None else ', [mup]'}", *losses))
    if picture is not None:
        draw(results, {name: recipe for name, recipe in best.items() if recipe is not None}, picture)


def is_like(line: dict[str, Any], recipe: Recipe) -> bool:
    """Whether a step of ``line``'s run does what one of ``recipe`` does."""
    return all(line[key] == getattr(recipe, key) for key in ("optimizer", "dim", "layers"))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def shown(loss: float | None) -> str:
    return "not run" if loss is None else f"{loss:.3f}"


def spread(results: Results, recipes: list[Recipe], key: str = "loss") -> str:
    """Mean and range of the last losses of those that have been run."""
    losses = [loss for recipe in recipes if (loss := results.final(recipe, key)) is not None]
    return f"{mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}; {len(losses)})" if losses else "not run"


def reaches(curve: list[dict[str, float]], target: float, tokens_per_step: int) -> float | None:
    """Tokens after which ``curve``, with straight lines between its points, is down at ``target``."""
    before: dict[str, float] | None = None
    for point in curve:
        if point["loss"] <= target:
            if before is None:
                return point["step"] * tokens_per_step
            share = (before["loss"] - target) / (before["loss"] - point["loss"])
            return (before["step"] + share * (point["step"] - before["step"])) * tokens_per_step
        before = point
    return None


def draw(results: Results, best: dict[str, Recipe], file: Path) -> None:
    """Draw the mean of the seeds of each optimizer, and the band between the lowest and the highest of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for color, (name, recipe) in zip(("#0072B2", "#D55E00"), best.items(), strict=False):
        lines = [line for seed in SEEDS if (line := results.of(replace(recipe, seed=seed))) is not None]
        if not lines:
            continue
        tokens = [point["step"] * SEQ_LEN * ROWS for point in lines[0]["curve"]]
        losses = list(zip(*([point["loss"] for point in line["curve"]] for line in lines), strict=True))
        label = f"{name}, rate {recipe.lr:g}, decay {recipe.decay:g}: mean and range of {len(lines)} seeds"
        axes.fill_between(
            tokens, [min(own) for own in losses], [max(own) for own in losses], color=color, alpha=0.2, lw=0
        )
        axes.plot(tokens, [mean(own) for own in losses], color=color, linewidth=2, marker=".", label=label)
    axes.set(xlabel="Tokens", ylabel="Loss on held-out files (nats per token)")
    axes.xaxis.set_major_formatter(lambda tokens, _: format_tokens(round(tokens)))
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
