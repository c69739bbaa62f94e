"""Compare two runs: config, logged metrics, checkpoints and fingerprints."""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.checkpoint.format import VerifiedReader
from torchtrain.checkpoint.local_storage import saved_steps, step_folder
from torchtrain.checkpoint.resume_compatibility import Difference, Kind, differences
from torchtrain.checkpoint.saved_run import read_config
from torchtrain.checkpoint.states import STATES, load_tensors, parameter_shapes
from torchtrain.checkpoint.storage import CheckpointStorage, StoredCheckpoint, open_storage
from torchtrain.checkpoint.weights import checkpoint_folders, find_checkpoint
from torchtrain.config.parse import from_text, read_text, to_toml
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.order import Mixture
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.distributed.process_group import init_process_group
from torchtrain.errors import CheckpointError, ConfigError, TorchtrainError
from torchtrain.files import is_url, json_object, names_in, read_file
from torchtrain.logging import counted
from torchtrain.metrics.history import UNDOING
from torchtrain.models.model_config import build_model_config
from torchtrain.optimizers.groups import group_of
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.plugins.comparison.fingerprints import StepFingerprints, first_difference, read
from torchtrain.plugins.object_storage.outputs import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    Kind.IMPOSSIBLE: "changes the run",
    Kind.CHANGES: "changes the run",
    Kind.LAYOUT: "changes only its speed",
    Kind.HARMLESS: "changes nothing",
}
CURVES = ("loss", "grad_norm", "lr")
SMALLEST_PLOTTED = 1e-9  # relative difference; between it and 0 the axis is linear
ENOUGH_STEPS = 10  # of which equal curves mean something, if nothing else was compared
JUMP = 10  # a curve jumps if its difference grows by this factor over all earlier steps


class Finding(NamedTuple):
    """One line of the report."""

    line: str
    match: bool | None = None
    """Whether the runs match in this respect; None if the line does not decide it."""
    found: Mapping[str, Any] | None = None
    """The difference as JSON values."""
    steps: int = 0
    """Number of steps that were compared."""
    tensors: int = 0
    """Number of tensors that were compared."""
    is_bitwise: bool = False
    """Whether all that was compared is equal to the last bit."""


@dataclass
class RunFolder:
    """Config and metrics of the run in ``path``, a folder or a URL, which may be unfinished."""

    path: Path | str
    config: JobConfig
    lines: dict[int, dict[str, Any]]  # numbers by step
    start: dict[str, Any]  # the last event of this name

    @property
    def rounding(self) -> float:
        """Relative difference that rounding may cause after some steps: the square root of the dtype's epsilon."""
        return math.sqrt(torch.finfo(getattr(torch, self.config.training.mixed_precision_param)).eps)

    @property
    def stages(self) -> list[tuple[str, int]]:
        """Name and first step of each stage."""
        firsts = itertools.accumulate((table["steps"] for table in self.config.stages), initial=1)
        return [(table["name"], first) for table, first in zip(self.config.stages, firsts, strict=False)]

    def stage_of(self, step: int) -> str:
        """Name of the stage of ``step``; empty if the run has no stages."""
        return next((name for name, first in reversed(self.stages) if first <= step), "")


def open_run(location: str | Path) -> RunFolder:
    """Read a run's folder, or its newest checkpoint if ``location`` is a URL.

    Truncated lines of metrics.jsonl are skipped.

    Raises:
        ConfigError, CheckpointError: it is no folder of a run, or has no checkpoint.
        StorageError: it cannot be read.
    """
    if is_url(location):
        checkpoint = find_checkpoint(location)
        config = read_config(checkpoint)
        run = RunFolder(str(location), config, {}, {})
        metrics = read_metrics(checkpoint)
    else:
        path = Path(location)
        names = names_in(path) if path.is_dir() else []
        if "config.toml" not in names:
            raise ConfigError(f"{path} is not the folder of a run, such as outputs/debug_model: it has no config.toml")
        config_file = str(path / "config.toml")
        run = RunFolder(path, from_text(read_text(config_file), config_file, only_known=True), {}, {})
        file = path / "metrics.jsonl"
        metrics = read_file(file, most_bytes=sys.maxsize) if file.name in names else b""
    for text in metrics.splitlines():
        line = json_object(text)
        if line is None or not isinstance(line.get("step"), int):
            continue
        step = line["step"]
        if line.get("event") in UNDOING:
            run.start = line if line["event"] == "start" else run.start
            run.lines = {number: own for number, own in run.lines.items() if number <= step}
        elif "event" not in line and not any(isinstance(line.get(key), (str, list, dict)) for key in CURVES):
            run.lines.setdefault(step, {}).update(line)
    return run


