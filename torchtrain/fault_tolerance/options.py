"""Options for faults: [faults]."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtrain.config.section import CountOrZero, NotNegative, Section, at_least, require


@dataclass(frozen=True)
class FaultsConfig(Section, name="faults"):
    """Non-finite steps, loss spikes, stopping in time."""

    on_nonfinite: Literal["skip", "rollback", "stop"] = "skip"
    """What to do in a bad step, whose loss or gradient norm is non-finite or a spike. skip: skip the update. rollback:
    load the latest valid checkpoint before the step, and continue with the next data. stop: end the run with an
    error."""
    max_bad_steps: CountOrZero = 5
    """Maximum number of consecutive bad steps, or of rollbacks that do not get past them; one more ends the run with an
    error."""
    spike_threshold: NotNegative = 0.0
    """A loss or gradient norm is a spike if it exceeds the mean of the last spike_window steps by more than this many
    standard deviations. 0: no spike detection."""
    spike_window: Annotated[int, at_least(2)] = 128
    """Number of steps over which spike detection computes mean and standard deviation."""
    wall_clock_limit_minutes: NotNegative = 0.0
    """Save and stop early enough that the process ends within this many minutes of its start. 0: no limit."""
    stop_grace_seconds: CountOrZero = 30
    """Grace period in seconds between a signal and the kill, and between stopping and the wall-clock limit. A save that
    exceeds it is aborted. After SLURM's warning, SIGUSR1, the grace period lasts until the job's time limit, if that is
    longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit_seconds = 60 * self.wall_clock_limit_minutes
        require(
            limit_seconds == 0 or limit_seconds > self.stop_grace_seconds,
            f"faults.wall_clock_limit_minutes = {self.wall_clock_limit_minutes} must exceed "
            f"faults.stop_grace_seconds = {self.stop_grace_seconds} ({self.stop_grace_seconds / 60:.3g} minutes), the "
            "time before the limit at which the run stops; raise it, or set 0 for no limit",
        )
