"""One small all-reduce per step: whether the step is bad, and what any rank requests of all ranks, such as to stop."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchtrain.distributed.agreement import Request
from torchtrain.distributed.process_group import all_reduce
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.models.loss import TokenLoss

LONG_STEP_SECONDS = 10.0


@dataclass(eq=False)
class StepCheck:
    """Checks the loss and the gradient norm of each step before the update, identically on all ranks.

    A step is bad if the loss of any rank or the gradient norm is non-finite or, with ``faults.spike_threshold``, a
    spike. The all-reduce that combines the losses of all ranks also combines their requests to stop and to save.

    The result stays on the device, where it skips the update, so that the host does not wait for the device. The host
    reads it when the next step is checked, or immediately after the step (``wait_if_needed``) where the result is
    needed. It then tells the ``guard``, and sets ``stop.agreed`` and ``save.agreed``.
    """

    guard: NonFiniteGuard
    spikes: SpikeDetector
    stop: Request
    save: Request | None = None
    needs_result: Callable[[int], bool] = lambda _: False
    """Whether the result of a step must be known immediately after it: no bad step may be saved or end the run."""
    steps_are_long: bool = field(default=False, init=False)
    """Whether the last step took over ``LONG_STEP_SECONDS`` on any rank; identical on all ranks. The result of a long
    step is read immediately: waiting for the device costs less than a stop that comes a step later."""

    def __post_init__(self) -> None:
        self._checked_at = math.nan  # time.monotonic() when the previous step was checked
        # The result of a check on its way to the host: the step; the numbers as ``wait`` unpacks them, in CPU memory;
        # the event after which they have arrived, None on a CPU.
        self._last: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    @torch.no_grad()
    def __call__(self, step: int, loss: TokenLoss, grad_norm: Tensor) -> Tensor:
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
        device = self.spikes.values.device
        grad_norm = grad_norm.to(device).double()
        not_finite = ~loss.total.isfinite()
        # torch.full with a Python number is a kernel on the device, without a copy from the host to wait for.
        saves = self.save is not None and self.save.pending
        on_host = (self.stop.pending, saves, seconds > LONG_STEP_SECONDS)
        host_flags = [torch.full((), float(value), dtype=torch.float64, device=device) for value in on_host]
        flags = torch.stack((loss.total.double(), loss.tokens.double(), not_finite.double(), *host_flags))
        all_reduce(flags)  # over all ranks: tensor-parallel ranks count twice in loss and tokens, so the mean is right
        total, tokens, bad_losses, *of_ranks = flags.unbind()
        values = torch.stack((total / tokens, grad_norm))
        means, deviations = self.spikes.means_and_deviations()
        bad = (bad_losses > 0) | ~values.isfinite().all()
        if self.spikes.threshold > 0:
            bad = bad | self.spikes.is_spike(values, means, deviations)
        self.spikes.add(values, unless=bad)
        found = torch.cat((values, means, deviations, torch.stack((bad.double(), bad_losses, *of_ranks))))
        numbers = found.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream().record_event() if found.is_cuda else None
        self._last = step, numbers, ready
        return bad.float()

    def wait(self) -> None:
        """Read the result of the last check and act on it.

        Raises:
            FaultError: as for a check.
        """
        if self._last is None:
            return
        step, numbers, ready = self._last
        self._last = None
        if ready is not None:
            ready.synchronize()  # at the next check it was recorded a step ago, so this hardly waits
        # Loss and gradient norm, their means and deviations; whether the step is bad; and the numbers of ranks with a
        # non-finite loss, with a stop request, with a request to save, and with a long step.
        *statistics, bad, bad_losses, stopping, saving, is_long = numbers.tolist()
        self.stop.agreed = self.stop.agreed or stopping > 0
        if self.save is not None:
            self.save.agreed = self.save.agreed or saving > 0
        self.steps_are_long = is_long > 0
        if bad:
            self.guard.handle_bad_step(step, *statistics, bad_losses=bad_losses)
        else:
            self.guard.handle_valid_step(step)

    def wait_if_needed(self, step: int) -> None:
        """Read the result of ``step`` if it is needed at once; else it is read when the next step is checked.

        Raises:
            FaultError: as for a check.
        """
        if self.steps_are_long or self.needs_result(step):
            self.wait()

    def reset(self) -> None:
        """Discard the result of the last check and the request to roll back; called after a rollback."""
        self._last = None
        self.guard.must_roll_back_before = None