def summarize(answer: Iterable[Finding]) -> dict[str, Any]:
    """Summarize findings as JSON values.

    ``match`` is None if there was nothing to compare; ``lines`` is the text; ``found`` are the differences.
    """
    findings: list[Finding] = []
    try:
        for finding in answer:
            findings.append(finding)
    except TorchtrainError as error:  # files are damaged or missing: the other parts are compared all the same
        findings.append(Finding(str(error)))
    verdicts = [finding.match for finding in findings if finding.match is not None]
    differences_found = [finding.found for finding in findings if finding.found]
    match = all(verdicts) if verdicts else None
    matching = [finding for finding in findings if finding.match and (finding.steps or finding.tensors)]
    return {
        "match": match,
        "lines": [finding.line for finding in findings],
        "found": differences_found,
        "steps": max((finding.steps for finding in matching), default=0),
        "tensors": sum(finding.tensors for finding in matching),
        "bitwise": bool(matching) and all(finding.is_bitwise for finding in matching),
    }


def verdict(report: Mapping[str, Mapping[str, Any]]) -> tuple[str, bool | None]:
    """What the answers of ``compare_runs`` or ``compare_implementations`` mean, and whether the runs match.

    None: they do not differ in what was compared, and that is too little to prove anything.
    """
    if any(answer["match"] is False for answer in report.values()):
        return "they differ", False
    compared = {title: answer for title, answer in report.items() if answer["steps"] or answer["tensors"]}
    logged, tensors = report.get("logged", {}).get("steps", 0), sum(answer["tensors"] for answer in compared.values())
    what = " and ".join([f"{logged} logged steps"] * bool(logged) + [f"{tensors} tensors"] * bool(tensors))
    if not tensors and logged < ENOUGH_STEPS:
        return (
            f"no difference in {what}, which proves nothing: compare saved steps, fingerprints "
            f"(--comparison.fingerprint_steps 1 2), or at least {ENOUGH_STEPS} logged steps (--metrics.log_freq 1)"
        ), None
    how = "bitwise" if all(answer["bitwise"] for answer in compared.values()) else "to within rounding"
    return f"match {how}: {what}", True


def compare_runs(a: RunFolder, b: RunFolder) -> dict[str, dict[str, Any]]:
    """Compare the config, logged metrics, checkpoints and fingerprints of two runs; each value is a ``summarize``."""
    questions = {"config": configs, "logged": curves, "saved": checkpoints, "computed": fingerprints}
    return {title: summarize(ask(a, b)) for title, ask in questions.items()}


def changed_options(a: RunFolder, b: RunFolder) -> list[tuple[Difference, list[str]]]:
    """Options in which the two differ, each with the stages in which they do; none if they do in all, or have none.

    Stages are compared by their number. ``steps`` is the length of a stage.
    """
    if not (a.config.stages and b.config.stages):
        return [(difference, []) for difference in differences(to_toml(a.config), to_toml(b.config))]
    found: dict[str, tuple[Difference, list[str]]] = {}
    tables = list(zip(a.config.stages, b.config.stages, strict=False))
    for (x, y), own, other in zip(tables, plan_of(a.config).stages, plan_of(b.config).stages, strict=False):
        # training.steps is the step after which the stage ends.
        ours, theirs = (
            replace(of, stages=(), job=replace(of.job, stage=""), training=replace(of.training, steps=1))
            for of in (own, other)
        )
        of_stage = differences(to_toml(ours), to_toml(theirs))
        of_stage += [Difference("steps", x["steps"], y["steps"])] * (x["steps"] != y["steps"])
        for difference in of_stage:
            found.setdefault(str(difference), (difference, []))[1].append(x["name"])
    names = [[name for name, _ in run.stages] for run in (a, b)]
    listed = [(difference, stages if len(stages) < len(tables) else []) for difference, stages in found.values()]
    return listed + [(Difference("stages", *names), [])] * (len(names[0]) != len(names[1]))


