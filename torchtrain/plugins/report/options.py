"""The section [report]."""

from dataclasses import dataclass

from torchtrain.config.section import Section


@dataclass(frozen=True)
class ReportConfig(Section, name="report"):
    """The report at the end of a run."""

    changes_run = False
    output_files = ("report.md", "curves.png")

    enable: bool = True
    """At the end of the run, write report.md to the dump folder: results and curves; also at every save of checkpoints
    in a bucket, where it is stored, too."""
