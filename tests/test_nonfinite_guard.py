"""The guard against non-finite numbers and spikes: which steps are bad, and skipped updates of every optimizer."""

import copy
from typing import Any, cast

import pytest
import torch
from gloo_pool import GlooPool
from parity import NoStop
from torch import nn

from torchtrain.errors import FaultError
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.models.loss import TokenLoss
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig


def check_steps(faults: FaultsConfig, losses: list[float], norms: list[float]) -> tuple[list[bool], list[Any]]:
    events: list[Any] = []
    guard = NonFiniteGuard(faults, lambda step, event, values: events.append((step, event, values["problem"])))
    check = StepCheck(guard, SpikeDetector(faults, torch.device("cpu")), cast(StopRequest, NoStop()))
    skipped = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        tokens = torch.tensor(4)
        skipped.append(bool(check(step, TokenLoss(torch.tensor(loss) * 4, tokens), torch.tensor(norm))))
    check.wait()
    return skipped, events


def test_spikes_are_measured_against_the_window_of_preceding_steps(gloo: GlooPool) -> None:
    faults = FaultsConfig(spike_threshold=3.0, spike_window=4)
    # A mean of 2 and a standard deviation of 0.5 give a limit of 3.5. A skipped step is not added to the window.
    losses = [1.5, 2.5, 1.5, 2.5, 3.6, 3.4, 4.0]
    (skipped, events), *_ = gloo.run(1, check_steps, faults, losses, [1.0] * 6 + [9.0])
    assert skipped == [False, False, False, False, True, False, True]
    usual = "is a spike: the last 4 steps had"
    # The last loss is usual, though above the mean by more than a standard deviation.
    assert events == [
        (5, "bad_step_skip", f"loss 3.6 {usual} 2 +- 0.5"),
        (7, "bad_step_skip", f"gradient norm 9 {usual} 1 +- 0"),
    ]


@pytest.mark.parametrize(
    ("loss", "norm"),
    [(3.6, 1.5), (1.5, 3.6), (3.6, 3.6), (float("nan"), 2.5), (2.5, float("inf")), (float("nan"), float("nan"))],
)
def test_skipped_steps_are_not_added_to_the_window(gloo: GlooPool, loss: float, norm: float) -> None:
    faults = FaultsConfig(spike_threshold=3.0, spike_window=4, max_bad_steps=9)
    # The limit of both is 3.5, as above. With a 3.6 in the window it would be 4.7; with a NaN there would be no limit.
    losses, norms = [1.5, 2.5, 1.5, 2.5, loss, loss, loss], [1.5, 2.5, 1.5, 2.5, norm, norm, norm]
    (skipped, _), *_ = gloo.run(1, check_steps, faults, [*losses, 3.6, 2.0, 3.4], [*norms, 2.0, 3.6, 3.4])
    assert skipped == [False] * 4 + [True] * 5 + [False]


def test_no_spike_before_the_window_is_full_or_without_a_threshold(gloo: GlooPool) -> None:
    losses, norms = [1.0, 1.0, 1.0, 100.0], [1.0, 1.0, 1.0, 1.0]
    assert gloo.run(1, check_steps, FaultsConfig(spike_threshold=3.0, spike_window=4), losses, norms)[0] == (
        [False] * 4,
        [],
    )
    assert gloo.run(1, check_steps, FaultsConfig(spike_window=2), losses, norms)[0] == ([False] * 4, [])


def test_valid_step_resets_the_count_of_bad_steps(gloo: GlooPool) -> None:
    nan, faults = float("nan"), FaultsConfig(max_bad_steps=2)
    losses = [nan, nan, 1.0, nan, nan, 1.0]
    (skipped, _), *_ = gloo.run(1, check_steps, faults, losses, [1.0] * 6)
    assert skipped == [True, True, False, True, True, False]
    with pytest.raises(AssertionError, match=f"{FaultError.__name__}.*that is 3 in a row"):
        gloo.run(1, check_steps, faults, [nan] * 3, [1.0] * 3)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_skipped_update_leaves_parameters_and_optimizer_state_unchanged(implementation: Any, state_dtype: Any) -> None:
    check_skipped_update("adamw", implementation, state_dtype)


def check_skipped_update(name: str, implementation: Any, state_dtype: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    optimizer = build_optimizer(
        [model], OptimizerConfig(name=name, implementation=implementation, state_dtype=state_dtype)
    )

    def step(gradient: float, skip: float) -> None:
        model.weight.grad = torch.full((3, 3), gradient)
        optimizer.step(torch.tensor(skip))

    step(1.0, skip=0.0)
    dtypes = {value.dtype for key, value in optimizer.state_dict().items() if key != "weight.step"}
    assert dtypes == {getattr(torch, state_dtype)}
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(float("nan"), skip=1.0)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    step(1.0, skip=0.0)
    assert not torch.equal(model.weight, before[0]["weight"])
    assert model.weight.isfinite().all()


def roll_back_three_times(steps: list[tuple[int, float]], wait: bool) -> None:
    faults = FaultsConfig(on_nonfinite="rollback", max_bad_steps=1)
    guard = NonFiniteGuard(faults, lambda *_: None)
    check = StepCheck(guard, SpikeDetector(faults, torch.device("cpu")), cast(StopRequest, NoStop()))
    for _ in range(3):
        for step, loss in steps:
            check(step, TokenLoss(torch.tensor(loss) * 4, torch.tensor(4)), torch.tensor(1.0))
        if wait:
            check.wait()
        assert guard.must_roll_back_before == 5
        check.reset()


@pytest.mark.parametrize(
    ("steps", "wait"),
    [
        ([(4, 1.0), (5, float("nan"))], True),  # a valid step is repeated before the bad one
        ([(5, float("nan")), (6, 1.0)], False),  # the next step is already running when the bad one is detected
        ([(5, float("nan")), (6, 1.0)], True),  # the same, but the guard waits, as before a checkpoint
    ],
)
def test_repeated_rollbacks_before_one_step_are_an_error(gloo: GlooPool, steps: Any, wait: bool) -> None:
    with pytest.raises(AssertionError, match="that is 2 in a row"):
        gloo.run(1, roll_back_three_times, steps, wait)
