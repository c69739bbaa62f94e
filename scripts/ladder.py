"""Train a ladder of small models, fit a scaling law to their losses, and predict those of the next size.

    python scripts/ladder.py --output outputs/ladder --sizes 64x2 96x3 128x4 192x6 --next 256x8 \\
      --multiples 5 10 20 --rates 2e-3 4e-3 8e-3 --mup --job.config_file train_configs/debug_model.toml

A size is WIDTHxLAYERS. Each size is trained on each multiple of its number of parameters in tokens (embedding and
output layer do not count), with each learning rate. These are ordinary runs, each in a folder of its own below
--output, so an interrupted ladder continues where it was, and sizes, multiples or rates can be added later. Options
with a dot are those of torchtrain.train, for all runs. head_dim, the width of the feed-forward network relative to that
of the model, and the number of query heads for a key/value head are those of the config. What is fitted is the
validation loss after the last step, so the config needs held-out data. With four sizes or more, the last one is also
predicted from the others, and compared. docs/ladder.md explains the method and the outputs: a table, ladder.json and
ladder.png. It needs SciPy: pip install -e '.[ladder]' -c constraints.txt.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from torchtrain.cli import command, interrupted_by_signals, run_and_exit
from torchtrain.config.parse import parse
from torchtrain.config.schema import JobConfig
from torchtrain.config.tokens import format_tokens, tokens_to_steps
from torchtrain.errors import ConfigError, TorchtrainError
from torchtrain.files import atomic_write
from torchtrain.metrics.history import read_run
from torchtrain.optional_packages import install_command

ROOT = Path(__file__).resolve().parent.parent
LEVEL = 0.9  # of all intervals
DRAWS = 200  # of the bootstrap
HUBER_DELTA = 1e-3  # Hoffmann et al. 2022, of log loss
MIN_SIZES = 3
SPARE = 2  # losses that a fit needs beyond the number of its constants
OWN_OPTIONS = {
    "optimizer.lr": "--rates",
    "training.seed": "--seeds",
    **dict.fromkeys(
        ("training.steps", "training.tokens", "lr_scheduler.total_", "lr_scheduler.warmup_"), "--multiples"
    ),
    **dict.fromkeys(("model.shape.dim", "model.shape.n_layers"), "--sizes"),
    "validation.interval": "no interval: each run validates once, after its last step, and --validation.steps",
    "mup.": "--mup",
    "job.dump_folder": "--output",
}
Array = np.ndarray[Any, np.dtype[np.float64]]


# ---- The runs


@dataclass(frozen=True)
class Size:
    """A model of the ladder."""

    name: str
    parameters: int
    non_embedding: int
    flops_per_token: int
    shape: dict[str, int] = field(compare=False)


@dataclass(frozen=True)
class Rung:
    """A size and the number of tokens that it is trained on, a multiple of its parameters without the embeddings."""

    size: Size
    multiple: float
    steps: int
    tokens: int

    @property
    def flops(self) -> float:
        return float(self.size.flops_per_token) * self.tokens

    @property
    def name(self) -> str:
        return f"{self.size.name}_{self.multiple:g}x"


class Ladder:
    """All runs, from the command line; ``options`` are those of torchtrain.train."""

    def __init__(self, arguments: argparse.Namespace, options: list[str]) -> None:
        import torch

        for option, instead in OWN_OPTIONS.items():
            if any(word.startswith(f"--{option}") for word in options):
                raise ConfigError(f"the ladder sets the options {option}... of each run; give {instead} instead")
        self.arguments, self.options = arguments, options
        self.folder: Path = arguments.output
        self.rates = sorted(set(arguments.rates))
        self.seeds = sorted(set(arguments.seeds))
        self.ranks: int = arguments.ranks or max(1, torch.cuda.device_count())
        self.config = parse(options, "scripts/ladder.py")
        if not self.config.validates:
            raise ConfigError(
                "the ladder fits validation losses, and the config has no held-out data: set data.held_out, such as "
                "--data.held_out 0.02, or [validation]"
            )
        self.tokens_per_step = self._tokens_per_step()
        if not (min(self.rates) > 0 and min(arguments.multiples) > 0 and self.ranks > 0):
            raise ConfigError("--rates, --multiples and --ranks must be above 0")
        self.base = arguments.sizes[0]
        sizes = sorted({self._size(name) for name in arguments.sizes}, key=lambda size: size.non_embedding)
        self.sizes = sizes
        self.multiples = sorted(set(arguments.multiples))
        if arguments.sweep not in (None, *self.multiples):
            raise ConfigError(f"--sweep {arguments.sweep:g} must be one of --multiples")
        self.rungs = [self.rung(size, multiple) for size in sizes for multiple in self.multiples]
        self.next = [self.rung(self._size(arguments.next), each) for each in self.multiples] if arguments.next else []
        choose_form(len(sizes), len(self.multiples))

    def _model(self, config: JobConfig) -> Any:
        from torchtrain.datasets.tokenizers import load_tokenizer
        from torchtrain.models.model_config import build_model_config

        tokenizer = load_tokenizer(config.model.tokenizer_path)
        return build_model_config(config.model, tokenizer, config.training.seq_len, config.mup)

    def _tokens_per_step(self) -> int:
        from torchtrain.parallelisms.resolve import resolve_layout

        resolved, _ = resolve_layout(self.config, self._model(self.config), self.ranks)
        return resolved.training.global_batch_size * resolved.training.seq_len

    def _size(self, name: str) -> Size:
        from torchtrain.models.spec import count_parameters, flops_per_token, matrix_shapes

        match = re.fullmatch(r"(\d+)x(\d+)", name)
        if match is None or "0" in match.groups():
            raise ConfigError(f"size {name!r} must be WIDTHxLAYERS, such as 256x8")
        width, layers = int(match[1]), int(match[2])
        base = self._model(self.config)
        queries = base.n_heads // base.n_kv_heads
        unit = base.head_size * queries
        if width % unit:
            raise ConfigError(
                f"size {name}: the width must be a multiple of head_dim x query heads per key/value head = "
                f"{base.head_size} x {queries} = {unit}; try {max(unit, width // unit * unit)}, or set "
                "--model.shape.head_dim and --model.shape.n_kv_heads for all sizes"
            )
        shape = {
            "dim": width,
            "n_layers": layers,
            "n_heads": width // base.head_size,
            "n_kv_heads": width // unit,
            "ffn_dim": max(1, round(width * base.ffn_dim / base.dim / 8)) * 8,
            "head_dim": base.head_size,
        }
        model = self._model(parse([*self.options, *as_options({f"model.shape.{key}": shape[key] for key in shape})]))
        parameters = count_parameters(model)
        embedding = math.prod(matrix_shapes(model)["output.weight"]) * (1 if model.tied_embeddings else 2)
        flops = flops_per_token(model, self.config.training.seq_len)
        return Size(f"{width}x{layers}", parameters, parameters - embedding, flops, shape)

    def rung(self, size: Size, multiple: float) -> Rung:
        steps = tokens_to_steps(math.ceil(multiple * size.non_embedding), self.tokens_per_step)
        return Rung(size, multiple, steps, steps * self.tokens_per_step)

    def run_folder(self, rung: Rung, lr: float, seed: int) -> Path:
        return self.folder / "runs" / f"{rung.name}_lr{lr:g}_seed{seed}"

    def run_options(self, rung: Rung, lr: float, seed: int) -> list[str]:
        # A warm-up of one token per parameter (Porian et al. 2024), at most a tenth of the run.
        warmup = max(1, min(rung.size.non_embedding // self.tokens_per_step, rung.steps // 10))
        values: dict[str, Any] = {
            "job.dump_folder": self.run_folder(rung, lr, seed),
            **{f"model.shape.{key}": value for key, value in rung.size.shape.items()},
            "optimizer.lr": lr,
            "training.seed": seed,
            "training.steps": rung.steps,
            "lr_scheduler.total_steps": rung.steps,
            "lr_scheduler.warmup_steps": warmup,
            "validation.interval": rung.steps,
        }
        if self.arguments.mup:
            width, layers = self.base.split("x")
            values |= {"mup.base_dim": width, "mup.base_layers": layers}
        return [*self.options, *as_options(values)]

    def loss(self, rung: Rung, lr: float, seed: int) -> float | None:
        """The validation loss of a run after its last step, infinite if it diverged; None if it has not ended."""
        folder = self.run_folder(rung, lr, seed)
        if not (folder / "metrics.jsonl").is_file():
            return None
        with suppress(TorchtrainError):  # it has no step yet
            last = read_run(folder, warn=lambda _: None).lines[-1]
            if last["step"] == rung.steps and "validation_loss" in last:
                loss = last["validation_loss"]
                return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf
        return None

    def losses(self, rung: Rung) -> dict[float, float | None]:
        """By learning rate the mean loss of the seeds; None if a run has not ended."""
        found: dict[float, float | None] = {}
        for lr in self.rates_of(rung):
            own = [self.loss(rung, lr, seed) for seed in self.seeds]
            found[lr] = None if None in own else statistics.mean(loss for loss in own if loss is not None)
        return found

    def rates_of(self, rung: Rung) -> list[float]:
        """The learning rates of a rung; none if they depend on runs that have not ended."""
        sweep = self.arguments.sweep
        if sweep is None or rung.multiple == sweep:
            return self.rates
        losses = self.losses(self.rung(rung.size, sweep))
        known = {lr: loss for lr, loss in losses.items() if loss is not None}
        return [float(f"{best_rate(known)[0]:.2g}")] if len(known) == len(losses) else []

    def runs(self, rungs: Sequence[Rung]) -> list[tuple[Rung, float, int]]:
        """The runs of ``rungs``, those with the least compute first."""
        by_compute = sorted(rungs, key=lambda rung: rung.flops)
        return [(rung, lr, seed) for rung in by_compute for lr in self.rates_of(rung) for seed in self.seeds]

    def check_folder(self) -> None:
        """Raise ConfigError if the runs in the folder have other options."""
        file = self.folder / "options.json"
        config_file = self.config.job.config_file
        text = Path(config_file).read_text(encoding="utf-8") if Path(config_file).is_file() else config_file
        given = {
            "options": self.options,
            "config file": text,
            "tokens per step": self.tokens_per_step,
            "base of muP": self.base if self.arguments.mup else "",
        }
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as stream:
                stream.write(json.dumps(given, indent=1).encode())
        before = json.loads(file.read_bytes())
        changed = [key for key, value in given.items() if before.get(key) != value]
        if changed:
            raise ConfigError(
                f"the runs in {self.folder} were trained with other values of: {', '.join(changed)} "
                f"({file}); give another --output"
            )

    def train(self) -> None:
        """Train the runs that have not ended."""
        first = [rung for rung in self.rungs if rung.multiple == self.arguments.sweep]
        self._train(first)
        self._train([rung for rung in self.rungs if rung not in first])

    def _train(self, rungs: Sequence[Rung]) -> None:
        todo = [run for run in self.runs(rungs) if self.loss(*run) is None]
        for number, (rung, lr, seed) in enumerate(todo, 1):
            folder = self.run_folder(rung, lr, seed)
            folder.mkdir(parents=True, exist_ok=True)
            print(f"run {number} of {len(todo)}: {folder}", flush=True)
            environment = {"PYTHON": sys.executable, **os.environ, "NGPU": str(self.ranks)}
            with (folder / "log.txt").open("a") as log:
                arguments = [str(ROOT / "run_llama_train.sh"), *self.run_options(rung, lr, seed)]
                process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)
                try:
                    code = process.wait()
                except BaseException:
                    process.terminate()  # it saves a checkpoint
                    process.wait()
                    raise
            if code:
                raise TorchtrainError(
                    f"the run ended with exit code {code}; {folder}/log.txt says why. If its loss diverged, lower "
                    "--rates"
                )
            if self.loss(rung, lr, seed) is None:
                raise TorchtrainError("the run was stopped before its end; start the ladder again to continue it")

    def speed(self, size: Size) -> float | None:
        """FLOP/s: measured in the runs of the size that is nearest to ``size``, or --flops_per_second, or None."""
        for other in sorted(self.sizes, key=lambda other: abs(math.log(other.non_embedding / size.non_embedding))):
            rates = []
            for run in self.runs([rung for rung in self.rungs if rung.size == other]):
                if self.loss(*run) is not None:
                    lines = read_run(self.run_folder(*run)).lines
                    rates += [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
            if rates:
                return float(statistics.median(rates)) * other.flops_per_token * self.ranks
        assumed: float | None = self.arguments.flops_per_second
        return assumed

    def plan(self) -> str:
        rows = [("size", "parameters", "with embeddings", "tokens", "steps", "FLOPs", "runs", "done", "time of all")]
        total = flops = 0.0
        for rung in self.rungs:
            is_swept = self.arguments.sweep in (None, rung.multiple)
            number = len(self.rates if is_swept else [0]) * len(self.seeds)
            speed = self.speed(rung.size)
            seconds = None if speed is None else number * rung.flops / speed
            total += seconds or 0.0
            flops += number * rung.flops
            rows.append(
                (
                    rung.size.name,
                    format_tokens(rung.size.non_embedding),
                    format_tokens(rung.size.parameters),
                    f"{format_tokens(rung.tokens)} ({rung.multiple:g}x)",
                    f"{rung.steps:,}",
                    f"{rung.flops:.2e}",
                    str(number),
                    str(sum(self.loss(*run) is not None for run in self.runs([rung]))),
                    "" if seconds is None else f"{seconds / 60:,.1f} min",
                )
            )
        time = (
            f", {total / 60:,.1f} min on {self.ranks} rank{'s' * (self.ranks > 1)}, without starts and validation"
            if total
            else ""
        )
        hint = "" if total else "; give --flops_per_second, or train one run, for the time"
        return f"{table(rows)}\nAll: {flops:.2e} FLOPs{time}{hint}"


def as_options(values: dict[str, Any]) -> list[str]:
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]


# ---- The law of the loss


@dataclass(frozen=True)
class Form:
    """A form of the law: a constant and power laws, in log space log(exp(e) + exp(a - alpha x) + ...)."""

    text: str
    terms: tuple[str, ...]
    exponents: int
    """As many as terms, or one for all."""

    @property
    def constants(self) -> int:
        return 1 + len(self.terms) + self.exponents

    def log_terms(self, constants: Array, x: Array) -> Array:
        """Logs of the terms, of shape (1 + terms, n).

        ``constants``: e, a coefficient per term, the exponents. ``x``: logs of N, D or C, of shape (terms, n).
        """
        k = len(self.terms)
        exponents = np.broadcast_to(constants[1 + k :], k)[:, None]
        return np.vstack((np.full(x.shape[1], constants[0]), constants[1 : 1 + k, None] - exponents * x))

    def log_loss(self, constants: Array, x: Array) -> Array:
        result: Array = np.logaddexp.reduce(self.log_terms(constants, x))
        return result

    def jacobian(self, constants: Array, x: Array) -> Array:
        """Derivatives of ``log_loss`` by the constants, of shape (n, constants)."""
        logs = self.log_terms(constants, x)
        shares = np.exp(logs - np.logaddexp.reduce(logs))
        by_exponents = -shares[1:] * x
        return np.vstack((shares, by_exponents if self.exponents > 1 else by_exponents.sum(axis=0))).T


FORMS = (
    Form("E + A/N^alpha + B/D^beta", ("N", "D"), 2),  # Hoffmann et al. 2022
    Form("E + A/N^alpha + B/D^alpha", ("N", "D"), 1),
    Form("E + A/C^alpha", ("C",), 1),
)


def choose_form(sizes: int, multiples: int) -> Form:
    """The first of ``FORMS`` whose constants these many losses determine, with some to spare for the noise.

    Raises:
        ConfigError: there are too few.
    """
    for form in FORMS:
        # With one multiple, tokens are proportional to parameters: their terms cannot be distinguished.
        is_known = multiples > 1 or form.terms == ("C",)
        if sizes >= MIN_SIZES and is_known and sizes * multiples >= form.constants + SPARE:
            return form
    raise ConfigError(
        f"{sizes} sizes x {multiples} token multiples are too few rungs to fit a law to: it needs at least {MIN_SIZES} "
        f"sizes, and {FORMS[-1].constants + SPARE} losses of one multiple or {FORMS[1].constants + SPARE} of several; "
        "add --sizes or --multiples"
    )


@dataclass(frozen=True)
class Point:
    """What a rung was measured to have: the loss at its best learning rate."""

    rung: Rung
    loss: float
    lr: float
    bracketed: bool
    """Whether the best rate is between two that were tried."""
    losses: dict[float, float] = field(compare=False)


class Law:
    """A form of the law, fitted to ``points``.

    The constants minimize the Huber loss of residuals of log loss (Hoffmann et al. 2022, approach 3). Intervals are of
    a parametric bootstrap: the losses of the fit with noise are fitted again. The level of the noise is itself drawn,
    from the distribution that the residuals give it (scaled inverse chi-squared): with few losses, intervals that take
    it as known are too narrow. Resampling the runs, as Besiroglu et al. 2024 do with 240, leaves too few sizes here.
    """

    def __init__(self, form: Form, rungs: Sequence[Rung], losses: Sequence[float], draws: int = DRAWS) -> None:
        self.form = form
        y = np.log(np.asarray(losses, dtype=float))
        logs = self._logs(rungs)
        self.center = logs.mean(axis=1, keepdims=True)  # so that coefficients and exponents are hardly correlated
        x = logs - self.center
        self.constants = min((self._fit(x, y, start) for start in self._starts(y)), key=lambda fit: fit[0])[1]
        fitted = form.log_loss(self.constants, x)
        freedom = len(y) - form.constants
        self.residuals: Array = y - fitted
        self.noise = math.sqrt(float((self.residuals**2).sum()) / freedom)
        """Standard deviation of log loss, so relative to the loss."""
        random = np.random.default_rng(0)
        noises = self.noise * np.sqrt(freedom / random.chisquare(freedom, (draws, 1)))
        noise = noises * random.standard_normal((draws, len(y) + 1))
        self._draws = [self._fit(x, fitted + each, self.constants)[1] for each in noise[:, :-1]]
        self._new_noise = noise[:, -1:]  # of the loss that is predicted

    def _logs(self, rungs: Sequence[Rung]) -> Array:
        values = {"N": lambda r: r.size.non_embedding, "D": lambda r: r.tokens, "C": lambda r: r.flops}
        return np.log([[float(values[term](rung)) for rung in rungs] for term in self.form.terms])

    def _starts(self, y: Array) -> list[Array]:
        """Where the search begins: several shares of the smallest loss that are irreducible, and several exponents."""
        k, shares, exponents = len(self.form.terms), (0.2, 0.5, 0.8), (0.2, 0.6)
        return [
            np.array(
                [y.min() + math.log(share), *[y.mean() + math.log((1 - share) / k)] * k, *[one] * self.form.exponents]
            )
            for share in shares
            for one in exponents
        ]

    def _fit(self, x: Array, y: Array, start: Array) -> tuple[float, Array]:
        """Cost and constants of the best fit that is found from ``start``."""
        from scipy.optimize import least_squares

        form, k = self.form, len(self.form.terms)
        # Above: no loss is below E. Below: a term that small has no effect.
        low = np.array([y.min() - 7, *[y.min() - 10] * k, *[0.01] * form.exponents])
        high = np.array([y.max(), *[y.max() + 2] * k, *[3.0] * form.exponents])
        found = least_squares(
            lambda constants: form.log_loss(constants, x) - y,
            np.clip(start, low + 1e-6, high - 1e-6),
            lambda constants: form.jacobian(constants, x),
            bounds=(low, high),
            loss="huber",
            f_scale=HUBER_DELTA,
            max_nfev=200,
        )
        return float(found.cost), found.x

    def predict(self, rungs: Sequence[Rung]) -> tuple[Array, Array]:
        """Losses of ``rungs``, and the interval of what would be measured, of shape (2, n)."""
        x = self._logs(rungs) - self.center
        draws = np.array([self.form.log_loss(constants, x) for constants in self._draws]) + self._new_noise
        return np.exp(self.form.log_loss(self.constants, x)), np.exp(interval(draws))

    def named_constants(self) -> dict[str, tuple[float, float, float]]:
        """By name the constants of the law for N, D and C in ones, with their intervals."""
        k = len(self.form.terms)
        names = ["E", *"AB"[:k], *("alpha", "beta")[: self.form.exponents]]
        rows = np.array([self.constants, *self._draws])
        exponents = np.broadcast_to(rows[:, 1 + k :], (len(rows), k))
        rows = np.concatenate(
            (np.exp(rows[:, :1]), np.exp(rows[:, 1 : 1 + k] + exponents * self.center.T), rows[:, 1 + k :]), axis=1
        )
        low, high = interval(rows[1:])
        return {name: (float(rows[0, i]), float(low[i]), float(high[i])) for i, name in enumerate(names)}


def interval(draws: Array) -> Array:
    """The middle ``LEVEL`` of the draws, along the first axis."""
    return np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)


def limits(points: Sequence[Point], rung: Rung) -> tuple[float, float] | None:
    """Bounds of the loss of ``rung`` for a sum of a constant and of power laws, whatever the constants, without noise.

    At the same multiple, log loss is a decreasing and convex function of log N: it is below that of the size before,
    and above the line through the two sizes before.
    """
    at = [p for p in points if p.rung.multiple == rung.multiple and p.rung.size.non_embedding < rung.size.non_embedding]
    if len(at) < 2:
        return None
    (x0, y0), (x1, y1) = ((math.log(p.rung.size.non_embedding), math.log(p.loss)) for p in at[-2:])
    line = y1 + (y1 - y0) / (x1 - x0) * (math.log(rung.size.non_embedding) - x1)
    return math.exp(line), at[-1].loss


# ---- The best learning rate


def best_rate(losses: dict[float, float]) -> tuple[float, float, bool]:
    """The best learning rate, its loss, and whether it is between two rates that were tried.

    They are those of the minimum of the parabola, in the log of the rate, through the lowest loss and its neighbors.
    """
    rates = sorted(losses)
    at = min(range(len(rates)), key=lambda i: losses[rates[i]])
    near = rates[max(0, at - 1) : at + 2]
    if at == 0 or len(near) < 3 or not all(math.isfinite(losses[rate]) for rate in near):
        return rates[at], losses[rates[at]], False
    log_rate, loss = vertex(np.log(near), np.array([[losses[rate] for rate in near]]))
    return float(np.exp(log_rate[0])), float(loss[0]), True


def vertex(x: Array, y: Array) -> tuple[Array, Array]:
    """Where the parabola through three points is lowest within them, and its value; ``y`` has the shape (n, 3)."""
    c2, c1, c0 = np.polyfit(x - x[1], y.T, 2)
    convex = c2 > 0
    ends = np.where(y[:, 0] < y[:, 2], x[0], x[2]) - x[1]
    lowest = np.clip(np.where(convex, -c1 / np.where(convex, 2 * c2, 1.0), ends), x[0] - x[1], x[2] - x[1])
    return x[1] + lowest, c0 + c1 * lowest + c2 * lowest**2


def rate_interval(point: Point, noise: float) -> Array | None:
    """The interval of the best rate of ``point`` with losses that have this relative ``noise``; None: not bracketed."""
    if not point.bracketed:
        return None
    rates = sorted(point.losses)
    at = min(range(len(rates)), key=lambda i: point.losses[rates[i]])
    losses = np.array([point.losses[rate] for rate in rates[at - 1 : at + 2]])
    noisy = losses * (1 + noise * np.random.default_rng(0).standard_normal((DRAWS, 3)))
    return np.exp(interval(vertex(np.log(rates[at - 1 : at + 2]), noisy)[0]))


class RateLaw:
    """The best learning rate as a power law, by least squares of its log, with prediction intervals of Student's t.

    Without muP it is a power law in parameters and tokens (Li et al. 2025), with muP in tokens alone: muP makes it
    independent of the size, not of the length of the run (Bjorck et al. 2024). Where there are too few best rates for
    that, it is their mean.
    """

    def __init__(self, points: Sequence[Point], mup: bool) -> None:
        points = [point for point in points if point.bracketed]
        if len(points) < MIN_SIZES:
            raise ConfigError(
                f"{len(points)} rungs have a best learning rate between two that were tried, and {MIN_SIZES} are "
                "needed; add --rates on the side of the best ones"
            )
        multiples = len({point.rung.multiple for point in points})
        sizes = len({point.rung.size for point in points})
        self.terms: tuple[str, ...] = ("D",) if mup else ("N", "D") if multiples > 1 and sizes > 1 else ("N",)
        if len(points) < 1 + len(self.terms) + SPARE:
            self.terms = ()
        x, y = self._matrix([point.rung for point in points]), np.log([point.lr for point in points])
        self.constants = np.linalg.lstsq(x, y, rcond=None)[0]
        self.freedom = len(y) - x.shape[1]
        self.noise = math.sqrt(float(((y - x @ self.constants) ** 2).sum()) / self.freedom)
        self._covariance = np.linalg.pinv(x.T @ x)

    def _matrix(self, rungs: Sequence[Rung]) -> Array:
        columns = {"N": [float(r.size.non_embedding) for r in rungs], "D": [float(r.tokens) for r in rungs]}
        return np.stack([np.ones(len(rungs)), *(np.log(columns[term]) for term in self.terms)], axis=1)

    @property
    def text(self) -> str:
        powers = (f"{name}^{power:.3f}" for name, power in zip(self.terms, self.constants[1:], strict=True))
        return " ".join((f"{math.exp(self.constants[0]):.3g}", *powers))

    def predict(self, rungs: Sequence[Rung]) -> tuple[Array, Array]:
        """Best rates of ``rungs``, and the interval of what would be measured, of shape (2, n)."""
        from scipy.stats import t

        x = self._matrix(rungs)
        width = t.ppf((1 + LEVEL) / 2, self.freedom) * self.noise
        width = width * np.sqrt(1 + np.einsum("ni,ij,nj->n", x, self._covariance, x))
        return np.exp(x @ self.constants), np.exp(x @ self.constants + np.stack((-width, width)))


# ---- The report


def measure(ladder: Ladder) -> tuple[list[Point], float | None]:
    """The points, and the relative standard deviation of a loss between seeds; None for one seed."""
    points, spreads = [], []
    for rung in ladder.rungs:
        losses = {lr: math.inf if loss is None else loss for lr, loss in ladder.losses(rung).items()}
        for lr, loss in losses.items():
            if len(ladder.seeds) > 1 and math.isfinite(loss):
                spreads.append(statistics.variance(math.log(ladder.loss(rung, lr, s) or 1) for s in ladder.seeds))
        lr, loss, bracketed = best_rate(losses)
        if not math.isfinite(loss):
            raise TorchtrainError(f"no run of {rung.name} has a finite validation loss; lower --rates")
        points.append(Point(rung, loss, lr, bracketed, losses))
    return points, math.sqrt(statistics.mean(spreads)) if spreads else None


@dataclass(frozen=True)
class Prediction:
    """Of a rung: the predicted loss and best rate, with intervals, and what was measured, if it was."""

    size: str
    parameters: int
    tokens: int
    flops: float
    loss: float
    loss_interval: tuple[float, float]
    loss_limits: tuple[float, float] | None
    lr: float | None
    lr_interval: tuple[float, float] | None
    measured_loss: float | None = None
    measured_lr: float | None = None
    """None, too, if the best rate is not between two that were tried."""

    @property
    def miss(self) -> float | None:
        """What was measured relative to the prediction, minus one."""
        return None if self.measured_loss is None else self.measured_loss / self.loss - 1


def predict(
    law: Law, rates: RateLaw | None, points: Sequence[Point], rungs: Sequence[Rung], measured: Sequence[Point] = ()
) -> list[Prediction]:
    """Predictions for ``rungs`` by laws that were fitted to ``points``."""
    losses, ranges = law.predict(rungs)
    best, best_ranges = rates.predict(rungs) if rates is not None else (None, None)
    found = {point.rung: point for point in measured}
    return [
        Prediction(
            rung.size.name,
            rung.size.non_embedding,
            rung.tokens,
            rung.flops,
            float(losses[i]),
            (float(ranges[0, i]), float(ranges[1, i])),
            limits(points, rung),
            None if best is None else float(best[i]),
            None if best_ranges is None else (float(best_ranges[0, i]), float(best_ranges[1, i])),
            found[rung].loss if rung in found else None,
            found[rung].lr if rung in found and found[rung].bracketed else None,
        )
        for i, rung in enumerate(rungs)
    ]


def rate_law(points: Sequence[Point], mup: bool) -> tuple[RateLaw | None, str]:
    try:
        law = RateLaw(points, mup)
    except ConfigError as error:
        return None, f"No law of the best rate: {error}"
    return law, f"Best rate = {law.text}, with a standard deviation of {math.expm1(law.noise):.0%}"


def report(ladder: Ladder) -> dict[str, Any]:
    """Print the tables, and return what ladder.json has; also draws the picture."""
    mup: bool = ladder.arguments.mup
    points, seed_noise = measure(ladder)
    law = Law(choose_form(len(ladder.sizes), len(ladder.multiples)), ladder.rungs, [point.loss for point in points])
    rates, rates_text = rate_law(points, mup)
    rows = [("size", "parameters", "tokens", "FLOPs", "rate", "loss", "loss of the fit")]
    fitted, _ = law.predict(ladder.rungs)
    for point, fit in zip(points, fitted, strict=True):
        own = rate_interval(point, law.noise)
        edge = ", at the edge" if len(point.losses) > 1 else ""
        lr = f"{point.lr:.2g}{edge}" if own is None else f"{point.lr:.2g} ({span((own[0], own[1]))})"
        rung = point.rung
        cells = (f"{format_tokens(rung.tokens)} ({rung.multiple:g}x)", f"{rung.flops:.2e}", lr)
        rows.append((rung.size.name, format_tokens(rung.size.non_embedding), *cells, f"{point.loss:.4f}", f"{fit:.4f}"))
    print(f"\nMeasured, with intervals of {LEVEL:.0%}\n\n{table(rows)}")
    if seed_noise is not None:
        print(f"\nStandard deviation of a loss between {len(ladder.seeds)} seeds: {seed_noise:.2%}")
    if any(not point.bracketed and len(point.losses) > 1 for point in points):
        print("\nWhere the best rate is at the edge, the loss of a better one may be lower: add --rates on that side.")
    held_out: list[Prediction] = []
    held_law = None
    last = [point for point in points if point.rung.size == ladder.sizes[-1]]
    others = [point for point in points if point.rung.size != ladder.sizes[-1]]
    try:
        form = choose_form(len(ladder.sizes) - 1, len(ladder.multiples))
    except ConfigError:
        print(f"\n{ladder.sizes[-1].name} is not predicted from the others: they are too few rungs for a fit.")
    else:
        held_law = Law(form, [point.rung for point in others], [point.loss for point in others])
        held_rates, held_text = rate_law(others, mup)
        held_out = predict(held_law, held_rates, others, [point.rung for point in last], last)
        print(f"\n{ladder.sizes[-1].name}, predicted from the others\n\n{describe(held_law)}\n{held_text}\n")
        print(table(prediction_rows(held_out)))
    print(f"\nAll sizes\n\n{describe(law)}\n{rates_text}")
    following = predict(law, rates, points, ladder.next) if ladder.next else []
    if following:
        print(f"\n{ladder.next[0].size.name}, predicted\n\n{table(prediction_rows(following))}")
    draw(ladder, points, held_law or law, law, [*held_out, *following])
    return {
        "form": law.form.text,
        "constants": law.named_constants(),
        "noise": law.noise,
        "seed_noise": seed_noise,
        "rate": None if rates is None else rates.text,
        "points": [
            {**asdict(point.rung), "flops": point.rung.flops, "loss": point.loss, "lr": point.lr}
            | {
                "bracketed": point.bracketed,
                "losses": {f"{lr:g}": loss if math.isfinite(loss) else None for lr, loss in point.losses.items()},
            }
            for point in points
        ],
        "held_out": [{**asdict(prediction), "miss": prediction.miss} for prediction in held_out],
        "next": [asdict(prediction) for prediction in following],
    }


def describe(law: Law) -> str:
    constants = ", ".join(
        f"{name} = {value:.4g} ({low:.3g} to {high:.3g})" for name, (value, low, high) in law.named_constants().items()
    )
    simpler = "" if law.form == FORMS[0] else f" (a simpler form: there are too few rungs for {FORMS[0].text})"
    return f"Loss = {law.form.text}{simpler}: {constants}; the residuals have a standard deviation of {law.noise:.2%}"


def prediction_rows(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    head = ("tokens", "FLOPs", "predicted loss", "limits", "predicted rate", "measured loss", "miss", "measured rate")
    rows = [head]
    for one in predictions:
        low, high = one.loss_interval
        bounds = "" if one.loss_limits is None else f"{one.loss_limits[0]:.3f} to {one.loss_limits[1]:.3f}"
        rate = "none" if one.lr is None or one.lr_interval is None else f"{one.lr:.2g} ({span(one.lr_interval)})"
        measured, miss = one.measured_loss, one.miss
        rows.append(
            (
                format_tokens(one.tokens),
                f"{one.flops:.2e}",
                f"{one.loss:.4f} ({low:.3f} to {high:.3f})",
                bounds,
                rate,
                "" if measured is None else f"{measured:.4f}",
                "" if miss is None else f"{miss:+.2%}",
                "" if one.measured_lr is None else f"{one.measured_lr:.2g}",
            )
        )
    used = [i for i in range(len(head)) if any(row[i] for row in rows[1:])]
    return [tuple(row[i] for i in used) for row in rows]


def span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2g} to {ends[1]:.2g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as Markdown, aligned; the first one is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]])


def draw(ladder: Ladder, points: Sequence[Point], law: Law, next_law: Law, predictions: Sequence[Prediction]) -> None:
    """Loss against compute with the fit, its intervals and the predictions, and best rates against tokens."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    from torchtrain.plugins.report.curves import COLORS, GRAY

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    loss_axes, rate_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    sizes = [*ladder.sizes, *({rung.size for rung in ladder.next})]
    for number, size in enumerate(sizes):
        color = COLORS[number % len(COLORS)]
        own = [point for point in points if point.rung.size == size]
        mine = [each for each in predictions if each.size == size.name]
        rungs = [rung for rung in (*ladder.rungs, *ladder.next) if rung.size == size]
        low, high = rungs[0].multiple / 1.3, rungs[-1].multiple * 1.3
        curve = [ladder.rung(size, float(multiple)) for multiple in np.geomspace(low, high, 30)]
        losses, band = (law if own else next_law).predict(curve)
        compute = [rung.flops for rung in curve]
        loss_axes.fill_between(compute, *band, color=color, alpha=0.15, lw=0)
        loss_axes.plot(compute, losses, color=color, lw=1.2)
        name = f"{size.name}: {format_tokens(size.non_embedding)} parameters"
        if own:
            loss_axes.plot([p.rung.flops for p in own], [p.loss for p in own], "o", color=color, ms=5, label=name)
        for axes, x, y, ends in (
            (loss_axes, [e.flops for e in mine], [e.loss for e in mine], [e.loss_interval for e in mine]),
            (rate_axes, [e.tokens * 1.06 for e in mine], [e.lr for e in mine], [e.lr_interval for e in mine]),
        ):
            if not mine or (mine[0].lr is None and axes is rate_axes):
                continue
            bars = np.abs(np.array(ends, dtype=float) - np.array(y, dtype=float)[:, None]).T
            label = f"{size.name}: predicted" if own else f"{name}, predicted"
            axes.errorbar(x, y, yerr=bars, fmt="D", mfc="white", color=color, ms=6, capsize=3, label=label)
        for point in own:
            if point.bracketed:
                ends_of_rate = rate_interval(point, law.noise)
                rate_axes.plot([point.rung.tokens] * 2, ends_of_rate, color=color, lw=1)
                rate_axes.plot([point.rung.tokens], [point.lr], "o", color=color, ms=5)
    loss_axes.set(xscale="log", xlabel="Compute (FLOPs)", ylabel="Validation loss (nats per token)")
    rate_axes.set(xscale="log", yscale="log", xlabel="Tokens", ylabel="Best learning rate")
    rate_axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: format_tokens(round(tokens))))
    rate_axes.xaxis.set_minor_formatter(NullFormatter())
    loss_axes.legend(frameon=False, fontsize=8)
    if not any(point.bracketed for point in points):
        rate_axes.text(0.5, 0.5, "no best rate between two", ha="center", transform=rate_axes.transAxes, color=GRAY)
    for axes in (loss_axes, rate_axes):
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ladder.folder / "ladder.png", dpi=110)


