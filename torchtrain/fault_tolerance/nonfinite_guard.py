"""No update from bad numbers: a loss or gradient norm that is not finite, or is far above those of the last steps."""

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
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.logging import logger
from torchtrain.models.loss import TokenLoss

LONG_STEP_SECONDS = 10.0


class SpikeDetector(Stateful):
    """Loss and gradient norm of the last good steps, which a spike is measured against; the same on all ranks."""

    def __init__(self, config: FaultsConfig, device: torch.device):
        # Oldest first; NaN until there are enough, which makes every comparison false.
        self.values = torch.full((2, config.spike_window), math.nan, dtype=torch.float64, device=device)

    def state_dict(self) -> dict[str, Any]:
        return {f"last_{self.values.shape[1]}": self.values}  # a run with another length begins anew

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The values have been written in place; without any, they begin anew."""
        if not state_dict:
            self.values.fill_(math.nan)  # a checkpoint that was found damaged may have been read into them


class Request(Protocol):
    """Something that any rank may ask all of them to do after the step, such as a save that its clock says is due."""

    agreed: bool
    """Whether all ranks know that one of them has asked."""

    @property
    def pending(self) -> bool:
        """Whether this rank asks."""


@dataclass(eq=False)
class NonFiniteGuard:
    """Judges each step before its update, the same on all ranks, by one small all-reduce that also agrees on requests:
    to stop, and to save.

    The result stays on the device, where it skips the update, so that the host does not wait. The host reads it when
    the next step is judged, or, where ``steps_are_long``, at once (``settle``): it calls ``record_event(step, event,
    values)`` and sets ``must_roll_back_before``, ``stop.agreed`` and ``save.agreed``, on which the loop acts.
    """

    config: FaultsConfig
    stop: StopRequest
    window: SpikeDetector
    record_event: Callable[[int, str, dict[str, Any]], None]
    save: Request | None = None
    must_roll_back_before: int | None = field(default=None, init=False)
    """The bad step before which the run must go back, if it must."""
    steps_are_long: bool = field(default=False, init=False)
    """Whether the last step took over ``LONG_STEP_SECONDS`` on any rank; the same on all. Its result is then read at
    once: to wait for it costs less than a stop that comes a step later."""

    def __post_init__(self) -> None:
        self._judged_at = math.nan  # time.monotonic() when the step before was judged
        self._bad_in_a_row = 0
        self._last_bad_step = 0
        # What was found about a step, on its way to the host: the step, numbers as ``settle`` unpacks them, in CPU
        # memory, and when they have arrived; None on a CPU.
        self._last: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    @torch.no_grad()
    def judge(self, step: int, loss: TokenLoss, grad_norm: Tensor) -> Tensor:
        """1 where the update of ``step`` must not be made, else 0: a float32 scalar on the device, alike on all ranks.

        ``loss`` is this rank's; ``grad_norm`` that of all.

        Raises:
            FaultError: the step before had bad numbers, and ``faults.on_bad_numbers`` or ``faults.max_bad_steps`` say
                to stop.
        """
        self.settle()
        if self.steps_are_long and grad_norm.is_cuda:
            # The step is launched, not done: a stop that is asked for while it runs is to count, too.
            torch.cuda.current_stream().synchronize()
        now = time.monotonic()
        seconds, self._judged_at = now - self._judged_at, now
        window, device = self.window.values, self.window.values.device
        grad_norm = grad_norm.to(device).double()
        not_finite = ~loss.total.isfinite()
        # torch.full with a number is a kernel on the device: there is no copy to wait for.
        saves = self.save is not None and self.save.pending
        of_host = (self.stop.pending, saves, seconds > LONG_STEP_SECONDS)
        asked = [torch.full((), float(value), dtype=torch.float64, device=device) for value in of_host]
        flags = torch.stack((loss.total.double(), loss.tokens.double(), not_finite.double(), *asked))
        all_reduce(flags)
        total, tokens, bad_losses, *of_ranks = flags.unbind()
        values = torch.stack((total / tokens.clamp(min=1), grad_norm))
        means, deviations = window.mean(dim=1), window.std(dim=1, correction=0)
        bad = (bad_losses > 0) | ~grad_norm.isfinite()
        if self.config.spike_threshold > 0:
            bad = bad | (values > means + self.config.spike_threshold * deviations).any()
        shifted = torch.cat((window[:, 1:], values[:, None]), dim=1)
        self.window.values = torch.where(bad, window, shifted)  # another tensor: the old one may be in a save
        found = torch.cat((values, means, deviations, torch.stack((bad.double(), bad_losses, *of_ranks))))
        numbers = found.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream().record_event() if found.is_cuda else None
        self._last = step, numbers, ready
        return bad.float()

    def settle(self) -> None:
        """Act on the result of the last step judged. The loop calls it where no next step will be judged in time."""
        if self._last is None:
            return
        step, numbers, ready = self._last
        self._last = None
        if ready is not None:
            ready.synchronize()  # called by ``judge``: recorded a step ago, so it is done, or nearly so
        # Of loss and norm the values, then their means and deviations over the window; is it bad; and numbers of ranks:
        # with bad losses, asked to stop, due to save, for which the step took long.
        loss, norm, *window, bad, bad_losses, stopping, saving, is_long = numbers.tolist()
        self.stop.agreed = self.stop.agreed or stopping > 0
        if self.save is not None:
            self.save.agreed = self.save.agreed or saving > 0
        self.steps_are_long = is_long > 0
        if not bad:
            # Good steps before it, made again after a rollback, do not count, nor one after it that a rollback undoes.
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
        self._refused(step, loss, norm, problem)

    def rolled_back(self) -> None:
        """Forget results: the run has gone back to an earlier step."""
        self.must_roll_back_before = self._last = None

    def _refused(self, step: int, loss: float, norm: float, problem: str) -> None:
        policy = self.config.on_bad_numbers
        self._bad_in_a_row += 1
        self._last_bad_step = max(self._last_bad_step, step)
        message = f"bad numbers in step {step} (loss {loss:.4g}, gradient norm {norm:.4g}): {problem}"
        self.record_event(step, f"bad_numbers_{policy}", {"loss": loss, "gradient_norm": norm, "problem": problem})
        if policy == "stop":
            raise FaultError(f"{message}; faults.on_bad_numbers = 'stop'")
        if self._bad_in_a_row > self.config.max_bad_steps:
            raise FaultError(
                f"{message}; that is {self._bad_in_a_row} in a row, and faults.max_bad_steps = "
                f"{self.config.max_bad_steps}. A lower optimizer.lr, or a look at the data of these steps, may help"
            )
        if policy == "rollback" and self.must_roll_back_before is None:
            self.must_roll_back_before = step
        logger.warning("%s; %s", message, "rolling back" if policy == "rollback" else "its update is skipped")
