"""Parts of a session on rented GPUs: commands with a time limit, what they show, and a page that is always up to date.

``first_hour.py`` and ``eight_gpus.py`` list the parts. Each part writes its output to ``NAME.txt``, and after it the
page is written again, so that a session that is cut short is a result, too. A part that has passed is not run again by
a second start with the same folder, unless it is named.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = os.environ.get("PYTHON") or sys.executable
MAX_BYTES = 16 << 20  # of a file of results
STEPS = 15
GRACE_SECONDS = 10  # for a command to end after the time limit
KEPT = "parts.json"
# The data and the tokenizer of the repository. Options that a config on clusters sets are set back.
LOCAL_DATA = [
    *("--data.name=", "--data.subset=", "--model.tokenizer_path=", "--lr_scheduler.warmup_steps=2"),
    *("--checkpoint.no-enable", "--metrics.no-enable_tensorboard", "--report.no-enable"),
]
TINY = [
    *("--model.shape.dim=64", "--model.shape.n_layers=2", "--model.shape.n_heads=4", "--model.shape.n_kv_heads=2"),
    *("--model.shape.ffn_dim=128", "--training.seq_len=64", "--training.local_batch_size=1", "--job.device=cpu"),
]


class Claim(NamedTuple):
    """A line of the page: what was to be shown, whether it holds, and by which figures."""

    text: str
    holds: bool
    figures: str = ""


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
    """The cell of the table, from the output of the part."""
    claims: Callable[[str], Sequence[Claim]] = lambda _: ()
    """What the part shows, from its output."""
    result: str = field(default="not run", init=False)
    seconds: float = field(default=0.0, init=False)
    cell: str = field(default="", init=False)
    shown: list[Claim] = field(default_factory=list, init=False)

    def run(self, out: Path) -> None:
        """Run the commands; their output is in ``out``."""
        log, start = out / f"{self.name}.txt", time.monotonic()
        self.result, self.cell, self.shown = "pass", "", []
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
            self.shown = list(self.claims(output))
        except Exception as error:  # the results of a part that failed may be of any form
            self.cell = f"no figures: {error!r}"
            self.result = "FAIL (no figures)" if self.result == "pass" else self.result
        for file_path in out.iterdir():
            if file_path.is_file() and file_path.stat().st_size > MAX_BYTES:
                shorten(file_path)

    def state(self) -> dict[str, Any]:
        """The result, as JSON values."""
        return {name: getattr(self, name) for name in ("result", "seconds", "cell", "shown")}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the result of an earlier start."""
        self.result, self.seconds, self.cell = state["result"], state["seconds"], state["cell"]
        self.shown = [Claim(*claim) for claim in state["shown"]]


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


def summary(title: str, parts: Sequence[Part]) -> str:
    """The page: what holds, and the result of each part."""
    lines = [f"# {title}", ""]
    if any(part.claims is not Part.claims for part in parts):
        lines += ["| what was to be shown | holds | figures |", "| --- | --- | --- |"]
        for part in parts:
            lines += [f"| {text} | {'yes' if holds else 'NO'} | {figures} |" for text, holds, figures in part.shown]
            if not part.shown:
                lines.append(f"| {part.name} | not known: {part.result} | |")
        lines.append("")
    lines += ["| part | result | seconds | figures |", "| --- | --- | ---: | --- |"]
    lines += [f"| {part.name} | {part.result} | {part.seconds:.0f} | {part.cell} |" for part in parts]
    return "\n".join(lines) + "\n"


