"""``scripts/faults/crash_test.py --replicas 3``, in a short form."""

import random
from pathlib import Path

import pytest

pytest.importorskip("torchft")
import crash_test_replicas


@pytest.mark.slow
def test_replicas_die_at_random_moments(tmp_path: Path) -> None:
    trial = crash_test_replicas.Trial(tmp_path, random.Random(0))
    try:
        steps = crash_test_replicas.disturb(trial, [crash_test_replicas.kill, crash_test_replicas.kill_two])
        tensors, lines = crash_test_replicas.compare(trial, steps)
    finally:
        trial.end()
    assert trial.deaths == 3
    assert tensors > 80
    assert lines > 2 * steps
