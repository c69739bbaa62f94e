"""Two runs beside each other: config, what was logged, saved, and computed."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.checkpoint.contract import Kind, differences
from torchtrain.checkpoint.history import saved_steps, step_folder
from torchtrain.checkpoint.manifest import read_manifest, verify
from torchtrain.checkpoint.states import STATES, load_tensors, parameter_shapes
from torchtrain.checkpoint.storage import VerifiedReader
from torchtrain.config.parse import from_file, to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.order import Mixture
from torchtrain.distributed.process_group import init_process_group
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.lr_schedule import LRSchedule
from torchtrain.optimizers.groups import group_of
from torchtrain.reading import names_in, read_file
from torchtrain.shape import model_shape
from torchtrain.steps.fingerprinted_step import Array, Step, read
from torchtrain.tokenizers import load_tokenizer

CURVES = ("loss", "grad_norm", "lr")
JUMP = 10  # times as far apart as ever before
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Rounding explains a distance of GAIN * (eps of the dtype + largest distance of earlier tensors), at least of LEAST.
GAIN, LEAST = 4, 1e-5


class Line(NamedTuple):
    """Of an answer. ``alike``: whether it says that the runs are; None: neither."""

    text: str
    alike: bool | None = None
    step: int | None = None
    name: str = ""
    """Of what differs: a curve, or a tensor."""


@dataclass
class Run:
    """What a run has left in ``path`` so far."""

    path: Path
    config: JobConfig
    lines: dict[int, dict[str, Any]]  # numbers by step
    start: dict[str, Any]  # the last event of this name

    @property
    def rounding(self) -> float:
        """How far rounding may carry numbers after some steps, relative to their size: the root of the dtype's eps."""
        return math.sqrt(torch.finfo(getattr(torch, self.config.training.mixed_precision_param)).eps)


def open_run(path: Path) -> Run:
    """Read a run's folder. ConfigError: it is not one; StorageError. Cut lines of metrics.jsonl are passed over."""
    names = names_in(path) if path.is_dir() else []
    if "config.toml" not in names:
        raise ConfigError(f"{path} is no folder of a run, such as outputs/debug_model: it has no config.toml")
    run = Run(path, from_file(str(path / "config.toml")), {}, {})
    for text in read_file(path / "metrics.jsonl").splitlines() if "metrics.jsonl" in names else ():
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, TypeError, KeyError):
            continue
        if line.get("event") == "start":
            run.start = line
            run.lines = {number: own for number, own in run.lines.items() if number <= step}  # later ones are left
        elif "event" not in line and not any(isinstance(line.get(key), (str, list, dict)) for key in CURVES):
            run.lines.setdefault(step, {}).update(line)
    return run


def configs(a: Run, b: Run) -> Iterator[Line]:
    """Options by what they mean for a run, and where the two ran."""
    found = differences(to_toml(a.config), to_toml(b.config))
    for kind in reversed(Kind):
        if listed := [f"{d.key} = {d.saved!r} in A, {d.current!r} in B" for d in found if d.kind is kind]:
            yield Line(f"{kind.value}: {'; '.join(listed)}", None if kind in (Kind.LAYOUT, Kind.HARMLESS) else False)
    for key in ("tokens_per_step", "ranks", "device", "device_name", "torch", "code"):
        x, y = a.start.get(key), b.start.get(key)
        if x != y:
            # The global batch may depend on the number of ranks. Older runs do not tell.
            yield Line(f"{key}: {x} in A, {y} in B", False if key == "tokens_per_step" and x and y else None)
    if not found:
        yield Line("options are the same")


def curve_of_both(a: Run, b: Run, key: str) -> tuple[list[int], Array, Array]:
    """Steps at which both have logged ``key``, its values (2, steps), and how far these are apart, relative to them."""
    # A step may have a line of validation results alone.
    steps = sorted(step for step, line in a.lines.items() if key in line and key in b.lines.get(step, {}))
    values = np.array([[run.lines[step][key] for step in steps] for run in (a, b)], dtype=float)  # None is NaN
    apart = np.abs(values[0] - values[1]) / np.maximum(np.abs(values).max(axis=0), 1e-300)
    apart[np.isnan(apart)] = np.inf
    apart[np.isnan(values).all(axis=0)] = 0
    return steps, values, apart