def configs(a: RunFolder, b: RunFolder) -> Iterator[Finding]:
    """Compare the options, sorted by what they change, and the hardware and versions."""
    found = changed_options(a, b)
    for kind, what in KINDS.items():
        listed = [
            f"{d.key} = {d.saved!r} in A, {d.current!r} in B{_in_stages(stages)}"
            for d, stages in found
            if d.kind is kind
        ]
        if listed:
            yield Finding(f"{what}: {'; '.join(listed)}", kind in (Kind.LAYOUT, Kind.HARMLESS))
    for key in ("ranks", "device", "device_name", "torch", "code"):
        if a.start.get(key) != b.start.get(key):
            yield Finding(f"{key}: {a.start.get(key)} in A, {b.start.get(key)} in B", True)
    if not found:
        yield Finding("options are the same", True)


def _in_stages(stages: Sequence[str]) -> str:
    return f" (stage {', '.join(map(repr, stages))})" if stages else ""


def curves(a: RunFolder, b: RunFolder) -> Iterator[Finding]:
    """Find the first step at which each curve leaves its tolerance, and whether it drifts or jumps there."""
    logged = {key: steps for key in CURVES if (steps := steps_of_both(a, b, key))}
    if not logged:
        raise TorchtrainError("no step that both have logged")
    same_run = all(option.kind in (Kind.LAYOUT, Kind.HARMLESS) for option, _ in changed_options(a, b))
    fault = "a fault" if same_run else "the config explains it, or a fault"
    for key, steps in logged.items():
        limit = 1e-12 if key == "lr" else max(a.rounding, b.rounding) / 4
        apart = {step: relative(a, b, step, key) for step in steps}
        beyond = next((step for step in steps if apart[step] > limit), None)
        if beyond is None:
            worst = max(apart.values())
            how_far = f"at most {worst:.1e} apart" if worst else "identical"
            line = f"{key}: {how_far} in {counted(len(steps), 'step')} up to step {steps[-1]}"
            yield Finding(line, True, steps=len(steps), is_bitwise=worst == 0)
            continue
        earlier = [apart[step] for step in steps if step < beyond]
        most = max(earlier, default=0.0)
        how, why = ("drifts", "growing rounding errors") if most > apart[beyond] / JUMP else ("jumps", fault)
        values = " and ".join(f"{run.lines[beyond].get(key)}" for run in (a, b))
        before = f"{most:.1e} at most in the {len(earlier)} before" if earlier else "no step before"
        stages = list(dict.fromkeys(filter(None, (run.stage_of(beyond) for run in (a, b)))))
        line = f"{key} {how}: {why}. Step {beyond}{_in_stages(stages)}: {values}, {apart[beyond]:.1e} apart; {before}"
        of_stage = {"stage": stages[0]} if stages else {}
        yield Finding(line, False, {"curve": key, "step": beyond, **of_stage, "how": how, "distance": apart[beyond]})


def steps_of_both(a: RunFolder, b: RunFolder, key: str) -> list[int]:
    """Return the steps at which both runs have logged ``key``. Some lines contain only validation results."""
    return sorted(step for step, line in a.lines.items() if key in line and key in b.lines.get(step, {}))


def relative(a: RunFolder, b: RunFolder, step: int, key: str) -> float:
    """Relative difference of the values of ``key`` that both runs have logged at ``step``."""
    x, y = a.lines[step].get(key), b.lines[step].get(key)
    if x is None or y is None:  # not finite
        return 0.0 if x is y else math.inf
    return float(abs(x - y) / max(abs(x), abs(y), 1e-300))


def common_steps(a: Sequence[int], b: Sequence[int], missing: str) -> list[int]:
    """The steps that both have, ascending; TorchtrainError with the message ``missing`` if there is none."""
    steps = sorted(set(a) & set(b))
    if not steps:
        raise TorchtrainError(missing)
    return steps


def run_storage(run: RunFolder) -> CheckpointStorage:
    """The storage of the checkpoints of ``run``."""
    if isinstance(run.path, Path):
        return open_storage(run.config.checkpoint.location(run.path))
    for folder in checkpoint_folders(run.path):
        storage = open_storage(folder)
        if storage.steps():
            break
    return storage


