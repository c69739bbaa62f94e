"""Plugin: a report with curves at the end of a run (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import STEP_HOOKS

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.metrics.step_hook import StepHook
    from torchtrain.trainer import Trainer


@STEP_HOOKS.register("report")
def report(trainer: "Trainer") -> "StepHook | None":
    """The report, if ``metrics.enable_report``."""
    if not trainer.config.metrics.enable_report:
        return None
    from torchtrain.plugins.report.report import ReportWriter

    return ReportWriter()
