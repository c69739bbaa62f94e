"""Plot the curves of one or more runs: python scripts/plot.py RUN [RUN ...] -o curves.png

RUN is a run's folder, or its metrics.jsonl. For steps that a restart repeated, the last value is plotted. A curve of
many points is smoothed; the pale line is the raw one. Dashed curves in the panel of the loss are validation losses. A
dashed vertical line marks a restart, a dotted one the beginning of a stage, a cross a fault, each in the color of its
run. The axis at the top shows the tokens of the first run. --x tokens plots over tokens instead, to compare runs with
other batches.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from matplotlib.figure import Figure

from torchtrain.errors import TorchtrainError
from torchtrain.metrics.history import read_run
from torchtrain.plugins.report.curves import PANELS, plot


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves.png"), help="default: curves.png")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="what to plot over; default: step")
    names = f"default: those for which a run has values, of {', '.join(PANELS)}"
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=(), metavar="PANEL", help=names)
    arguments = parser.parse_args(argv)
    formats = Figure().canvas.get_supported_filetypes()
    if arguments.output.suffix[1:].lower() not in formats:
        fail(f"--output {arguments.output} must end in one of {', '.join(sorted(formats))}")
    if not arguments.output.absolute().parent.is_dir():
        fail(f"--output {arguments.output}: its folder does not exist")
    try:
        runs = [read_run(path, warn=lambda message: print(message, file=sys.stderr)) for path in arguments.runs]
    except TorchtrainError as error:
        fail(str(error))
    for run in runs if arguments.x == "tokens" else ():
        if not any("tokens" in line for line in run.lines):
            fail(f"--x tokens: {run.name} was trained by a version that did not write tokens; plot it over steps")
    try:
        plot(runs, arguments.output, arguments.x, arguments.panels)
    except OSError as error:
        fail(f"--output {arguments.output} could not be written: {error.strerror}; free space, or name another file")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
