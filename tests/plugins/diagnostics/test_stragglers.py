"""Ranks that are slower than others are reported."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from forked_run import finish, read_metrics
from gloo_pool import GlooPool

from torchtrain.datasets.dataloader import DataLoader
from torchtrain.plugins.diagnostics import stragglers
from torchtrain.plugins.diagnostics.options import DiagnosticsConfig
from torchtrain.plugins.diagnostics.stragglers import StragglerWatch

NO_BATCH: Any = None


def watch_stragglers(kind: str) -> list[dict[str, Any]]:
    """Run 8 steps in which rank 2 is slow; return the straggler events of this rank."""
    found: list[dict[str, Any]] = []
    slow = dist.get_rank() == 2
    probe = stragglers.probe
    if slow and kind == "compute":
        stragglers.probe = lambda operand: probe(operand) + (time.sleep(0.3) or 0.3)
    if kind == "half as fast":
        stragglers.probe = lambda _: 0.002 if slow else 0.0009
    watch = StragglerWatch(
        DiagnosticsConfig(straggler_freq=4, straggler_factor=2.0),
        torch.device("cpu"),
        dist.group.WORLD,
        lambda step, event, values: found.append({"step": step, "event": event, **values}),
        waited_seconds=lambda: 0.3 if slow and kind == "data wait" else 0.02,
    )
    for step in range(1, 10):
        time.sleep(0.1)
        watch.before_step(step, NO_BATCH)
        dist.barrier()
    watch.after_last_step()
    stragglers.probe = probe
    return found


@pytest.mark.parametrize("kind", stragglers.KINDS)
def test_straggler_is_reported_with_its_rank_and_host(gloo: GlooPool, kind: str) -> None:
    found, *others = gloo.run(4, watch_stragglers, kind)
    assert others == [[]] * 3  # only the first rank reports
    assert [event["step"] for event in found if event["rank"] == 2 and event["kind"] == kind] == [4, 8]
    slow = next(event for event in found if event["rank"] == 2)
    assert slow["event"] == "straggler"
    assert slow["host"] == socket.gethostname()
    assert slow["seconds"] >= 0.3 > slow["median_seconds"]


def test_rank_of_half_the_speed_is_a_straggler_even_if_the_probe_is_short(gloo: GlooPool) -> None:
    found = gloo.run(4, watch_stragglers, "half as fast")[0]
    assert [(event["step"], event["rank"], event["kind"]) for event in found] == [(4, 2, "compute"), (8, 2, "compute")]


@contextmanager
def slow_data() -> Iterator[None]:
    """The data of rank 1 are slow."""
    read = DataLoader._read

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.3 if dist.get_rank() == 1 else 0.0)
        return read(*arguments)

    with patch.object(DataLoader, "_read", read_slowly):
        yield


def test_rank_that_waits_for_data_is_logged_as_a_straggler(tmp_path: Path) -> None:
    options = ["--diagnostics.straggler_freq=4", "--training.steps=8", "--checkpoint.no-enable"]
    options += ["--diagnostics.straggler_factor=1.2", "--data.prefetch=0"]  # nothing is read during a slow step
    finish(tmp_path, *options, hook=slow_data)
    found = [
        line for line in read_metrics(tmp_path) if line.get("event") == "straggler" and line["kind"] == "data wait"
    ]
    assert [(line["step"], line["rank"]) for line in found] == [(4, 1), (8, 1)]
    assert [line for line in found if not (line["seconds"] >= 0.3 > line["median_seconds"])] == []


def test_ranks_of_equal_speed_are_not_stragglers(gloo: GlooPool) -> None:
    assert gloo.run(4, watch_stragglers, "none")[0] == []


def watch_waits() -> list[tuple[int, float, float]]:
    found: list[tuple[int, float, float]] = []
    with patch.object(stragglers, "probe", lambda _: 0.001):
        watch = StragglerWatch(
            DiagnosticsConfig(straggler_freq=4, straggler_factor=2.0),
            torch.device("cpu"),
            dist.group.WORLD,
            lambda step, _, values: found.append((step, values["seconds"], values["median_seconds"])),
            waited_seconds=lambda: 0.3 if dist.get_rank() == 2 else 0.02,
        )
        for step in range(1, 9):
            watch.before_step(step, NO_BATCH)
        watch.after_last_step()
    return found


def test_reported_data_wait_is_per_step(gloo: GlooPool) -> None:
    first, second = gloo.run(3, watch_waits)[0]
    assert first == pytest.approx((4, 0.3, 0.02))
    assert second == pytest.approx((8, 0.3, 0.02))
