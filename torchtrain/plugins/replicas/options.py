"""The section [replicas]."""

import os
from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Count, CountOrZero, Section


@dataclass(frozen=True)
class ReplicasConfig(Section, name="replicas"):
    """Replicas of the job that may die and join."""

    changes_run = False

    lighthouse: str = ""
    """Address of torchft_lighthouse, which knows the living replicas, such as "http://host:29510". Empty: this job is
    the whole run."""
    id: str = ""
    """Name of this replica, the same at each of its starts. Empty: SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX, the
    number that SLURM or Kubernetes gives it."""
    min: Count = 1
    """Number of replicas without which no step is taken: with fewer, the others wait."""
    host: str = ""
    """Name or address of this machine by which other replicas reach it, for its state and its sums. Empty: the name of
    the machine; its sums are then at the address of that name, or of the interface in GLOO_SOCKET_IFNAME."""
    collective_timeout_seconds: Count = 30
    """Time limit for each communication between replicas, in seconds: for so long, the others wait for a replica that
    hangs. Below comm.train_timeout_seconds."""
    quorum_timeout_seconds: Count = 600
    """Time limit to agree on the living replicas before a step, in seconds: above the duration of a step, a validation
    and a save together."""
    lighthouse_retries: CountOrZero = 20
    """How often a replica asks the lighthouse again if it does not answer, each time after a longer pause."""
    max_discarded: Count = 20
    """Maximum number of attempts of one step that the replicas discard in a row."""
    allow_fast_sums: bool = False
    """Train also with training.sums = "fast". Bits then depend on which replicas live in which step."""
    on_stop: Literal["leave", "all"] = "leave"
    """What a request to stop (docs/faults.md) that one replica gets means. leave: it leaves after its step,
    and the others continue. all: all replicas stop after this step, and one of them saves."""

    @property
    def own_id(self) -> str:
        """``id``, or what SLURM or Kubernetes gives; empty if there is neither."""
        given = (os.environ.get(name, "") for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX"))
        return self.id or next(filter(None, given), "")

    @property
    def trainer_class(self) -> str:
        return "torchtrain.plugins.replicas.trainer:ReplicaTrainer" if self.lighthouse else ""
