"""Learning-rate schedule, compared with values computed by hand."""

import pytest

from torchtrain.config.registry import LR_SCHEDULES
from torchtrain.errors import ConfigError
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.optimizers.options import LRSchedulerConfig


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
def test_warmup_and_decay(decay_type: str, expected: list[float]) -> None:
    config = LRSchedulerConfig(warmup_steps=2, decay_type=decay_type)
    assert rates(config, 6, training_steps=6) == pytest.approx(expected, abs=1e-6)


def test_stable_phase_and_minimum() -> None:
    config = LRSchedulerConfig(warmup_steps=1, decay_type="linear", decay_ratio=0.4, min_lr_factor=0.1)
    expected = [1.0] * 7 + [0.775, 0.55, 0.325]
    assert rates(config, 10, training_steps=10) == pytest.approx(expected)
    assert rates(config, 12, training_steps=10)[-2:] == pytest.approx([0.1, 0.1])


def test_schedule_depends_on_total_steps_and_not_on_training_steps() -> None:
    config = LRSchedulerConfig(warmup_steps=3, total_steps=100)
    assert rates(config, 10, training_steps=10) == rates(config, 100, training_steps=100)[:10]


def test_schedule_begins_after_its_start_at_the_initial_rate() -> None:
    config = LRSchedulerConfig(warmup_steps=2, decay_type="linear", start_step=10, total_steps=16, initial_lr=0.5)
    assert rates(config, 16, 16)[10:] == pytest.approx([0.75, 1.0, 1.0, 0.75, 0.5, 0.25])
    config = LRSchedulerConfig(warmup_steps=0, decay_type="linear", start_step=10, total_steps=12)
    assert rates(config, 12, 12) == [1.0] * 11 + [0.5]  # also defined before its start


def test_warmup_is_limited_to_the_training_steps() -> None:
    assert rates(LRSchedulerConfig(warmup_steps=200), 4, training_steps=4) == [0.25, 0.5, 0.75, 1.0]


def test_decay_ratio_is_a_fraction_of_all_steps_and_decay_begins_after_warmup() -> None:
    config = LRSchedulerConfig(warmup_steps=5, decay_type="linear", decay_ratio=0.4)
    assert rates(config, 10, 10) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    config = LRSchedulerConfig(warmup_steps=2, decay_type="linear", decay_ratio=1.0)
    assert rates(config, 6, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("steps", "ratio"), [(7, None), (10_000, None), (500_000, None), (500_000, 0.2)])
def test_learning_rate_is_positive_until_the_last_step(decay_type: str, steps: int, ratio: float | None) -> None:
    config = LRSchedulerConfig(warmup_steps=2, decay_type=decay_type, decay_ratio=ratio)  # type: ignore[arg-type]
    schedule = LRSchedule(config, peak=3e-4, training_steps=steps)
    last = [schedule.rate(step) for step in range(steps - 3, steps + 1)]
    assert last == sorted(last, reverse=True)
    assert last[-1] > 0
    assert schedule.rate(steps + 1) == schedule.rate(steps + 9) == 0  # after the last step


def test_first_and_last_steps_equal_torchtitan() -> None:
    """By hand: torchtitan's factor at its step s - 1, for warmup_steps = 20, decay_ratio = 0.25 and 1,000 steps."""
    schedule = LRSchedule(LRSchedulerConfig(warmup_steps=20, decay_type="linear", decay_ratio=0.25), 2.0, 1000)
    found = [schedule.rate(step) for step in (1, 20, 21, 751, 752, 876, 1000, 1001)]
    assert found == pytest.approx([0.1, 2.0, 2.0, 2.0, 2.0 * 249 / 250, 1.0, 2.0 / 250, 0.0])


def test_function_is_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LR_SCHEDULES._entries, "mine", min)
    with pytest.raises(ConfigError, match=r"decay_type = 'mine' is registered as .* must be a subclass of"):
        LRSchedule(LRSchedulerConfig(decay_type="mine"), 0.5, 100)
