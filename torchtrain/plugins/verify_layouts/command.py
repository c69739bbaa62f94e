"""Verify that a model trains the same run on every layout, on CPUs: ``python -m torchtrain.verify_layouts``.

Takes every option of the trainer, such as --job.config_file and --job.import. It makes the model of the config small,
trains a few steps in float64 on one rank and on each layout, and names the first tensor that differs. --bits compares
bits in the dtype of the config instead. It reads no data.

Exit code 0: all layouts are the same, or by default rejected by the config; 1: a layout differs, fails or hangs, or one
of --layouts is rejected; 2: the config is invalid, or no layout was compared. See docs/verify-layouts.md.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torchtrain.cli import command
from torchtrain.config.command_options import parse_command
from torchtrain.config.parse import parse
from torchtrain.config.section import Count, at_least, check_values
from torchtrain.environment import require_one_process
from torchtrain.errors import ConfigError
from torchtrain.logging import output_width, wrapped


@dataclass(frozen=True)
class VerifyOptions:
    layouts: tuple[str, ...] = ()
    """Layouts to verify, such as tensor=2 context=2,tensor=2,sequence_parallel=false pipeline=2,schedule=GPipe. By
    default each axis, pairs and triples of axes, and each pipeline schedule, on up to eight ranks."""
    ranks: Count = 8
    """Largest number of ranks, and so of processes, of the default layouts."""
    steps: Count = 2
    """Steps to train. The second one shows what the first update has done."""
    as_is: bool = False
    """Keep the sizes of the model and the sequence length of the config."""
    bits: bool = False
    """Train in the dtype of the config, with grains (docs/parallelism.md), and compare all bits: no tolerance."""
    timeout_seconds: Annotated[int, at_least(1)] = 120
    """Time after which a layout hangs, in seconds."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        check_values(self, "--")


@command
def main(argv: Sequence[str]) -> int:
    """Verify the layouts, and return the exit code of the process."""
    own, of_trainer = split(argv)
    options = parse_command(VerifyOptions, "verify_layouts", __doc__, own)
    require_one_process("verify_layouts")
    config = parse(of_trainer)
    # Not above: --help needs no torch.
    from torchtrain.plugins.verify_layouts.bits import bits_config
    from torchtrain.plugins.verify_layouts.layouts import default_layouts, parse_layout
    from torchtrain.plugins.verify_layouts.report import as_json, as_text, heading, summary
    from torchtrain.plugins.verify_layouts.small_config import describe_model, verified_config
    from torchtrain.plugins.verify_layouts.verification import verify

    layouts = [parse_layout(text) for text in options.layouts] or default_layouts(options.ranks)
    of_user = config
    config, model_config, replaced = verified_config(config, as_is=options.as_is, steps=options.steps)
    of_bits, dtype = None, "float64"
    if options.bits:
        of_bits, grains = bits_config(config, of_user, model_config)
        dtype = of_bits.training.mixed_precision_param
        replaced = [*(option for option in replaced if not option.startswith("training.sums")), grains]

    def show(text: str) -> None:
        if not options.json:
            width = output_width()
            sys.stdout.write("".join(f"{wrapped(line, width) if width else line}\n" for line in text.split("\n")))
            sys.stdout.flush()

    show(describe_model(model_config, dtype, replaced))
    show(heading(layouts))
    results = []
    for result in verify(config, model_config, layouts, options.timeout_seconds, of_bits):
        results.append(result)
        if options.layouts or result.verdict != "rejected":  # else in the summary
            show(as_text(result, layouts))
    show(summary(results, with_rejected=not options.layouts))
    if options.json:
        sys.stdout.write(f"{json.dumps(as_json(results), indent=1)}\n")
    if all(result.verdict == "rejected" for result in results):
        raise ConfigError("no layout was compared: the config allows none of them")
    good = ("same",) if options.layouts else ("same", "rejected")
    return 0 if all(result.verdict in good for result in results) else 1


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this command's own options, and those of the trainer's, whose names have a section and a dot."""
    own: list[str] = []
    of_trainer: list[str] = []
    current = own
    for word in argv:
        if word.startswith("--"):
            current = of_trainer if "." in word.partition("=")[0] else own
        current.append(word)
    return own, of_trainer
