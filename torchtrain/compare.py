"""Why two runs differ: ``python -m torchtrain.compare RUN_A RUN_B``. It names the first tensor that does.

Exit code 0: alike, to rounding at least; 1: they differ; 2: there is nothing to compare. See docs/compare.md.
"""

import os
import sys
from collections.abc import Sequence
from json import dumps
from pathlib import Path

import tyro
from tyro.conf import Positional

from torchtrain.errors import ConfigError
from torchtrain.log import door
from torchtrain.outputs import require_picture, writing


def compare(
    run_a: Positional[str], run_b: Positional[str] = "", *, against: str = "", json: bool = False, picture: str = ""
) -> int:
    """Compare, and say it; returns the exit code of the process.

    Args:
        run_a: A run's folder. The run may still go on.
        run_b: Another one.
        against: In place of RUN_B a Hugging Face folder: transformers' model and ours, from RUN_A's newest checkpoint,
            on the same tokens (pip install transformers).
        json: Print JSON.
        picture: PNG file for a picture of both losses and their difference (pip install 'torchtrain[plot]').
    """
    if bool(run_b) == bool(against) or (picture and not run_b):
        raise ConfigError("compare needs one of RUN_B and --against, and --picture needs RUN_B; see --help")
    if picture:
        require_picture(picture, "--picture")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("compare is the work of one process: start it without torchrun")
    # Not above: --help needs no torch.
    import torch.distributed as dist

    from torchtrain.comparison import runs
    from torchtrain.comparison.implementations import compare_implementations

    a = runs.open_run(Path(run_a))
    if against:
        report = {"computed": [compare_implementations(a.path, Path(against))]}
    else:
        b = runs.open_run(Path(run_b))
        report = {
            "config": list(runs.configs(a, b)),
            "logged": list(runs.curves(a, b)),
            "saved": list(runs.by_step(a, b, "checkpoint", runs.checkpoints)),
            "computed": list(runs.by_step(a, b, "fingerprints", runs.fingerprints)),
        }
    if dist.is_initialized():
        dist.destroy_process_group()
    verdicts = {line.alike for lines in report.values() for line in lines}
    alike = False not in verdicts
    if verdicts <= {None}:
        raise ConfigError(
            "there is nothing to compare yet: the runs have no step in common that both have logged, saved, or "
            "written fingerprints of (--debug.fingerprint_steps 1 2)"
        )
    if json:
        lists = {title: [line._asdict() for line in lines] for title, lines in report.items()}
        text = dumps({"alike": alike, **lists}, indent=1)
    else:
        answers = ("\n  ".join([f"{title}:", *(line.text for line in lines)]) for title, lines in report.items())
        text = "\n".join([*answers, "alike to rounding" if alike else "they differ"])
    sys.stdout.write(f"{text}\n")
    if picture:
        with writing(picture, "--picture"):
            runs.draw(a, b, picture)
    return int(not alike)


@door
def main(argv: Sequence[str]) -> int:
    """``compare`` with the arguments of the command line; returns the exit code of the process."""
    return tyro.cli(compare, prog="torchtrain.compare", description=__doc__, args=argv, use_underscores=True)


if __name__ == "__main__":
    sys.exit(main())
