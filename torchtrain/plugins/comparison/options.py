"""The section [comparison]."""

from dataclasses import dataclass

from torchtrain.config.schema import JobConfig
from torchtrain.config.section import Count, Section, require


@dataclass(frozen=True)
class ComparisonConfig(Section, name="comparison"):
    """Fingerprints of tensors, which torchtrain.compare reads."""

    changes_run = False
    output_files = ("fingerprints",)
    may_differ_between_stages = True

    fingerprint_steps: tuple[Count, ...] = ()
    """Steps whose tensors are recorded in fingerprints/ for python -m torchtrain.compare (docs/compare.md). These steps
    are slower and take memory for a second copy of the parameters."""

    def check(self, config: JobConfig) -> None:
        require(
            not (self.fingerprint_steps and config.compile.enable),
            "comparison.fingerprint_steps needs compile.enable = false, because tensors inside a compiled block cannot "
            "be recorded; compare uncompiled runs by their fingerprints, and compiled runs by their curves",
        )
