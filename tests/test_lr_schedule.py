"""The learning rate by hand-computed values."""

import pytest

from torchtrain.config.schema import LRScheduler
from torchtrain.lr_schedule import LRSchedule


def rates(config: LRScheduler, steps: int, training_steps: int) -> list[float]:
    schedule = LRSchedule(config, peak=1.0, training_steps=training_steps)
    return [schedule.rate(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("decay_type", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ("sqrt", [0.5, 1.0, 0.5, 0.292893, 0.133975, 0.0]),
    ],
)
def test_warm_up_and_decay(decay_type: str, expected: list[float]) -> None:
    config = LRScheduler(warmup_steps=2, decay_type=decay_type)  # type: ignore[arg-type]
    assert rates(config, 6, training_steps=6) == pytest.approx(expected, abs=1e-6)


def test_stable_phase_and_floor() -> None:
    config = LRScheduler(warmup_steps=1, decay_type="linear", decay_ratio=0.4, min_lr_factor=0.1)
    expected = [1.0] * 6 + [0.775, 0.55, 0.325, 0.1]
    assert rates(config, 10, training_steps=10) == pytest.approx(expected)
    assert rates(config, 12, training_steps=10)[-2:] == pytest.approx([0.1, 0.1])


def test_a_short_run_keeps_the_rates_of_a_long_one() -> None:
    config = LRScheduler(warmup_steps=3, total_steps=100)
    assert rates(config, 10, training_steps=10) == rates(config, 100, training_steps=100)[:10]


def test_a_warm_up_longer_than_the_run_is_cut() -> None:
    assert rates(LRScheduler(warmup_steps=200), 4, training_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_the_decay_is_a_share_of_the_whole_schedule_and_begins_after_the_warm_up() -> None:
    config = LRScheduler(warmup_steps=5, decay_type="linear", decay_ratio=0.4)
    assert rates(config, 10, 10) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    config = LRScheduler(warmup_steps=2, decay_type="linear", decay_ratio=1.0)
    assert rates(config, 6, 6) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
