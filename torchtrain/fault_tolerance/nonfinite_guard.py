"""Skip updates whose loss or gradient norm is non-finite, or a spike compared with the preceding steps."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.config.schema import FaultsConfig
from torchtrain.distributed.process_group import all_reduce
from torchtrain.errors import FaultError
from torchtrain.logging import logger
from torchtrain.models.loss import TokenLoss

LONG_STEP_SECONDS = 10.0


class SpikeDetector(Stateful):
    """The losses and gradient norms of the last ``faults.spike_window`` steps that were not bad.

    A spike is measured against their means and standard deviations. They are identical on all ranks.

    Attributes:
        values: (2, spike_window), float64, on the device of the model: the losses, then the gradient norms, the oldest
            first. They are NaN until there were enough steps, so that every comparison with them is false.
    """

    def __init__(self, config: FaultsConfig, device: torch.device):
        self.values = torch.full((2, config.spike_window), math.nan, dtype=torch.float64, device=device)

    def state_dict(self) -> dict[str, Any]:
        # The key contains the length: a run with another spike_window does not load these values.
        return {f"last_{self.values.shape[1]}": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reset the values if ``state_dict`` is empty; otherwise the checkpoint was already loaded into them."""
        if not state_dict:
            self.values.fill_(math.nan)  # a checkpoint that turned out to be damaged may have been loaded into them


class Request(Protocol):
    """A request of any rank for an action of all ranks after the step, such as a save when its interval has passed."""

    agreed: bool
    """Whether any rank has made the request; identical on all ranks."""

    @property
    def pending(self) -> bool:
        """Whether this rank makes the request."""


