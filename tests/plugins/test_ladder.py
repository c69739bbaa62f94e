"""scripts/ladder.py: the laws of the loss and of the best rate on synthetic losses, the runs, and a real ladder."""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked_command import checked_command, run_command

pytest.importorskip("scipy")
import ladder
from ladder import FORMS, Law, Point, RateLaw, Rung, Size, best_rate, choose_form, limits, rate_interval

from torchtrain.errors import ConfigError
from torchtrain.metrics.history import read_run, validation_losses

ROOT = Path(__file__).parents[2]
DEBUG = ("--job.config_file", "train_configs/debug_model.toml", "--model.shape.head_dim", "16")
SIZES, MULTIPLES = (1e6, 3e6, 1e7, 3e7), (5, 10, 20)
E, A, B, ALPHA, BETA = 1.7, 60.0, 900.0, 0.3, 0.4
NOISE = 0.002


def rungs_of(sizes: Sequence[float] = SIZES, multiples: Sequence[float] = MULTIPLES) -> list[Rung]:
    """Rungs of which 30 parameters are as many FLOPs per token as 5: attention and the output layer count, too."""
    models = [Size(f"{n:g}", round(2 * n), round(n), round(30 / 5 * n + 1e6), {}) for n in sizes]
    return [Rung(size, multiple, 1, round(multiple * size.non_embedding)) for size in models for multiple in multiples]


def loss_of(rung: Rung) -> float:
    return E + A / rung.size.non_embedding**ALPHA + B / rung.tokens**BETA


def noisy(rungs: Sequence[Rung], seed: int) -> list[float]:
    random = np.random.default_rng(seed)
    return [loss_of(rung) * math.exp(NOISE * random.standard_normal()) for rung in rungs]


def points_of(rungs: Sequence[Rung], lr: float = 1e-3) -> list[Point]:
    return [Point(rung, loss_of(rung), lr, True, {}) for rung in rungs]


def test_fit_finds_the_constants_without_noise() -> None:
    found = Law(FORMS[0], rungs_of(), [loss_of(rung) for rung in rungs_of()], draws=2).named_constants()
    values = {name: value for name, (value, _, _) in found.items()}
    assert values == pytest.approx({"E": E, "A": A, "B": B, "alpha": ALPHA, "beta": BETA}, rel=0.01)


def test_intervals_contain_the_constants_and_the_next_losses() -> None:
    law = Law(FORMS[0], rungs_of(), noisy(rungs_of(), 1), draws=100)
    for name, truth in {"E": E, "A": A, "B": B, "alpha": ALPHA, "beta": BETA}.items():
        value, low, high = law.named_constants()[name]
        assert low < truth < high, name
        assert low < value < high, name
    following = rungs_of([1e8])
    losses, (low, high) = law.predict(following)
    truth = [loss_of(rung) for rung in following]
    assert (low < truth).all()
    assert (truth < high).all()
    assert losses == pytest.approx(truth, rel=0.02)
    assert (high / low - 1 > 2 * NOISE).all()  # at least the noise of one loss


def coverage(draws: int, seeds: int) -> float:
    """How often the interval of the largest size, predicted from the others, contains what is measured."""
    inside = 0
    for seed in range(seeds):
        losses = noisy(rungs_of(), seed)
        law = Law(FORMS[0], rungs_of()[:9], losses[:9], draws)
        _, (low, high) = law.predict(rungs_of()[9:])
        inside += int(((low < losses[9:]) & (losses[9:] < high)).sum())
    return inside / seeds / 3


def test_intervals_contain_as_many_measurements_as_they_say() -> None:
    assert 0.75 <= coverage(draws=25, seeds=4) <= 0.99


@pytest.mark.slow
def test_intervals_of_many_ladders_contain_nine_of_ten_measurements() -> None:
    assert 0.82 <= coverage(draws=60, seeds=60) <= 0.96


def test_one_bad_run_hardly_changes_the_fit() -> None:
    rungs = rungs_of([*SIZES, 1e8], (5, 10, 20, 40))
    losses = noisy(rungs, 3)
    losses[9] *= 1.05
    law = Law(FORMS[0], rungs, losses, draws=2)
    assert law.residuals[9] == pytest.approx(math.log(1.05), abs=4 * NOISE)
    assert np.abs(np.delete(law.residuals, 9)).max() < 4 * NOISE


