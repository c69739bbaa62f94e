"""Plugin: the documents in a step of a run, and their losses (docs/explain.md)."""

import shlex
from typing import TYPE_CHECKING

from torchtrain.config.registry import HOOKS

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.trainer import Trainer


REQUIRES = ("torchtrain.plugins.report",)  # which a replay does not write


@HOOKS.register("explain")
def command_in_report(trainer: "Trainer") -> None:
    """The report of a bad step ends with the command that lists its documents. It needs no hook of its own."""
    run = shlex.quote(trainer.config.job.dump_folder)
    trainer.guard.explanations.append(lambda step: f"its documents: python -m torchtrain.explain {run} --step {step}")
