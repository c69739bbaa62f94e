"""Young's and Daly's formulas, compared with published values."""

import math
import random

import pytest
from forked_command import checked_command, run_command

from torchtrain.plugins.planner.failures import (
    LLAMA3_GPU_MTBF_HOURS,
    best_interval,
    expected_seconds,
    expected_seconds_of_replicas,
)
from torchtrain.plugins.planner.options import EstimateConfig
from torchtrain.plugins.planner.report import format_failures, format_recheck


@pytest.mark.parametrize(("mtbf_minutes", "minutes"), [(24 * 60, "117"), (6 * 60, "57"), (15, "9.1")])
def test_best_interval_is_that_of_the_paper(mtbf_minutes: float, minutes: str) -> None:
    """Figures 3 to 5: saves of 5 minutes, and a mean time between failures of 24 hours, 6 hours and 15 minutes."""
    digits = len(minutes.partition(".")[2])
    assert f"{best_interval(mtbf_minutes * 60, 300) / 60:.{digits}f}" == minutes


def test_best_interval_is_the_minimum_of_the_expected_duration() -> None:
    best = best_interval(21600, 300)
    durations = [expected_seconds(1e6, best * factor, 21600, 300, 600) for factor in (0.9, 1.0, 1.1)]
    assert durations[1] == min(durations)
    assert best_interval(100, 200) == 100


def test_expected_duration_is_that_of_simulated_runs() -> None:
    mtbf, save, restart, interval, segments = 3600.0, 60.0, 300.0, 900.0, 20_000
    chance, total = random.Random(0), 0.0
    for _ in range(segments):
        while True:
            failure = chance.expovariate(1 / mtbf)
            if failure >= interval + save:
                total += interval + save
                break
            total += failure
            while (again := chance.expovariate(1 / mtbf)) < restart:  # it may also fail while it restarts
                total += again
            total += restart
    expected = expected_seconds(segments * interval, interval, mtbf, save, restart)
    assert total == pytest.approx(expected, rel=0.02)


def test_expected_duration_of_replicas_is_that_of_simulated_runs() -> None:
    mtbf, lost, restart, replicas, work = 3600.0, 15.0, 600.0, 8, 4e6
    chance, time, done, back = random.Random(0), 0.0, 0.0, []
    failure = chance.expovariate(1 / mtbf)
    while done < work:
        alive = replicas - len(back)
        until = min([failure, *back])
        if (work - done) * replicas / max(alive, 1e-9) < until - time:
            time += (work - done) * replicas / alive
            break
        done += (until - time) * alive / replicas
        time = until
        if until == failure:
            done -= lost * alive / replicas
            back.append(time + restart)
            failure = time + chance.expovariate(1 / mtbf)
        else:
            back.remove(until)
    expected = expected_seconds_of_replicas(work, 1.0, mtbf, 0.0, restart, replicas, lost)
    assert time == pytest.approx(expected, rel=0.005)


def test_replicas_are_compared_with_a_restart() -> None:
    options = EstimateConfig(mtbf_hours=50_700, replicas=16)
    text = format_failures(54.0, 10.0, 16384, options).splitlines()[-1]
    assert text.startswith("in 16 replicas that may die (docs/replicas.md): 55.4 days (97.4% of them training)")
    assert text.endswith("a failure costs 20 s, and 6% of the speed for 600 s, in place of 833 s")
    assert format_recheck(100, 4).startswith("recheck.interval = 100: 0.25% more time")


def test_figures_of_llama_3() -> None:
    """419 interruptions in 54 days on 16,384 GPUs; the paper states more than 90% effective training time."""
    assert pytest.approx(50_677, abs=1) == LLAMA3_GPU_MTBF_HOURS
    mtbf = LLAMA3_GPU_MTBF_HOURS * 3600 / 16384
    assert mtbf / 3600 == pytest.approx(3.09, abs=0.01)
    interval = best_interval(mtbf, 10)
    effective = 1 / expected_seconds(1, interval, mtbf, 10, 600)
    assert (interval / 60, effective) == (pytest.approx(7.8, abs=0.1), pytest.approx(0.907, abs=0.001))
    assert 54 * 86400 / mtbf == pytest.approx(419)
    assert math.isclose(expected_seconds(1, interval, 1e12, 10, 600), 1 + 10 / interval, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--estimate.replicas", "2"], "estimate.replicas compares runs with failures: set estimate.mtbf_hours"),
        (
            ["--estimate.replicas", "3", "--estimate.mtbf_hours", "50700"],
            "estimate.replicas = 3 must divide the number of GPUs, estimate.world_size = 8",
        ),
    ],
)
def test_replicas_that_cannot_be_estimated_are_rejected(options: list[str], message: str) -> None:
    words = ["--job.config_file", "train_configs/debug_model.toml", "--estimate.world_size", "8", *options]
    found = run_command("torchtrain.estimate", *words)
    assert (found.returncode, message in found.stderr) == (2, True), found.stderr


def test_rates_of_gpus_and_machines_are_added() -> None:
    def interval_of(**options: float) -> str:
        return format_failures(30.0, 5.0, 20, EstimateConfig(**options)).split(" hours")[0]  # type: ignore[arg-type]

    assert interval_of(mtbf_hours=400.0) == "with a failure every 20.0"
    assert interval_of(node_mtbf_hours=60.0) == "with a failure every 20.0"  # of 3 machines of 8 GPUs
    assert interval_of(mtbf_hours=400.0, node_mtbf_hours=60.0) == "with a failure every 10.0"


def test_estimate_prints_a_line_per_stage_and_the_whole() -> None:
    options = ["--job.config_file", "train_configs/debug_stages.toml", "--estimate.world_size", "1"]
    options += ["--model.shape.n_layers", "1", "--estimate.mtbf_hours", "50700"]
    output = checked_command("torchtrain.estimate", *options).stdout
    rows = {line.split("  ")[0]: line.split() for line in output.splitlines() if line}
    assert [name for name in rows if name in ("main", "long context", "annealing", "whole run")] == [
        *("main", "long context", "annealing", "whole run")
    ]
    assert (rows["main"][6:8], rows["whole run"][2:4]) == (["118", "242K"], ["198", "406K"])
    assert "with a failure every 50,700.0 hours on 1 GPU: " in output
    assert "best checkpoint interval: " in output
