"""Compare two runs and name the first tensor that differs: ``python -m torchtrain.compare RUN_A RUN_B``.

Exit code 0: the runs match, bitwise or to within rounding; 1: they differ; 2: there is nothing to compare; 3: there is
too little to compare. See docs/compare.md.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torchtrain.cli import command
from torchtrain.config.command_options import POSITIONAL, parse_command
from torchtrain.config.registry import import_modules
from torchtrain.config.section import LocalPath, check_values
from torchtrain.environment import require_one_process
from torchtrain.errors import ConfigError
from torchtrain.files import require_picture, writing
from torchtrain.logging import output_width, wrapped


@dataclass(frozen=True)
class CompareOptions:
    run_a: Annotated[str, POSITIONAL]
    """A run's folder, or the URL of its checkpoints. The run may still be in progress."""
    run_b: Annotated[str, POSITIONAL] = ""
    """Another one."""
    against: LocalPath = ""
    """In place of RUN_B a Hugging Face folder: transformers' model and ours, from RUN_A's newest checkpoint, on one
    batch of RUN_A's data (pip install transformers)."""
    json: bool = False
    """Print JSON."""
    picture: LocalPath = ""
    """PNG file for a picture of both losses and their difference."""
    import_: tuple[str, ...] = ()
    """Python modules to import first, which register the model of the checkpoint (docs/adding-a-model.md)."""

    def __post_init__(self) -> None:
        check_values(self, "--")
        if bool(self.run_b) == bool(self.against):
            raise ConfigError("compare needs one of RUN_B and --against; see --help")
        if self.picture and self.against:
            raise ConfigError("--picture needs RUN_B: with --against there are no curves")
        if self.picture:
            require_picture(self.picture, "--picture")


@command
def main(argv: Sequence[str]) -> int:
    """Compare, and return the exit code of the process."""
    options = parse_command(CompareOptions, "compare", __doc__, argv)
    require_one_process("compare")
    import_modules(options.import_, "--import")
    # Not above: --help needs no torch.
    import torch.distributed as dist

    from torchtrain.plugins.comparison.implementations import compare_implementations
    from torchtrain.plugins.comparison.runs import compare_runs, open_run, plot_losses, verdict

    runs = [open_run(folder) for folder in (options.run_a, options.run_b) if folder]
    report = compare_implementations(runs[0], Path(options.against)) if options.against else compare_runs(*runs)
    if dist.is_initialized():
        dist.destroy_process_group()
    summary, match = verdict(report)
    if match is not False and not any(answer["match"] for title, answer in report.items() if title != "config"):
        raise ConfigError(
            "there is nothing to compare yet: the runs have no step in common that both have logged, saved, or "
            "written fingerprints of (--comparison.fingerprint_steps 1 2)"
        )
    if options.json:
        # JSON has no infinity: null.
        finite = json.loads(json.dumps({"match": match, "verdict": summary, **report}), parse_constant=lambda _: None)
        text = json.dumps(finite, indent=1)
    else:
        text = "".join("\n  ".join([f"{title}:", *answer["lines"]]) + "\n" for title, answer in report.items())
        text += summary
        if width := output_width():
            text = "\n".join(wrapped(line, width) for line in text.split("\n"))
    sys.stdout.write(f"{text}\n")
    if options.picture:
        with writing(options.picture, "--picture"):
            plot_losses(runs, options.picture)
    return {True: 0, False: 1, None: 3}[match]