@dataclass(eq=False)
class NonFiniteGuard:
    """Checks the loss and the gradient norm of each step before the update, identically on all ranks.

    A step is bad if the loss of any rank or the gradient norm is non-finite or, with ``faults.spike_threshold``, a
    spike. One small all-reduce per step combines the losses of all ranks, and their requests to stop and to save.

    The result stays on the device, where it skips the update, so that the host does not wait for the device. The host
    reads it when the next step is checked, or immediately after the step (``must_roll_back``) where the result is
    needed. It then calls ``record_event(step, event, values)`` and sets ``must_roll_back_before``, ``stop.agreed`` and
    ``save.agreed``.
    """

    config: FaultsConfig
    stop: Request
    window: SpikeDetector
    record_event: Callable[[int, str, dict[str, Any]], None]
    save: Request | None = None
    needs_result: Callable[[int], bool] = lambda _: False
    """Whether the result of a step must be known immediately after it: no bad step may be saved or end the run."""
    explanations: list[Callable[[int], str]] = field(default_factory=list)
    """Each returns what else is known about the bad step with this number, for its report, or an empty string."""
    must_roll_back_before: int | None = field(default=None, init=False)
    """The bad step before which the run must roll back, or None."""
    steps_are_long: bool = field(default=False, init=False)
    """Whether the last step took over ``LONG_STEP_SECONDS`` on any rank; identical on all ranks. The result of a long
    step is read immediately: waiting for the device costs less than a stop that comes a step later."""

    def __post_init__(self) -> None:
        self._checked_at = math.nan  # time.monotonic() when the previous step was checked
        self._bad_in_a_row = 0
        self._last_bad_step = 0
        # The result of a check on its way to the host: the step; the numbers as ``wait`` unpacks them, in CPU memory;
        # the event after which they have arrived, None on a CPU.
        self._last: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    @torch.no_grad()
    def check(self, step: int, loss: TokenLoss, grad_norm: Tensor) -> Tensor:
        """Whether to skip the update of ``step``. Collective.

        Args:
            step: the number of the step, from 1 on.
            loss: the loss of this rank.
            grad_norm: the norm of the global gradient, a scalar.

        Returns:
            A float32 scalar on the device, identical on all ranks: 1 if the update must be skipped, else 0.

        Raises:
            FaultError: the previous step was bad, and ``faults.on_nonfinite`` or ``faults.max_bad_steps`` stops the
                run.
        """
        self.wait()
        if self.steps_are_long and grad_norm.is_cuda:
            # The kernels of the step are only launched. Wait for them, so that a stop request during the step counts.
            torch.cuda.current_stream().synchronize()
        now = time.monotonic()
        seconds, self._checked_at = now - self._checked_at, now
        window, device = self.window.values, self.window.values.device
        grad_norm = grad_norm.to(device).double()
        not_finite = ~loss.total.isfinite()
        # torch.full with a Python number is a kernel on the device, without a copy from the host to wait for.
        saves = self.save is not None and self.save.pending
        on_host = (self.stop.pending, saves, seconds > LONG_STEP_SECONDS)
        host_flags = [torch.full((), float(value), dtype=torch.float64, device=device) for value in on_host]
        flags = torch.stack((loss.total.double(), loss.tokens.double(), not_finite.double(), *host_flags))
        all_reduce(flags)  # over all ranks: tensor-parallel ranks count twice in loss and tokens, so the mean is right
        total, tokens, bad_losses, *of_ranks = flags.unbind()
        values = torch.stack((total / tokens.clamp(min=1), grad_norm))
        means, deviations = window.mean(dim=1), window.std(dim=1, correction=0)
        bad = (bad_losses > 0) | ~grad_norm.isfinite()
        if self.config.spike_threshold > 0:
            bad = bad | (values > means + self.config.spike_threshold * deviations).any()
        shifted = torch.cat((window[:, 1:], values[:, None]), dim=1)
        self.window.values = torch.where(bad, window, shifted)  # a new tensor: an asynchronous save may read the old
        found = torch.cat((values, means, deviations, torch.stack((bad.double(), bad_losses, *of_ranks))))
        numbers = found.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream().record_event() if found.is_cuda else None
        self._last = step, numbers, ready
        return bad.float()

    def wait(self) -> None:
        """Read the result of the last check and act on it.

        Raises:
            FaultError: as for ``check``.
        """
        if self._last is None:
            return
        step, numbers, ready = self._last
        self._last = None
        if ready is not None:
            ready.synchronize()  # from ``check`` it was recorded a step ago, so this hardly waits
        # Loss and gradient norm, their means and deviations; whether the step is bad; and the numbers of ranks with a
        # non-finite loss, with a stop request, with a request to save, and with a long step.
        loss, norm, *window, bad, bad_losses, stopping, saving, is_long = numbers.tolist()
        self.stop.agreed = self.stop.agreed or stopping > 0
        if self.save is not None:
            self.save.agreed = self.save.agreed or saving > 0
        self.steps_are_long = is_long > 0
        if not bad:
            # Steps that are repeated after a rollback, up to the bad one, do not reset the count. Neither does a step
            # after the bad one if a rollback will undo it.
            if step > self._last_bad_step and self.must_roll_back_before is None:
                self._bad_in_a_row = 0
            return
        if bad_losses:
            problem = f"loss not finite on {bad_losses:.0f} rank(s)"
        elif not math.isfinite(norm):
            problem = "gradient not finite"
        else:
            rows = zip(("loss", "gradient norm"), (loss, norm), window[:2], window[2:], strict=True)
            spikes = (row for row in rows if row[1] > row[2] + self.config.spike_threshold * row[3])
            name, value, mean, deviation = next(spikes)
            usual = f"the last {self.config.spike_window} steps had {mean:.4g} +- {deviation:.2g}"
            problem = f"{name} {value:.4g} is a spike: {usual}"
        explanations = [text for explain in self.explanations if (text := explain(step))]
        self._handle_bad_step(step, loss, norm, "; ".join([problem, *explanations]))

    def must_roll_back(self, step: int) -> bool:
        """Whether the run must roll back after ``step``; identical on all ranks.

        Without ``needs_result`` and ``steps_are_long`` this is known of the steps before ``step`` only.

        Raises:
            FaultError: as for ``check``.
        """
        if self.steps_are_long or self.needs_result(step):
            self.wait()
        return self.must_roll_back_before is not None

    def reset(self) -> None:
        """Discard the result of the last check and the request to roll back; called after a rollback."""
        self.must_roll_back_before = self._last = None

    def _handle_bad_step(self, step: int, loss: float, norm: float, problem: str) -> None:
        policy = self.config.on_nonfinite
        self._bad_in_a_row += 1
        self._last_bad_step = max(self._last_bad_step, step)
        message = f"step {step} is bad (loss {loss:.4g}, gradient norm {norm:.4g}): {problem}"
        self.record_event(step, f"bad_step_{policy}", {"loss": loss, "gradient_norm": norm, "problem": problem})
        if policy == "stop":
            raise FaultError(f"{message}; faults.on_nonfinite = 'stop'")
        if self._bad_in_a_row > self.config.max_bad_steps:
            raise FaultError(
                f"{message}; that is {self._bad_in_a_row} in a row, and faults.max_bad_steps = "
                f"{self.config.max_bad_steps}. Lower optimizer.lr, or check the data of these steps"
            )
        if policy == "rollback" and self.must_roll_back_before is None:
            self.must_roll_back_before = step
        logger.warning("%s; %s", message, "rolling back" if policy == "rollback" else "the update is skipped")
