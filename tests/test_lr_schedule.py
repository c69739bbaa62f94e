"""The learning rate by hand-computed values."""

import pytest

from torchtrain.config.schema import LRSchedulerConfig
from torchtrain.optimizers.lr_schedule import LRSchedule


def rates(config: LRSchedulerConfig, steps: int, training_steps: int) -> list[float]:
    schedule = LRSchedule(config, peak=1.0, training_steps=training_steps)
    return [schedule.rate(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("decay_type", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("sqrt", [0.5, 1.0, 1.0, 0.5, 0.292893, 0.133975]),
    ],
)
def test_warm_up_and_decay(decay_type: str, expected: list[float]) -> None:
    config = LRSchedulerConfig(warmup_steps=2, decay_type=decay_type)  # type: ignore[arg-type]
    assert rates(config, 6, training_steps=6) == pytest.approx(expected, abs=1e-6)


def test_stable_phase_and_floor() -> None:
    config = LRSchedulerConfig(warmup_steps=1, decay_type="linear", decay_ratio=0.4, min_lr_factor=0.1)
    expected = [1.0] * 7 + [0.775, 0.55, 0.325]
    assert rates(config, 10, training_steps=10) == pytest.approx(expected)
    assert rates(config, 12, training_steps=10)[-2:] == pytest.approx([0.1, 0.1])


def test_a_short_run_keeps_the_rates_of_a_long_one() -> None:
    config = LRSchedulerConfig(warmup_steps=3, total_steps=100)
    assert rates(config, 10, training_steps=10) == rates(config, 100, training_steps=100)[:10]


def test_a_warm_up_longer_than_the_run_is_cut() -> None:
    assert rates(LRSchedulerConfig(warmup_steps=200), 4, training_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_the_decay_is_a_share_of_the_whole_schedule_and_begins_after_the_warm_up() -> None:
    config = LRSchedulerConfig(warmup_steps=5, decay_type="linear", decay_ratio=0.4)
    assert rates(config, 10, 10) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    config = LRSchedulerConfig(warmup_steps=2, decay_type="linear", decay_ratio=1.0)
    assert rates(config, 6, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("steps", "ratio"), [(7, None), (10_000, None), (500_000, None), (500_000, 0.2)])
def test_no_step_of_a_schedule_has_a_rate_of_0(decay_type: str, steps: int, ratio: float | None) -> None:
    config = LRSchedulerConfig(warmup_steps=2, decay_type=decay_type, decay_ratio=ratio)  # type: ignore[arg-type]
    schedule = LRSchedule(config, peak=3e-4, training_steps=steps)
    last = [schedule.rate(step) for step in range(steps - 3, steps + 1)]
    assert last == sorted(last, reverse=True)
    assert last[-1] > 0
    assert schedule.rate(steps + 1) == schedule.rate(steps + 9) == 0  # the floor


def test_the_ends_of_a_schedule_are_those_of_torchtitan() -> None:
    """By hand: torchtitan's factor of its step s - 1 for warmup_steps = 20, decay_ratio = 0.25 and 1,000 steps."""
    schedule = LRSchedule(LRSchedulerConfig(warmup_steps=20, decay_type="linear", decay_ratio=0.25), 2.0, 1000)
    found = [schedule.rate(step) for step in (1, 20, 21, 751, 752, 876, 1000, 1001)]
    assert found == pytest.approx([0.1, 2.0, 2.0, 2.0, 2.0 * 249 / 250, 1.0, 2.0 / 250, 0.0])