def checkpoints(a: RunFolder, b: RunFolder) -> Iterator[Finding]:
    """Compare checkpoints from the newest common step back to the first at which they differ."""
    storages = [run_storage(run) for run in (a, b)]
    steps = common_steps(storages[0].steps(), storages[1].steps(), "no step that both have saved")
    if not dist.is_initialized():
        init_process_group(torch.device("cpu"), timeout_seconds=60)  # DCP needs a process group, even in one process
    first: list[Finding] = []
    for step in reversed(steps):
        try:
            found = list(saved_differences(a, [storage.open(step) for storage in storages], step))
        except CheckpointError as error:
            yield Finding(f"step {step}: {error}")
            continue
        bad = {name: how for name, how, within_rounding in found if not within_rounding}
        if not bad:
            how = f"{len(found)} tensors to within rounding, the others bitwise" if found else "bitwise"
            compared = number_of_tensors(a)
            yield Finding(f"step {step}: match, {how}", True, steps=1, tensors=compared, is_bitwise=not found)
            break
        first = [Finding(f"step {step}: {len(bad)} tensors differ", False, {"step": step, "tensors": list(bad)})]
        first += [Finding(f"  {name}: {how}") for name, how in list(bad.items())[:10]]
    yield from first


def number_of_tensors(run: RunFolder) -> int:
    """The number of parameters of the model of ``run``."""
    model = replace(run.config.model, vocab_size=run.config.model.vocab_size or 1)
    return len(parameter_shapes(build_model_config(model, None, run.config.training.seq_len)))