def run_parts(
    description: str, title: str, folder: str, parts: Callable[[bool, Path, Path], list[Part]], argv: list[str] | None
) -> int:
    """Run the parts that have not passed yet; returns 0 if all of them pass and what they claim holds.

    Args:
        description: text of ``--help``.
        title: first line of the page.
        folder: name of the folder of results in ``outputs``, if the environment variable OUT names none.
        parts: returns them, from whether it is a dry run, the folder of the runs and that of the results.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small models, on a CPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts, also if they passed")
    arguments = parser.parse_args(argv)
    out = Path(os.environ.get("OUT") or ROOT / "outputs" / folder).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.environ.get("WORK")) as work:
        known = parts(arguments.dry_run, Path(work), out)
        names = [part.name for part in known]
        if unknown := set(arguments.only) - set(names):
            parser.error(f"--only {' '.join(sorted(unknown))}: the parts are {', '.join(names)}")
        earlier = {}
        if (out / KEPT).is_file():
            earlier = json.loads((out / KEPT).read_text(encoding="utf-8"))
        if earlier.get("dry_run") != arguments.dry_run:
            earlier = {}
        for part in known:
            if state := earlier.get("parts", {}).get(part.name):
                part.restore(state)
        for part in known:
            part.limit_seconds *= 10 if arguments.dry_run else 1  # it may be a busy machine
            if part.name in arguments.only or (not arguments.only and part.result != "pass"):
                part.run(out)
                print(f"{part.name}: {part.result} in {part.seconds:.0f} s  {part.cell}", flush=True)
                states = {other.name: other.state() for other in known if other.result != "not run"}
                (out / KEPT).write_text(json.dumps({"dry_run": arguments.dry_run, "parts": states}), encoding="utf-8")
            (out / "summary.md").write_text(summary(title, known), encoding="utf-8")
    good = all(part.result in ("pass", "not run") and all(claim.holds for claim in part.shown) for part in known)
    return 0 if good else 1


def module(name: str, *options: str) -> list[str]:
    """``python -m NAME`` with options."""
    return [PYTHON, "-m", name, *options]


def launch(ranks: int, *command: str) -> list[str]:
    """A script, or with ``--module`` a module, on ``ranks`` ranks of this machine."""
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    return module("torchtrain.launch", f"--nproc-per-node={ranks}", *place, *command)


def train(ranks: int, *options: str) -> list[str]:
    """A training run on ``ranks`` ranks."""
    name = "torchtrain.train"
    return launch(ranks, "--module", name, *options) if ranks > 1 else module(name, *options)


def beside_the_planner(
    name: str,
    limit_seconds: int,
    variants: dict[str, list[str]],
    dry_run: bool,
    work: Path,
    calibration: Path,
    traced: dict[str, list[str]] | None = None,
    *,
    ranks: int = 1,
    claims: Callable[[dict[str, dict[str, Any]]], Sequence[Claim]] | None = None,
) -> Part:
    """A part that trains with the options of each variant, and estimates the speed and memory of the same options.

    The rows are added to the file ``calibration``, under the part's name.

    Args:
        traced: options of training alone.
        claims: what the rows of ``step_of`` show, by variant.
    """
    common = [*LOCAL_DATA, f"--training.global_batch_size={ranks}", f"--training.steps={STEPS}", "--metrics.log_freq=5"]
    tiny = [*TINY, "--compile.no-enable"] if dry_run else ["--model.vocab_size=128256"]
    variants = {key: [options[0], *common, *tiny, *options[1:]] for key, options in variants.items()}
    commands, estimates = [], []
    for key, options in variants.items():
        outputs = f"--job.dump_folder={work / key}"
        commands.append(train(ranks, *options, *(traced or {}).get(key, []), outputs))
        planned = module("torchtrain.estimate", *options, f"--estimate.world_size={ranks}", "--estimate.json")
        estimates.append(f"{shlex.join(planned)} > {shlex.quote(f'{work / key}.json')}")
    # First, so that no time limit cuts them off; at the same time, because they need no GPU.
    commands.insert(0, ["sh", "-c", " & ".join([*estimates, "wait"])])

    def rows() -> dict[str, dict[str, Any]]:
        return {key: {"name": key, "options": options, **step_of(work / key)} for key, options in variants.items()}

    def figures(_: str) -> str:
        found = list(rows().values())
        known = json.loads(calibration.read_text(encoding="utf-8")) if calibration.is_file() else {}
        calibration.write_text(json.dumps(known | {name: found}), encoding="utf-8")
        return "; ".join(f"{row['name']}: {row['error'] if 'error' in row else describe(row)}" for row in found)

    part = Part(name, limit_seconds, commands, independent=True, figures=figures)
    if claims is not None:
        part.claims = lambda _: claims(rows())
    return part


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of steps in the metrics of a run; none if it has none."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return []
    return [line for line in map(json.loads, text.splitlines()) if "tokens_per_second" in line]


def step_of(folder: Path) -> dict[str, Any]:
    """What a run measured in its last interval, and what was planned for it."""
    lines = lines_of(folder)
    if not lines:
        return {"error": "no step"}
    last = lines[-1]
    row = {name: last.get(name) for name in ("tokens_per_second", "step_seconds", "mfu", "loss", "data_wait_fraction")}
    for memory in ("memory_gib", "memory_reserved_gib"):
        row[memory] = max(line.get(memory, 0.0) for line in lines)  # a CPU has nothing reserved
    planned = folder.with_suffix(".json")
    if planned.is_file() and planned.stat().st_size:
        row["planned"] = json.loads(planned.read_text(encoding="utf-8"))
    return row


def describe(row: dict[str, Any]) -> str:
    """Speed and memory of a row of ``step_of``."""
    mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
    text = f"{row['tokens_per_second']:,.0f} tokens/s{mfu}, {row['memory_gib']:.2f} GiB"
    text += f", {row['memory_reserved_gib']:.2f} reserved" if row["memory_reserved_gib"] else ""
    if "planned" in row:
        seconds, memory = row["planned"]["step_seconds"], most_memory(row["planned"])
        tokens = row["tokens_per_second"] * row["step_seconds"] / seconds
        text += f" (planned {tokens:,.0f}, {memory['peak_active_gib']:.2f}, {memory['peak_reserved_gib']:.2f})"
    return text


def most_memory(planned: dict[str, Any]) -> dict[str, Any]:
    """The rank of an estimate that needs the most memory."""
    return max(planned["ranks"], key=lambda rank: float(rank["peak_reserved_gib"]))
