"""Two runs beside each other: config, what was logged, saved, and computed."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.checkpoint.contract import Kind, differences
from torchtrain.checkpoint.hf import parameter_shapes
from torchtrain.checkpoint.history import saved_steps, step_folder
from torchtrain.checkpoint.manifest import problem_in, read_manifest
from torchtrain.checkpoint.states import STATES, load_tensors
from torchtrain.checkpoint.storage import VerifiedReader
from torchtrain.config.parse import from_file, to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.order import Mixture
from torchtrain.distributed.mesh import resolve_degrees
from torchtrain.distributed.process_group import init_process_group
from torchtrain.errors import CheckpointError, ConfigError, TorchtrainError
from torchtrain.fingerprints.judge import Step, differing_rows, read, walk
from torchtrain.lr_schedule import LRSchedule
from torchtrain.optimizers.groups import group_of
from torchtrain.parallelisms.limits.layout import resolve_global_batch_size
from torchtrain.reading import names_in, read_file
from torchtrain.shape import model_shape
from torchtrain.tokenizers import load_tokenizer

KINDS = {
    Kind.IMPOSSIBLE: "changes the model",
    Kind.CHANGES: "changes the run",
    Kind.LAYOUT: "changes its speed alone",
    Kind.HARMLESS: "changes nothing",
}
CURVES = ("loss", "grad_norm", "lr")
JUMP = 10  # times as far apart as ever before


@dataclass
class Section:
    """The answer to one question. ``alike``: None where there is nothing to compare."""

    title: str
    alike: bool | None = None
    lines: list[str] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)

    def say(self, line: str, alike: bool | None = None, **found: Any) -> None:
        """Add a line. ``alike``: whether it says so, if it says either. ``found``: a difference, for programs."""
        self.lines.append(line)
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}  # for JSON
        self.found += [finite] if found else []
        if alike is not None:
            self.alike = alike and self.alike is not False


@dataclass
class RunFolder:
    """What a run has left in ``path`` so far."""

    path: Path
    config: JobConfig
    lines: dict[int, dict[str, Any]]  # numbers by step
    start: dict[str, Any]  # the last event of this name

    @property
    def rounding(self) -> float:
        """How far rounding may carry numbers after some steps, relative to their size: the root of the dtype's eps."""
        return math.sqrt(torch.finfo(getattr(torch, self.config.training.mixed_precision_param)).eps)


def open_run(path: Path) -> RunFolder:
    """ConfigError where ``path`` is no run's folder, StorageError. Lines that are cut short are passed over."""
    names = names_in(path) if path.is_dir() else []
    if "config.toml" not in names:
        raise ConfigError(f"{path} is no folder of a run, such as outputs/debug_model: it has no config.toml")
    start: dict[str, Any] = {}
    lines: dict[int, dict[str, Any]] = {}
    for text in read_file(path / "metrics.jsonl").splitlines() if "metrics.jsonl" in names else ():
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, TypeError, KeyError):
            continue
        if any(isinstance(line.get(key), (str, list, dict)) for key in CURVES):
            continue
        if line.get("event") == "start":
            start = line
        elif "event" not in line:
            lines.setdefault(step, {}).update(line)
    return RunFolder(path, from_file(str(path / "config.toml")), lines, start)


def compare_runs(folder_a: Path, folder_b: Path) -> list[Section]:
    """The answers in order. Where files are damaged the answer says so, and the other questions are asked."""
    a, b = open_run(folder_a), open_run(folder_b)
    questions = {"config": configs, "logged": curves, "saved": checkpoints, "computed": fingerprints}
    report = []
    for title, ask in questions.items():
        report.append(section := Section(title))
        try:
            ask(a, b, section)
        except TorchtrainError as error:
            section.say(str(error))
    return report


def configs(a: RunFolder, b: RunFolder, section: Section) -> None:
    """Options by what they mean for a run, and where the two ran."""
    known = all(isinstance(run.start.get("ranks"), int) for run in (a, b))
    found = differences(*(to_toml(with_batch_size(run) if known else run.config) for run in (a, b)))
    section.alike = True
    for kind, what in KINDS.items():
        listed = [f"{d.key} = {d.saved!r} in A, {d.current!r} in B" for d in found if d.kind is kind]
        if listed:
            section.say(f"{what}: {'; '.join(listed)}", kind in (Kind.LAYOUT, Kind.HARMLESS))
    for key in ("ranks", "device", "device_name", "torch", "code"):
        if a.start.get(key) != b.start.get(key):
            section.say(f"{key}: {a.start.get(key)} in A, {b.start.get(key)} in B")
    if not section.lines:
        section.say("the same")


def with_batch_size(run: RunFolder) -> JobConfig:
    """The config of ``run`` with its ``training.global_batch_size``: -1 is another number on other ranks."""
    degrees = resolve_degrees(run.config.parallelism, run.start["ranks"])
    training = replace(run.config.training, global_batch_size=resolve_global_batch_size(run.config, degrees))
    return replace(run.config, training=training)


