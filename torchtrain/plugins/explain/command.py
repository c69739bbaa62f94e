"""List the documents in a step of a run, the most unusual first: ``python -m torchtrain.explain RUN --step N``.

Losses and gradients are those under the weights before the step. Nothing is written into the run's folder. See
docs/explain.md.
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
from torchtrain.config.section import Count, LocalPath, check_values
from torchtrain.environment import require_one_process
from torchtrain.errors import ConfigError
from torchtrain.files import require_file, writing

CANDIDATES = 20  # documents whose share of the gradient is computed


@dataclass(frozen=True)
class ExplainOptions:
    run: Annotated[str, POSITIONAL]
    """A run's folder. The run may still be in progress."""
    step: int
    """The step, from 1 on."""
    rows: tuple[int, ...] = ()
    """Rows of the global batch, from 0 on; by default all."""
    top: Count = 20
    """Number of documents to list, those with the highest scores."""
    json: bool = False
    """Print JSON."""
    html: LocalPath = ""
    """HTML file for a page with the loss of each token."""
    gradients: bool = False
    """Also list the norm of the gradient of each row, and its share in that of the step."""
    without_gradients: bool = False
    """Compare losses and texts only: no row has a backward, and no memory is needed for gradients."""
    exclude_to: LocalPath = ""
    """File for the documents that are listed, for data.exclude: a run without them."""
    without_weights: bool = False
    """List all documents in the order of the batch, without losses: only the data are read."""
    import_: tuple[str, ...] = ()
    """Python modules to import first, which register components of the run."""

    def __post_init__(self) -> None:
        check_values(self, "--")
        if self.html and self.without_weights:
            raise ConfigError("--html shows the losses of tokens: leave out --without_weights")
        if self.gradients and self.without_weights:
            raise ConfigError("--gradients needs the weights: leave out --without_weights")
        if self.gradients and self.without_gradients:
            raise ConfigError("--gradients and --without_gradients exclude each other: leave out one of them")
        if self.html:
            require_file(self.html, "--html")
        if self.exclude_to:
            require_file(self.exclude_to, "--exclude_to")


@command
def main(argv: Sequence[str]) -> int:
    """List the documents, and return the exit code of the process."""
    options = parse_command(ExplainOptions, "explain", __doc__, argv)
    require_one_process("explain")
    import_modules(options.import_, "--import")
    # Not above: --help needs no torch.
    from torchtrain.plugins.explain.explanation import explain
    from torchtrain.plugins.explain.report import as_exclusions, as_json, as_page, as_text
    from torchtrain.plugins.explain.run import open_run

    run = open_run(options.run, options.step, options.rows)
    explanation = explain(
        run,
        with_weights=not options.without_weights,
        candidates=0 if options.without_gradients else max(CANDIDATES, options.top),
        with_row_gradients=options.gradients,
        for_exclusion=bool(options.exclude_to),
    )
    top = None if options.without_weights else options.top
    if options.exclude_to:
        with writing(options.exclude_to, "--exclude_to"):
            Path(options.exclude_to).write_text(as_exclusions(explanation, top), encoding="utf-8")
    if options.html:
        with writing(options.html, "--html"):
            Path(options.html).write_bytes(printable(as_page(explanation, options.top)).encode())
    text = json.dumps(as_json(explanation, top), indent=1) if options.json else as_text(explanation, top)
    sys.stdout.write(f"{printable(text)}\n")
    return 0


def printable(text: str) -> str:
    """``text`` with an escape for each byte of a file name that is not UTF-8, which is a surrogate."""
    return text.encode("utf-8", "backslashreplace").decode()