@pytest.mark.parametrize(
    ("sizes", "multiples", "form"),
    [(3, 3, FORMS[0]), (4, 2, FORMS[0]), (3, 2, FORMS[1]), (5, 1, FORMS[2]), (9, 1, FORMS[2])],
)
def test_form_has_fewer_constants_than_there_are_losses(sizes: int, multiples: int, form: ladder.Form) -> None:
    assert choose_form(sizes, multiples) == form


@pytest.mark.parametrize(("sizes", "multiples"), [(2, 3), (2, 9), (4, 1), (1, 9)])
def test_too_few_rungs_are_an_error(sizes: int, multiples: int) -> None:
    with pytest.raises(ConfigError, match="at least 3 sizes, and 5 losses of one multiple or 6 of several; add --size"):
        choose_form(sizes, multiples)


def test_simpler_forms_find_their_constants() -> None:
    shared = [E + A / rung.size.non_embedding**ALPHA + B / rung.tokens**ALPHA for rung in rungs_of()]
    found = Law(FORMS[1], rungs_of(), shared, draws=2).named_constants()
    assert {name: row[0] for name, row in found.items()} == pytest.approx(
        {"E": E, "A": A, "B": B, "alpha": ALPHA}, rel=0.01
    )
    rungs = rungs_of([*SIZES, 1e8], [20])
    in_compute = [E + A / rung.flops**0.1 for rung in rungs]
    found = Law(FORMS[2], rungs, in_compute, draws=2).named_constants()
    assert {name: row[0] for name, row in found.items()} == pytest.approx({"E": E, "A": A, "alpha": 0.1}, rel=0.01)


def test_limits_hold_for_the_next_size_without_a_fit() -> None:
    points = points_of(rungs_of())
    for rung in rungs_of([1e8]):
        bounds = limits(points, rung)
        assert bounds is not None
        assert bounds[0] < loss_of(rung) < bounds[1]
        assert bounds[1] == points[-4 + MULTIPLES.index(rung.multiple) + 1].loss
    assert limits(points, rungs_of([3e6])[0]) is None
    # From one size to the next, the loss of the last two goes down by the same factor as before.
    straight = [
        Point(rung, loss, 1e-3, True, {}) for rung, loss in zip(rungs_of(multiples=[5]), (9, 8, 4, 2), strict=True)
    ]
    low, high = limits(straight, rungs_of([9e7], [5])[0]) or (0, 0)
    assert (low, high) == (pytest.approx(1.0), 2)


def test_interval_among_many_losses_is_the_noise_of_one() -> None:
    rungs = rungs_of([*SIZES, 1e8], (5, 10, 20, 40))
    law = Law(FORMS[0], rungs, noisy(rungs, 4), draws=100)
    _, (low, high) = law.predict([rungs[10]])
    assert 0.9 < math.log(high[0] / low[0]) / (2 * 1.645 * NOISE) < 1.6


def test_best_rate_is_the_minimum_of_the_parabola_in_the_log() -> None:
    losses = {lr: 3 + 0.2 * math.log(lr / 3e-3) ** 2 for lr in (5e-4, 1e-3, 2e-3, 5e-3, 1e-2)}
    assert best_rate(losses) == (pytest.approx(3e-3), pytest.approx(3.0), True)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({1e-3: 3.0, 2e-3: 3.1, 4e-3: 3.3}, (1e-3, 3.0)),
        ({1e-3: 3.3, 2e-3: 3.1, 4e-3: 3.0}, (4e-3, 3.0)),
        ({1e-3: 3.3, 2e-3: 3.1, 4e-3: math.inf}, (2e-3, 3.1)),
        ({1e-3: 3.0, 2e-3: 2.9}, (2e-3, 2.9)),
        ({1e-3: 3.0}, (1e-3, 3.0)),
    ],
)
def test_best_rate_at_an_edge_is_not_bracketed(losses: dict[float, float], best: tuple[float, float]) -> None:
    assert best_rate(losses) == (*best, False)


def test_interval_of_the_best_rate_grows_with_the_noise() -> None:
    losses = {lr: 3 + 0.2 * math.log(lr / 3e-3) ** 2 for lr in (1e-3, 2e-3, 4e-3, 8e-3)}
    point = Point(rungs_of()[0], 3.0, 3e-3, True, losses)
    narrow, wide = rate_interval(point, 0.001), rate_interval(point, 0.01)
    assert narrow is not None
    assert wide is not None
    assert 2e-3 <= wide[0] < narrow[0] < 3e-3 < narrow[1] < wide[1] <= 8e-3