def curves(a: RunFolder, b: RunFolder, section: Section) -> None:
    """The first step at which a curve leaves the tolerance, and whether it drifts there or jumps."""
    steps = sorted(a.lines.keys() & b.lines.keys())
    if not steps:
        return section.say("no step that both have logged")
    tolerance = max(a.rounding, b.rounding) / 4
    for key in CURVES:
        limit = 1e-12 if key == "lr" else tolerance
        apart = {step: relative(a.lines[step].get(key), b.lines[step].get(key)) for step in steps}
        beyond = next((step for step in steps if apart[step] > limit), None)
        if beyond is None:
            worst = max(apart.values())
            section.say(f"{key}: {worst:.1e} apart at most, at {len(steps)} steps up to {steps[-1]}", True)
            continue
        earlier = [apart[step] for step in steps if step < beyond]
        most = max(earlier, default=0.0)
        how = "drifts: rounding that grows" if most > apart[beyond] / JUMP else "jumps: a fault"
        values = " and ".join(f"{run.lines[beyond].get(key)}" for run in (a, b))
        before = f"{most:.1e} at most in the {len(earlier)} before" if earlier else "no step before"
        line = f"{key} {how}. Step {beyond}: {values}, {apart[beyond]:.1e} apart; {before}"
        section.say(line, False, curve=key, step=beyond, how=how.partition(":")[0], distance=apart[beyond])
    return None


def relative(x: float | None, y: float | None) -> float:
    if x is None or y is None:  # not finite
        return 0.0 if x is y else math.inf
    return abs(x - y) / max(abs(x), abs(y), 1e-300)


def in_both(a: RunFolder, b: RunFolder, kind: str) -> dict[int, list[Path]]:
    """By step, in order, the ``step-N`` folders in the folder ``kind`` of both runs."""
    folders = [run.path / kind for run in (a, b)]
    steps = sorted(set(saved_steps(folders[0])) & set(saved_steps(folders[1])))
    return {step: [step_folder(folder, step) for folder in folders] for step in steps}


def checkpoints(a: RunFolder, b: RunFolder, section: Section) -> None:
    """From the newest step that both have saved back to the first at which the checkpoints differ."""
    steps = in_both(a, b, "checkpoint")
    if not steps:
        return section.say("no step that both have saved")
    if not dist.is_initialized():
        init_process_group(torch.device("cpu"), timeout_seconds=60)  # DCP wants one, if only of this process
    first: tuple[int, list[str]] | None = None
    for step, folders in reversed(steps.items()):
        try:
            found = list(saved_differences(a, folders, step))
        except CheckpointError as error:
            section.say(f"step {step}: {error}")
            continue
        bad = [line for line, alike in found if not alike]
        if not bad:
            how = f"{len(found)} tensors to rounding, the others bitwise" if found else "bitwise"
            section.say(f"step {step}: alike, {how}", True)
            break
        first = step, bad
    if first is not None:
        step, bad = first
        names = [line.partition(":")[0] for line in bad]
        section.say(f"step {step}: {len(bad)} tensors are not alike", False, step=step, tensors=names)
        section.lines += [f"  {line}" for line in bad[:10]]
    return None


