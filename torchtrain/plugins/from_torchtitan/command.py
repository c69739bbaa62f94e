"""Convert a TOML config of torchtitan: ``python -m torchtrain.convert_config theirs.toml --output ours.toml``.

Comments are kept. An option without a counterpart becomes a comment that says why, and is printed if it had an effect;
defaults of torchtitan's version that differ are written out. What is left to set is listed at the end, and printed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from torchtrain.cli import command
from torchtrain.config.command_options import POSITIONAL, parse_command
from torchtrain.config.parse import from_text, read_text
from torchtrain.config.section import LocalPath, check_values
from torchtrain.errors import ConfigError
from torchtrain.files import atomic_write, require_file, writing
from torchtrain.logging import logger


@dataclass(frozen=True)
class ConvertConfigOptions:
    file: Annotated[str, POSITIONAL]
    """TOML file of torchtitan."""
    output: LocalPath = ""
    """File to write, only if the converted config is valid. Empty: it is printed."""

    def __post_init__(self) -> None:
        check_values(self, "--")
        if self.output:
            require_file(self.output, "--output")
            if Path(self.output).exists():
                raise ConfigError(f"--output = {self.output!r} exists: name a new file, or remove it")


@command
def main(argv: Sequence[str]) -> int:
    """Convert the config, and return the exit code of the process: 2 if an option must be changed by hand."""
    options = parse_command(ConvertConfigOptions, "convert_config", __doc__, argv)
    from torchtrain.models.model_config import build_model_config  # not above: --help needs no PyTorch
    from torchtrain.plugins.from_torchtitan.conversion import convert_config

    text = read_text(options.file, "FILE")
    if Path(options.file).suffix == ".py":
        raise ConfigError(
            f"{options.file} is a Python config of torchtitan, which has no TOML files since 2026-02-23: this command "
            "reads those of its versions up to 0.2.2. Begin with a file of train_configs/, and set the options there: "
            "docs/from-torchtitan.md has torchtrain's name of each, and errors of torchtrain.train name it, too"
        )
    converted = convert_config(text, Path(options.file).name)
    if not options.output:
        sys.stdout.write(converted.text)
    for line in converted.left_out:
        logger.warning("left out: %s", line)
    for line in converted.to_set:
        logger.warning("to set: %s", line)
    config = from_text(converted.text, "the converted config")
    build_model_config(config.model, None, config.training.seq_len)
    if options.output:
        with writing(options.output, "--output"), atomic_write(Path(options.output)) as file:
            file.write(converted.text.encode())
        logger.info("written to %s", options.output)
    return 0