def test_best_rate_is_a_power_law_of_parameters_and_tokens_and_with_mup_of_tokens() -> None:
    def best(rung: Rung, mup: bool) -> float:
        return 0.5 * rung.tokens**-0.2 * (1.0 if mup else rung.size.non_embedding**-0.15)

    following = rungs_of([1e8])
    for mup in (False, True):
        law = RateLaw([Point(rung, 3.0, best(rung, mup), True, {}) for rung in rungs_of()], mup)
        assert law.terms == (("D",) if mup else ("N", "D"))
        assert law.predict(following)[0] == pytest.approx([best(rung, mup) for rung in following])


def test_too_few_best_rates_give_their_mean_or_an_error() -> None:
    points = [Point(rung, 3.0, lr, True, {}) for rung, lr in zip(rungs_of(), (1e-3, 2e-3, 4e-3), strict=False)]
    law = RateLaw(points, mup=False)
    assert law.terms == ()
    lr, (_, high) = law.predict(rungs_of([1e8]))
    assert lr == pytest.approx(2e-3)
    # Student's t with 2 degrees of freedom: 2.92 standard deviations of log 2, and the error of the mean.
    assert high == pytest.approx(2e-3 * math.exp(2.91999 * math.log(2) * math.sqrt(4 / 3)), rel=1e-4)
    with pytest.raises(ConfigError, match="2 rungs have a best learning rate between two that were tried, and 3 are"):
        RateLaw(points[:2], mup=True)


# ---- The command


def test_dry_run_lists_runs_with_parameters_tokens_and_flops(tmp_path: Path) -> None:
    sizes = ["--sizes", "64x2", "96x3", "128x4"]
    rates = ["--rates", "4e-3", "8e-3", "--seeds", "0", "1", "--multiples", "5", "10.5"]
    options = ["--output", str(tmp_path / "ladder"), *sizes, *rates, *DEBUG, "--flops_per_second", "1e9", "--dry-run"]
    result = checked_command("scripts/ladder.py", *options, "--training.global_batch_size", "16")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if line[0] == "|"]
    assert len(rows) == 2 + 6
    # 96x3: 6 heads of 16, 3 of them of keys, and 3 * 96 in the feed-forward network, as in the debug model.
    block = 96 * 96 * 2 + 96 * 48 * 2 + 3 * 96 * 288 + 2 * 96
    parameters, vocabulary = 3 * block + 96, 4096
    steps = math.ceil(10.5 * parameters / (16 * 256))
    products = 6 * (3 * (block - 2 * 96) + vocabulary * 96) + 12 * 3 * 96 * 256
    flops = products * steps * 16 * 256
    assert rows[5] == [
        "96x3",
        f"{parameters / 1e3:.0f}K",
        f"{(parameters + 2 * 96 * vocabulary) / 1e6:.3g}M",
        f"{steps * 4096 / 1e6:.3g}M (10.5x)",
        f"{steps:,}",
        f"{flops:.2e}",
        "4",
        "0",
        f"{4 * flops / 1e9 / 60:,.1f} min",
    ]
    assert not (tmp_path / "ladder").exists()


def small_ladder(folder: Path, ranks: int, *options: str) -> ladder.Ladder:
    arguments = argparse.Namespace(
        output=folder, sizes=["64x2", "96x3", "128x4"], rates=[4e-3], multiples=[5.0, 10.0], seeds=[0], ranks=ranks
    )
    vars(arguments).update(sweep=None, mup=False, next=None, flops_per_second=None)
    return ladder.Ladder(arguments, [*DEBUG, "--training.global_batch_size", "16", *options])