def saved_differences(
    run: RunFolder, saved_by_both: Sequence[StoredCheckpoint], step: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield each parameter whose weights, moments or average are not bitwise equal: name, difference, within rounding.

    At the end also for the place in the data. CheckpointError: a file is damaged.
    """
    readers = [VerifiedReader(checkpoint) for checkpoint in saved_by_both]
    saved: list[Mapping[str, Any]] = [reader.read_metadata().state_dict_metadata for reader in readers]

    def both(name: str) -> list[Tensor]:
        """The tensor of both, or nothing where one lacks it."""
        if not all(name in entries for entries in saved):
            return []
        tensors = [torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for entries in saved]
        for tensor, reader in zip(tensors, readers, strict=True):
            load_tensors({name: tensor}, reader)
        return tensors

    optimizer = run.config.optimizer
    schedule = LRSchedule(run.config.lr_scheduler, optimizer.lr, run.config.training.steps)
    rate = sum(map(schedule.rate, range(1, step + 1))) / max(1, step)  # the mean, since the last one may be 0
    betas = {"exp_avg": optimizer.beta1, "exp_avg_sq": optimizer.beta2}
    model = replace(
        run.config.model, vocab_size=run.config.model.vocab_size or 1
    )  # the vocabulary size does not change parameter names
    for name in parameter_shapes(build_model_config(model, None, run.config.training.seq_len)):
        weights = [pair for state in STATES.values() if (pair := both(f"{state}.{name}"))]
        prefix = f"optimizer.{name}."  # of the optimizer's states, of which a number is the step
        states = sorted(key for key, entry in saved[0].items() if key.startswith(prefix) and len(entry.size))
        moments = {key.removeprefix(prefix): pair for key in states if (pair := both(key))}
        if not weights or weights[0][0].shape != weights[0][1].shape:
            yield name, "not in both checkpoints, or of another shape", False
            continue
        if all(torch.equal(x, y) for x, y in (*weights, *moments.values())):
            continue
        # The largest update of an optimizer like Muon, and the estimate if only weights are saved.
        update = rate * getattr(optimizer, group_of(name, weights[0][0])).lr_factor
        if moments.keys() >= betas.keys():
            mean, square = (moments[m][0].double() / (1 - beta**step) for m, beta in betas.items())
            update *= size(mean / (square.sqrt() + optimizer.eps))
        apart = max(size(x.double() - y.double()) for x, y in weights)
        parts = [size(x.double() - y.double()) / max(size(x), size(y), 1e-300) for x, y in moments.values()]
        explained = run.rounding * step * update + 1e-6 * size(weights[0][0])
        within_rounding = apart <= explained and max(parts, default=0) <= 4 * run.rounding
        of_moments = " and ".join(f"{part:.1e}" for part in parts) or "none"
        yield (
            name,
            f"{apart:.1e} apart, its mean update is {update:.1e}; moments {of_moments} of their size",
            within_rounding,
        )
    rows = both("loader.rows")
    if rows and not torch.equal(*rows):
        firsts = [tensor[0].tolist() for tensor in rows]
        yield "place in the data", f"{firsts[0]} in A, {firsts[1]} in B, for the first row", False


def size(x: Tensor) -> float:
    """Root mean square of ``x``."""
    return x.double().square().mean().sqrt().item()


def fingerprints(a: RunFolder, b: RunFolder) -> Iterator[Finding]:
    """Find the first row of a batch, or the first tensor, that differs by more than rounding explains."""
    missing = "no step of which both have fingerprints: run both with --comparison.fingerprint_steps 1 2"
    before = 0.0
    compared: dict[int, int] = {}  # by step the number of tensors
    folders = [Path(run.path) / "fingerprints" for run in (a, b)]  # a run in a bucket has none
    for step in common_steps(saved_steps(folders[0]), saved_steps(folders[1]), missing):
        try:
            ours, theirs = (read(step_folder(folder, step)) for folder in folders)
        except TorchtrainError as error:
            yield Finding(f"step {step}: {error}")
            continue
        found = []
        pairs = enumerate(zip_longest(ours.rows, theirs.rows))
        row = next((row for row, pair in pairs if not np.array_equal(*pair)), None)
        if row is not None:
            found.append(Finding(row_found(a, step, row, ours, theirs), False, {"step": step, "row": row}))
        finding, before = first_difference(ours, theirs, step, before, is_first=not compared)
        if finding is not None:
            found.append(Finding(str(finding), False, finding._asdict()))
        if found:
            yield from found
            return
        compared[step] = len(ours.tensors)
    if compared:
        how = f"agree to {before:.1e}" if before else "are the same bits wherever looked at"
        line = f"step {', '.join(map(str, compared))}: {sum(compared.values())} tensors {how}"
        yield Finding(line, True, steps=len(compared), tensors=sum(compared.values()), is_bitwise=not before)


def row_found(a: RunFolder, step: int, row: int, ours: StepFingerprints, theirs: StepFingerprints) -> str:
    """Describe the difference in ``row`` of the batch."""
    data, place = a.config.data, np.array([(step - 1) * len(ours.rows) + row])
    source = data.all[Mixture([source.weight for source in data.all]).choose(place).item()]
    text = f"step {step}, row {row} of the batch, from {source.path or source.name or 'the standard library'}:"
    if row >= min(len(ours.rows), len(theirs.rows)):
        return f"{text} only {'A' if row < len(ours.rows) else 'B'} has it"
    x, y = ours.rows[row], theirs.rows[row]
    twin = next((f" (B's is row {i} of A)" for i, other in enumerate(ours.rows) if np.array_equal(other, y)), "")
    first = int(np.argmax((x != y).any(axis=0))) if x.shape == y.shape else 0
    decode: Callable[[list[int]], str] = str
    with suppress(TorchtrainError):  # shows token ids if the tokenizer's file is missing
        decode = load_tokenizer(a.config.model.tokenizer_path).decode
    shown = [decode(z[0, first : first + 24].tolist()) for z in (x, y)]
    return f"{text} from token {first} on {shown[0]!r} in A, {shown[1]!r} in B{twin}"


def plot_losses(runs: Sequence[RunFolder], path: str) -> "Figure":
    """Plot both losses and their relative difference to the PNG file ``path``; also returns the picture.

    Where the losses are equal, both lines can be seen, and the difference is at the line "identical".
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for run, color, width in zip(runs, ("#56B4E9", "#D55E00"), (5, 1.5), strict=True):
        losses = {step: line["loss"] for step, line in run.lines.items() if line.get("loss") is not None}
        above.plot(list(losses), list(losses.values()), color=color, linewidth=width, label=str(run.path))
    borders = [
        (name, first - 1) for run in runs for name, first in run.stages if first - 1 <= max(run.lines, default=0)
    ]
    for name, step in dict.fromkeys(borders):
        above.axvline(step, color="black", linewidth=1, linestyle=":")
        place = above.get_xaxis_transform()  # the step, and a fraction of the height
        above.text(step, 0.98, f" {name}", rotation=90, va="top", ha="right", transform=place)
    a, b = runs
    steps = steps_of_both(a, b, "loss")
    apart = [min(relative(a, b, step, "loss"), 1.0) for step in steps]  # infinite where one is not finite
    below.plot(steps, apart, color="black", linewidth=1, marker=".")
    below.set_yscale("symlog", linthresh=SMALLEST_PLOTTED)
    top = max(below.get_ylim()[1], 100 * SMALLEST_PLOTTED)
    powers = range(round(math.log10(SMALLEST_PLOTTED)), math.ceil(math.log10(top)) + 1)
    below.set_yticks([0.0, *(10.0**power for power in powers)], ["identical", *(f"1e{power}" for power in powers)])
    below.set_ylim(-0.3 * SMALLEST_PLOTTED, top)
    above.set(ylabel="Loss (nats per token)")
    above.legend(frameon=False)
    below.set(xlabel="Step", ylabel="Relative difference")
    for axes in (above, below):
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return figure
