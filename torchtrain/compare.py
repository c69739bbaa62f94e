"""Why two runs differ: ``python -m torchtrain.compare RUN_A RUN_B``. It names the first tensor that does.

Exit code 0: alike, to rounding at least; 1: they differ; 2: there is nothing to compare. See docs/compare.md.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtrain.errors import ConfigError
from torchtrain.log import run_door
from torchtrain.outputs import require_picture, writing


@dataclass(frozen=True)
class Options:
    run_a: Annotated[str, tyro.conf.Positional]
    """A run's folder. The run may still go on."""
    run_b: Annotated[str, tyro.conf.Positional] = ""
    """Another one."""
    against: str = ""
    """In place of RUN_B a Hugging Face folder: transformers' model and ours, from RUN_A's newest checkpoint, on one
    batch of RUN_A's data (pip install transformers)."""
    json: bool = False
    """Print JSON."""
    picture: str = ""
    """PNG file for a picture of both losses and their difference (pip install 'torchtrain[plot]')."""

    def __post_init__(self) -> None:
        if bool(self.run_b) == bool(self.against):
            raise ConfigError("compare needs one of RUN_B and --against; see --help")
        if self.picture and self.against:
            raise ConfigError("--picture needs RUN_B: with --against there are no curves")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit code of the process."""

    def run() -> int:
        options = tyro.cli(Options, prog="torchtrain.compare", description=__doc__, args=argv, use_underscores=True)
        # Not above: --help needs no torch.
        import torch.distributed as dist

        from torchtrain.comparison.implementations import compare_implementations
        from torchtrain.comparison.runs import compare_runs, draw

        run_a = Path(options.run_a)
        if options.picture:
            require_picture(options.picture, "--picture")
        if options.against:
            report = compare_implementations(run_a, Path(options.against))
        else:
            report = compare_runs(run_a, Path(options.run_b))
        if dist.is_initialized():
            dist.destroy_process_group()
        alike = all(section.alike is not False for section in report)
        if alike and not any(section.alike for section in report if section.title != "config"):
            raise ConfigError(
                "there is nothing to compare yet: the runs have no step in common that both have logged, saved, or "
                "written fingerprints of (--debug.fingerprint_steps 1 2)"
            )
        if options.json:
            sections = {section.title: asdict(section) for section in report}
            sys.stdout.write(json.dumps({"alike": alike, **sections}, indent=1) + "\n")
        else:
            for section in report:
                sys.stdout.write("\n".join([f"{section.title}:", *(f"  {line}" for line in section.lines)]) + "\n")
            sys.stdout.write("alike to rounding\n" if alike else "they differ\n")
        if options.picture:
            with writing(options.picture, "--picture"):
                draw(run_a, Path(options.run_b), options.picture)
        return int(not alike)

    return run_door(run)


if __name__ == "__main__":
    sys.exit(main())