@command
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/ladder.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs, ladder.json and ladder.png")
    parser.add_argument("--sizes", nargs="+", required=True, metavar="WxL", help="width and layers of each size")
    parser.add_argument("--next", metavar="WxL", help="a larger size, which is predicted and not trained")
    multiples = "tokens of the runs of a size, for each of its parameters without embeddings; default: 5 10 20"
    parser.add_argument("--multiples", nargs="+", type=float, default=(5.0, 10.0, 20.0), metavar="X", help=multiples)
    parser.add_argument("--rates", nargs="+", type=float, required=True, metavar="LR", help="peak learning rates")
    sweep = "try all --rates only at this multiple; at the others, train with the best rate of the size at this one"
    parser.add_argument("--sweep", type=float, metavar="X", help=sweep)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,), metavar="S", help="whose losses are averaged")
    parser.add_argument("--mup", action="store_true", help="muP, with the first of --sizes as the base")
    parser.add_argument("--ranks", type=int, help="of each run; default: the number of GPUs, or 1")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the runs, and train none")
    speed = "of all ranks, for the time that --dry-run prints while no run has ended"
    parser.add_argument("--flops_per_second", "--flops-per-second", type=float, metavar="F", help=speed)
    arguments, options = parser.parse_known_args(argv)
    try:
        import scipy  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the ladder needs the package scipy: {install_command('ladder')} ({error})") from None
    arguments.output = arguments.output.absolute()
    os.chdir(ROOT)  # relative paths in options start there, as those of run_llama_train.sh do
    ladder = Ladder(arguments, options)
    print(ladder.plan(), flush=True)
    if arguments.dry_run:
        return 0
    ladder.check_folder()
    with interrupted_by_signals():
        ladder.train()
    result = report(ladder)
    with atomic_write(ladder.folder / "ladder.json") as stream:
        stream.write(json.dumps(result, indent=1).encode())
    print(f"\nwrote {ladder.folder}/ladder.json and ladder.png")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