@pytest.mark.parametrize(("tied", "matrices"), [("True", 1), ("False", 2)])
def test_embeddings_are_counted_as_often_as_there_are(tmp_path: Path, tied: str, matrices: int) -> None:
    sizes = small_ladder(tmp_path, 1, f"--model.shape.tied_embeddings={tied}").sizes
    assert [size.parameters - size.non_embedding for size in sizes] == [matrices * n * 4096 for n in (64, 96, 128)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_measured_speed_is_that_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The measured tokens per second are those of one rank."""
    own = small_ladder(tmp_path, ranks)
    lines = [{"step": 1}, {"step": 2, "tokens_per_second": 1000.0}, {"step": 3, "tokens_per_second": 3000.0}]
    monkeypatch.setattr(own, "loss", lambda *_: 1.0)
    monkeypatch.setattr(ladder, "read_run", lambda _: SimpleNamespace(lines=lines))
    assert own.speed(own.sizes[0]) == 2000.0 * own.sizes[0].flops_per_token * ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "64x2", "96x3", "--rates", "4e-3"], "2 sizes x 3 token multiples are too few rungs"),
        (["--sizes", "64", "--rates", "4e-3"], "size '64' must be WIDTHxLAYERS, such as 256x8"),
        (["--sizes", "72x2", "--rates", "4e-3"], "head_dim x query heads per key/value head = 16 x 2 = 32; try 64, or"),
        (["--sizes", "64x2", "--rates", "0"], "--rates, --multiples and --ranks must be above 0"),
        (["--sizes", "64x2", "--rates", "1e-3", "--optimizer.lr", "1e-3"], "optimizer.lr... of each run; give --rates"),
        (
            ["--sizes", "64x2", "--rates", "1e-3", "--data.held_out", "0"],
            "the config has no held-out data: set data.he",
        ),
        (["--sizes", "64x2", "--rates", "1e-3", "--data.hold_out", "0"], "--data.hold_out"),
    ],
)
def test_errors_come_before_any_run(tmp_path: Path, options: list[str], message: str) -> None:
    result = run_command("scripts/ladder.py", "--output", str(tmp_path / "ladder"), *options, *DEBUG)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "ladder").exists()


def parameters_of(width: int, layers: int) -> int:
    """Of a model without embeddings, with as many heads of keys as of queries, and 3 * width in the feed-forward."""
    return layers * (13 * width**2 + 2 * width) + width


class SyntheticRun:
    """In place of a process that trains: writes the metrics of a run whose losses follow the law of the tests.

    Those of width 192 are 1% above it. The best rate of all runs is 4e-3.
    """

    def __init__(self, command: Sequence[str], **_: object) -> None:
        options = dict(zip(command[1::2], command[2::2], strict=True))
        width, layers = int(options["--model.shape.dim"]), int(options["--model.shape.n_layers"])
        assert options["--mup.base_dim"] == "64"
        assert options["--validation.interval"] == options["--lr_scheduler.total_steps"] == options["--training.steps"]
        steps, lr = int(options["--training.steps"]), float(options["--optimizer.lr"])
        parameters = parameters_of(width, layers)
        loss = E + A / parameters**ALPHA + B / (steps * 2048) ** BETA + 0.1 * math.log(lr / 4e-3) ** 2
        loss *= 1.01 if width == 192 else 1.0
        lines = [
            {"step": steps, "loss": loss + 1, "tokens_per_second": 1000.0},
            {"step": steps, "validation_loss": math.nan if lr > 0.01 else loss},
        ]
        Path(options["--job.dump_folder"], "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")

    def wait(self) -> int:
        return 0


def use_synthetic_runs() -> None:
    subprocess.Popen = SyntheticRun  # type: ignore[misc,assignment]


def no_run() -> None:
    subprocess.Popen = None  # type: ignore[misc,assignment]


def test_ladder_predicts_the_last_size_from_the_others_and_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder.Law.__init__, "__defaults__", (20,))  # draws, of the intervals
    monkeypatch.setattr(subprocess, "Popen", SyntheticRun)
    options = ["--output", str(tmp_path), "--sizes", "64x2", "96x2", "128x2", "192x2", "--next", "256x2", "--mup"]
    options += ["--rates", "2e-3", "4e-3", "8e-3", "16e-3", *DEBUG, "--model.shape.n_kv_heads", "8"]
    assert ladder.main(options) == 0
    output = capsys.readouterr().out
    found = json.loads((tmp_path / "ladder.json").read_bytes())
    assert found["form"] == FORMS[0].text
    assert len(found["points"]) == 12
    assert [point for point in found["points"] if not (point["losses"]["0.016"] is None and point["bracketed"])] == []
    for prediction in found["held_out"]:
        assert (prediction["size"], prediction["parameters"]) == ("192x2", parameters_of(192, 2))
        assert prediction["miss"] == pytest.approx(0.01, abs=1e-4)
        assert prediction["lr"] == pytest.approx(4e-3) == prediction["measured_lr"]
    for prediction in found["next"]:
        truth = E + A / prediction["parameters"] ** ALPHA + B / prediction["tokens"] ** BETA
        assert prediction["loss"] == pytest.approx(truth, rel=0.02)
        assert prediction["measured_loss"] is None
    assert re.search(r"\| 192x2 .*\| 0.004 \(0.00[34]\d* to 0.00[45]\d*\) +\|", output)
    assert "192x2, predicted from the others" in output
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    # Again: no run is repeated, and the time is known from those that have ended.
    monkeypatch.setattr(subprocess, "Popen", None)
    assert ladder.main(options) == 0
    again = capsys.readouterr().out
    assert again.split("Measured")[1] == output.split("Measured")[1]
    assert "min on 1 rank, without starts and validation" in again
    assert ladder.main([*options, "--data.held_out", "0.1"]) == 2
    assert f"the runs in {tmp_path} were trained with other values of: options" in capsys.readouterr().err


def test_sweep_tries_all_rates_at_one_multiple(tmp_path: Path) -> None:
    options = ["--output", str(tmp_path), "--sizes", "64x2", "96x2", "128x2", "--mup", "--sweep", "5", *DEBUG]
    options += ["--rates", "2e-3", "5e-3", "8e-3", "--model.shape.n_kv_heads", "8"]
    output = checked_command("scripts/ladder.py", *options, hook=use_synthetic_runs).stdout
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {
        *(f"{width}x2_5x_lr{lr}_seed0" for width in (64, 96, 128) for lr in ("0.002", "0.005", "0.008")),
        *(f"{width}x2_{multiple}x_lr0.004_seed0" for width in (64, 96, 128) for multiple in (10, 20)),
    }
    assert "128x2 is not predicted from the others: they are too few rungs for a fit." in output
    wrong = run_command("scripts/ladder.py", *options, "--sweep", "7", hook=no_run)
    assert (wrong.returncode, "--sweep 7 must be one of --multiples" in wrong.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interrupted_ladder_resumes_its_runs(forked_ranks: dict[str, str], tmp_path: Path) -> None:
    options = ["--output", str(tmp_path), "--sizes", "32x1", "32x2", "48x2", "64x2", "--multiples", "0.5", "1"]
    options += ["--rates", "4e-3", *DEBUG, "--model.shape.n_kv_heads", "8", "--training.seq_len", "64"]
    options += ["--validation.steps", "2"]
    options += ["--training.local_batch_size", "4", "--training.mixed_precision_param", "float32"]
    environment = {**os.environ, "PYTHON": forked_ranks["PYTHON_EXEC"], "OMP_NUM_THREADS": "1"}
    first = tmp_path / "runs/32x1_0.5x_lr0.004_seed0/metrics.jsonl"
    last = tmp_path / "runs/64x2_1x_lr0.004_seed0/metrics.jsonl"
    command = [sys.executable, "scripts/ladder.py", *options]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_for(lambda: last.exists() and '"loss"' in last.read_text())
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert output.count("run ") >= 8
    assert not (tmp_path / "ladder.json").exists()
    assert validation_losses(last.parent) == {}
    before = first.read_bytes()
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "run 1 of 1: " in result.stdout
    assert first.read_bytes() == before
    assert read_run(last.parent).restarts != []
    found = json.loads((tmp_path / "ladder.json").read_bytes())
    assert found["form"] == FORMS[0].text
    assert [prediction["size"] for prediction in found["held_out"]] == ["64x2", "64x2"]
    losses = [point["loss"] for point in found["points"]]
    last_of_runs = [max(validation_losses(run).items())[1][1] for run in (tmp_path / "runs").iterdir()]
    assert sorted(losses) == sorted(last_of_runs)
    assert losses[0] == max(losses)
    assert found["rate"] is None
    # The loss of the run that was stopped is that of one that was not.
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "runs", whole / "runs")
    shutil.copy(tmp_path / "options.json", whole)
    shutil.rmtree(whole / last.parent.relative_to(tmp_path))
    result = subprocess.run(
        [*command, "--output", str(whole)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "run 1 of 1: " in result.stdout, result.stderr
    assert [point["loss"] for point in json.loads((whole / "ladder.json").read_bytes())["points"]] == losses


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