def saved_differences(run: RunFolder, folders: Sequence[Path], step: int) -> Iterator[tuple[str, bool]]:
    """For each parameter, moments and average included, that is not bitwise the same: how, and if rounding explains it.

    The last may be the place in the data. CheckpointError: a file is damaged.
    """
    readers = []
    for folder in folders:
        if problem := problem_in(folder, read_manifest(folder).files):
            raise CheckpointError(problem)
        readers.append(VerifiedReader(folder))
    saved: list[dict[str, Any]] = [dict(reader.read_metadata().state_dict_metadata) for reader in readers]

    def both(name: str) -> list[Tensor]:
        """The tensor of both, or nothing where one lacks it."""
        tensors: list[Tensor] = []
        for entries, reader, folder in zip(saved, readers, folders, strict=True):
            if name not in entries:
                return []
            tensors.append(torch.empty(entries[name].size, dtype=entries[name].properties.dtype))
            load_tensors({name: tensors[-1]}, reader, folder, None)
        return tensors

    optimizer = run.config.optimizer
    rate = LRSchedule(run.config.lr_scheduler, optimizer.lr, run.config.training.steps).rate(step)
    betas = {"exp_avg": optimizer.beta1, "exp_avg_sq": optimizer.beta2}
    model = replace(run.config.model, vocab_size=run.config.model.vocab_size or 1)  # which changes no name
    for name in parameter_shapes(model_shape(model, None, run.config.training.seq_len)):
        weights = [pair for state in STATES.values() if (pair := both(f"{state}.{name}"))]
        moments = {m: pair for m in (*betas, "momentum_buffer") if (pair := both(f"optimizer.{name}.{m}"))}
        if not weights:
            yield f"{name}: not in both checkpoints", False
            continue
        ours, theirs = weights[0]
        if ours.shape != theirs.shape:
            yield f"{name}: shape {tuple(ours.shape)} in A, {tuple(theirs.shape)} in B", False
            continue
        if all(torch.equal(x, y) for x, y in (*weights, *moments.values())):
            continue
        # Of Muon, and of weights alone, the size that its updates have at most.
        update = rate * getattr(optimizer, group_of(name, ours)).lr_factor
        if moments.keys() >= betas.keys():
            mean, square = (moments[m][0].double() / (1 - beta**step) for m, beta in betas.items())
            update *= size(mean / (square.sqrt() + optimizer.eps))
        apart = max(size(x.double() - y.double()) for x, y in weights)
        parts = [size(x.double() - y.double()) / max(size(x), size(y), 1e-300) for x, y in moments.values()]
        alike = apart <= run.rounding * step * update + 1e-6 * size(ours) and max(parts, default=0) <= 4 * run.rounding
        line = f"{name}: {apart:.1e} apart, where its update is {update:.1e}"
        yield f"{line}; moments {' and '.join(f'{part:.1e}' for part in parts) or 'none'} of their size", alike
    rows = both("loader.rows")
    if rows and not torch.equal(*rows):
        yield f"place in the data: {rows[0][0].tolist()} in A, {rows[1][0].tolist()} in B, for the first row", False


def size(x: Tensor) -> float:
    """Root mean square."""
    return x.double().square().mean().sqrt().item()


def fingerprints(a: RunFolder, b: RunFolder, section: Section) -> None:
    """The first row of a batch, or the first tensor, that differs by more than rounding explains."""
    steps = in_both(a, b, "fingerprints")
    if not steps:
        return section.say("no step of which both have fingerprints: run both with --debug.fingerprint_steps 1 2")
    before, count = 0.0, 0
    for step, folders in steps.items():
        ours, theirs = map(read, folders)
        for problem in (*ours.problems, *theirs.problems):
            section.say(f"step {step}: {problem}")
        for fault in (*ours.faults, *theirs.faults):
            section.say(f"step {step}: {fault}", False)
        for row in itertools.islice(differing_rows(ours, theirs), 1):
            section.say(row_found(a, step, row, ours, theirs), False, step=step, row=row)
        found, before = walk(ours, theirs, step, before)
        count += len(ours.tensors)
        if found is not None:
            section.say(str(found), False, **found._asdict())
        if section.alike is False:
            return None
    how = f"agree to {before:.1e}" if before else "are the same bits wherever looked at"
    section.say(f"steps {', '.join(map(str, steps))}: {count} tensors {how}", True)
    return None


def row_found(a: RunFolder, step: int, row: int, ours: Step, theirs: Step) -> str:
    """What the two have as ``row`` of the batch, as text."""
    x, y = ours.rows.get(row), theirs.rows.get(row)
    data = a.config.data
    chosen = Mixture([source.weight for source in data.all]).choose(np.array([(step - 1) * len(ours.rows) + row]))
    source = data.all[int(chosen[0])]
    text = f"step {step}, row {row} of the batch, from {source.path or source.name or 'the standard library'}:"
    if x is None or y is None:
        return f"{text} only {'B' if x is None else 'A'} has it"
    twin = next((number for number, other in ours.rows.items() if np.array_equal(other, y)), None)
    first = int(np.argmax((x != y).any(axis=0))) if x.shape == y.shape else 0
    decode = load_tokenizer(a.config.model.tokenizer_path).decode
    shown = [decode(z[0, first : first + 24].tolist()) for z in (x, y)]
    same = f" (B's is row {twin} of A)" if twin is not None else ""
    return f"{text} from token {first} on {shown[0]!r} in A, {shown[1]!r} in B{same}"


def draw(folder_a: Path, folder_b: Path, path: str) -> None:
    """Both losses, and how far they are apart."""
    from matplotlib.figure import Figure

    runs = [open_run(folder) for folder in (folder_a, folder_b)]
    figure = Figure(figsize=(10, 7))
    above, below = figure.subplots(2, 1, sharex=True)
    for run in runs:
        above.plot(list(run.lines), [line.get("loss") for line in run.lines.values()], label=str(run.path))
    steps = sorted(runs[0].lines.keys() & runs[1].lines.keys())
    apart = [relative(*(run.lines[step].get("loss") for run in runs)) for step in steps]
    below.semilogy(steps, [max(distance, 1e-9) for distance in apart], marker=".")
    above.set(ylabel="loss")
    above.legend()
    below.set(xlabel="step", ylabel="apart, relative (1e-9: bitwise)")
    figure.savefig(path, dpi=120)
