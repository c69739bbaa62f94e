"""Bad steps, whose loss or gradient norm is non-finite or a spike compared with the preceding steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.errors import FaultError
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.logging import logger


class SpikeDetector(Stateful):
    """Compares the loss and the gradient norm of a step with those of the last steps that were not bad.

    Attributes:
        values: (2, spike_window), float64, on the device of the model, identical on all ranks: the losses, then the
            gradient norms, the oldest first. They are NaN until there were enough steps, so that every comparison with
            them is false.
    """

    def __init__(self, config: FaultsConfig, device: torch.device):
        self.threshold = config.spike_threshold
        self.values = torch.full((2, config.spike_window), math.nan, dtype=torch.float64, device=device)

    def means_and_deviations(self) -> tuple[Tensor, Tensor]:
        """The means of loss and gradient norm in the last steps, and their standard deviations."""
        return self.values.mean(dim=1), self.values.std(dim=1, correction=0)

    def is_spike(self, values: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
        """Whether the loss or the gradient norm in ``values`` exceeds its mean by more than
        ``faults.spike_threshold`` standard deviations."""
        return (values > means + self.threshold * deviations).any()

    def add(self, values: Tensor, unless: Tensor) -> None:
        """Add the ``values`` of a step, and forget those of the oldest one, unless the boolean ``unless`` is true."""
        shifted = torch.cat((self.values[:, 1:], values[:, None]), dim=1)
        self.values = torch.where(unless, self.values, shifted)  # new: an asynchronous save may read the old tensor

    def state_dict(self) -> dict[str, Any]:
        # The key contains the length: a run with another spike_window does not load these values.
        return {f"last_{self.values.shape[1]}": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reset the values if ``state_dict`` is empty; otherwise the checkpoint was already loaded into them."""
        if not state_dict:
            self.values.fill_(math.nan)  # a checkpoint that turned out to be damaged may have been loaded into them


@dataclass(eq=False)
class NonFiniteGuard:
    """Decides what a bad step means for the run, by ``faults.on_nonfinite`` and ``faults.max_bad_steps``.

    ``StepCheck`` finds bad steps, on all ranks at the same time, and skips their updates.
    """

    config: FaultsConfig
    record_event: Callable[[int, str, dict[str, Any]], None]
    """Called with the step, the name of the event, and its values."""
    explanations: list[Callable[[int], str]] = field(default_factory=list)
    """Each returns what else is known about the bad step with this number, for its report, or an empty string."""
    must_roll_back_before: int | None = field(default=None, init=False)
    """The bad step before which the run must roll back, or None."""

    def __post_init__(self) -> None:
        self._bad_in_a_row = 0
        self._last_bad_step = 0

    def handle_valid_step(self, step: int) -> None:
        """Reset the count of bad steps."""
        # Steps that are repeated after a rollback, up to the bad one, do not reset the count. Neither does a step
        # after the bad one if a rollback will undo it.
        if step > self._last_bad_step and self.must_roll_back_before is None:
            self._bad_in_a_row = 0

    def handle_bad_step(
        self,
        step: int,
        loss: float,
        norm: float,
        mean_loss: float,
        mean_norm: float,
        loss_deviation: float,
        norm_deviation: float,
        *,
        bad_losses: float,
    ) -> None:
        """Report a bad step, and request a rollback or end the run if the config says so.

        Args:
            step, loss, norm: the step, its mean loss and its gradient norm.
            mean_loss, mean_norm, loss_deviation, norm_deviation: of the last steps (``SpikeDetector``).
            bad_losses: number of ranks whose loss is not finite.

        Raises:
            FaultError: ``faults.on_nonfinite`` is "stop", or there were too many bad steps in a row.
        """
        if bad_losses:
            problem = f"loss not finite on {bad_losses:.0f} rank(s)"
        elif math.isnan(loss):
            problem = "it has no token to predict"
        elif not math.isfinite(norm):
            problem = "gradient not finite"
        else:
            is_loss = loss > mean_loss + self.config.spike_threshold * loss_deviation
            name, value, mean, deviation = (
                ("loss", loss, mean_loss, loss_deviation)
                if is_loss
                else ("gradient norm", norm, mean_norm, norm_deviation)
            )
            usual = f"the last {self.config.spike_window} steps had {mean:.4g} +- {deviation:.2g}"
            problem = f"{name} {value:.4g} is a spike: {usual}"
        explanations = [text for explain in self.explanations if (text := explain(step))]
        problem = "; ".join([problem, *explanations])
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