def curves(a: Run, b: Run) -> Iterator[Line]:
    """The first step at which a curve leaves the tolerance, and whether it drifts there or jumps."""
    for key in CURVES:
        steps, (x, y), apart = curve_of_both(a, b, key)
        limit = 1e-12 if key == "lr" else max(a.rounding, b.rounding) / 4
        beyond = np.flatnonzero(apart > limit)
        if len(beyond):
            i = int(beyond[0])
            before = apart[:i].max(initial=0)
            jumps = apart[i] >= JUMP * before
            how = "jumps (a fault, unless the config explains it)" if jumps else "drifts (rounding that grows)"
            text = f"{key} {how} at step {steps[i]}: {x[i]} and {y[i]}, {apart[i]:.1e} apart"
            yield Line(f"{text}; {before:.1e} at most in the {i} steps before", False, steps[i], key)
        elif steps:
            yield Line(f"{key}: {apart.max():.1e} apart at most, at {len(steps)} steps up to {steps[-1]}", True)


def draw(a: Run, b: Run, path: str) -> None:
    """Both losses, and how far they are apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7))
    above, below = figure.subplots(2, 1, sharex=True)
    for run in (a, b):
        above.plot(list(run.lines), [line.get("loss") for line in run.lines.values()], label=str(run.path))
    steps, _, apart = curve_of_both(a, b, "loss")
    below.semilogy(steps, np.maximum(apart, 1e-9), marker=".")
    above.set(ylabel="loss")
    above.legend()
    below.set(xlabel="step", ylabel="apart, relative (1e-9: bitwise)")
    figure.savefig(path, dpi=120)


def by_step(a: Run, b: Run, kind: str, compare: Callable[[Run, int, Path, Path], Iterable[Line]]) -> Iterator[Line]:
    """``compare`` for the folders ``kind/step-N`` that both runs have, up to the first step at which they differ."""
    folders = [run.path / kind for run in (a, b)]
    for step in sorted(set.intersection(*(set(saved_steps(folder)) for folder in folders))):
        try:
            found = list(compare(a, step, *(step_folder(folder, step) for folder in folders)))
        except TorchtrainError as error:  # as where a file is damaged
            found = [Line(f"step {step}: {error}")]
        yield from found
        if any(line.alike is False for line in found):
            return


def checkpoints(run: Run, step: int, *folders: Path) -> Iterator[Line]:
    """Weights, moments and place in the data that differ by more than rounding explains, in the order of the model."""
    if not dist.is_initialized():
        init_process_group(torch.device("cpu"), timeout_seconds=60)  # DCP wants one, if only of this process
    for folder in folders:
        verify(folder, read_manifest(folder).files)
    readers = [VerifiedReader(folder) for folder in folders]
    rounded, differ = 0, False
    for name, (moved, relative) in saved_tensors(run, step).items():
        x, y = (saved_tensor(reader, name) for reader in readers)
        if torch.equal(x, y):
            continue
        apart = size_of(x.double() - y) if x.shape == y.shape else math.inf
        size = size_of(x)
        if apart <= run.rounding * moved + relative * size:
            rounded += 1
            continue
        differ = True
        beside = f"its updates so far move it by {moved:.1e} at most" if moved else f"its size is {size:.1e}"
        yield Line(f"step {step}, {name}: {apart:.1e} apart where {beside}", False, step, name)
    if not differ:
        yield Line(f"step {step}: alike, {rounded} tensors to rounding and the others bitwise", True)


def saved_tensors(run: Run, step: int) -> dict[str, tuple[float, float]]:
    """Of all that a checkpoint may have, in the order of the model, what two runs may be apart by rounding.

    A part of what an element's updates have ``moved`` it at most, the sum of all rates so far, and of its size.
    """
    config = run.config
    schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps)
    rates = sum(map(schedule.rate, range(1, step + 1)))
    model = replace(config.model, vocab_size=config.model.vocab_size or 1)  # which changes no name
    found: dict[str, tuple[float, float]] = {}
    for name, parameter in parameter_shapes(model_shape(model, None, config.training.seq_len)).items():
        moved = rates * getattr(config.optimizer, group_of(name, parameter)).lr_factor
        found |= {f"{state}.{name}": (moved, 1e-6) for state in STATES.values()}
        found |= {f"optimizer.{name}.{moment}": (0.0, 4 * run.rounding) for moment in MOMENTS}
    return {**found, "loader.rows": (0.0, 0.0)}


def saved_tensor(reader: VerifiedReader, name: str) -> Tensor:
    """The whole tensor; an empty one where the checkpoint does not have it."""
    saved: Any = reader.read_metadata().state_dict_metadata.get(name)
    if saved is None:
        return torch.empty(0)
    return load_tensors({name: torch.empty(saved.size, dtype=saved.properties.dtype)}, reader)[name]


def size_of(x: Tensor) -> float:
    """Root mean square."""
    return x.double().square().mean().sqrt().item()


def fingerprints(run: Run, step: int, *folders: Path) -> Iterator[Line]:
    """The first row of the batch that differs, as text with its source; and the first tensor."""
    ours, theirs = map(read, folders)
    if ours.rows.shape == theirs.rows.shape and (ours.rows != theirs.rows).any():
        row, _, first = map(int, np.argwhere(ours.rows != theirs.rows)[0])
        sources, place = run.config.data.all, np.array([(step - 1) * len(ours.rows) + row])
        source = sources[Mixture([source.weight for source in sources]).choose(place).item()]
        decode: Callable[[list[int]], str] = str
        with suppress(TorchtrainError):  # where its file is not here, ids are shown
            decode = load_tokenizer(run.config.model.tokenizer_path).decode
        x, y = (decode(found.rows[row, 0, first : first + 24].tolist()) for found in (ours, theirs))
        text = f"row {row} of the batch, from {source.path or source.name or 'the standard library'}"
        yield Line(f"step {step}, {text}: from token {first} on {x!r} in A, {y!r} in B", False, step, f"row {row}")
    yield first_difference(ours, theirs, step)


def first_difference(a: Step, b: Step, step: int) -> Line:
    """The first tensor that differs by more than rounding explains; or that none does."""
    if a.shapes != b.shapes:
        return Line(f"step {step}: the models, or their batches, are of other shapes", False, step)
    eps = np.maximum(a.numbers[:, 0], b.numbers[:, 0])
    # Gradients and updates of parameters were computed in the model's dtype, whatever they are kept in.
    eps[[key.endswith((" gradient", " update")) for key in a.shapes]] = eps.max()
    sizes = dict(zip(a.shapes, a.figures()[:, 2], strict=True))
    before = 0.0
    for key, own_eps, apart in zip(a.shapes, eps, distances(a, b), strict=True):
        allowed = max(LEAST, GAIN * (own_eps + before))
        if step > 1 and f"{key} update" in sizes:
            # Parameters drift apart: Adam may turn an update around where the gradient is next to zero.
            allowed += math.sqrt(eps.max()) * (step - 1) * sizes[f"{key} update"] / max(sizes[key], 1e-150)
        if not apart <= allowed:
            what = f"{apart:.1e} apart" if np.isfinite(apart) else "parts are missing or not finite"
            text = f"{what} where all before it agrees to {before:.1e} (rounding allows {allowed:.1e})"
            return Line(f"step {step}, {key}: {text}", False, step, key)
        before = max(before, apart)
    taken = np.count_nonzero(a.numbers[:, 2])
    return Line(f"step {step}: {taken} tensors agree to {before:.1e}", True)


def distances(a: Step, b: Step) -> Array:
    """How far apart each tensor is, relative to its size: the most that any of the figures and the samples say.

    Of an update by Adam, where a gradient next to zero may change its sign, what most of the samples say. What is not
    finite is alike where it is the same in both.
    """
    x, y = a.figures(), b.figures()
    alike = ~np.isfinite(x) & ((x == y) | (np.isnan(x) & np.isnan(y)))
    x, y = np.where(alike, 0.0, x), np.where(alike, 0.0, y)
    with np.errstate(all="ignore"):
        apart, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
        figures = apart[:, :3] / np.maximum(size[:, [0, 2, 2]], 1e-150)
        of_samples = np.sqrt(np.mean(size[:, 3:] ** 2, axis=1)) + 1e-150
        usual = np.maximum(figures.max(axis=1), np.sqrt(np.mean(apart[:, 3:] ** 2, axis=1)) / of_samples)
        of_updates = np.maximum(figures[:, 2], np.median(apart[:, 3:], axis=1) / of_samples)
    found = np.where([key.endswith(" update") for key in a.shapes], of_updates, usual)
    return np.where(np.isnan(found), np.inf, found)
