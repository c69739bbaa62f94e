"""Plugin: a report with curves at the end of a run (docs/watching.md)."""

from typing import TYPE_CHECKING

from torchtrain.config.registry import CONFIG_SECTIONS, HOOKS

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.metrics.hooks import Hook
    from torchtrain.trainer import Trainer

CONFIG_SECTIONS.add("report", "torchtrain.plugins.report.options:ReportConfig")


@HOOKS.register("report")
def report_hook(trainer: "Trainer") -> "Hook | None":
    """The report, if ``report.enable``."""
    from torchtrain.config.schema import section_of
    from torchtrain.plugins.report.options import ReportConfig

    if not section_of(trainer.config, ReportConfig).enable:
        return None
    from torchtrain.plugins.report.report import ReportWriter

    return ReportWriter()
