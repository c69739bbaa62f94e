"""Convert a config of torchtitan to one of torchtrain: ``python -m torchtrain.convert_config theirs.toml > ours.toml``.

Comments are kept. A key without a counterpart becomes a comment that says why, and defaults of torchtitan that differ
are written out. What is left to set is listed at the end, and printed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtrain.cli import command
from torchtrain.config.parse import from_text, read_text
from torchtrain.errors import ConfigError
from torchtrain.logging import logger


@dataclass(frozen=True)
class ConvertConfigOptions:
    file: Annotated[str, tyro.conf.Positional]
    """TOML file of torchtitan."""


@command
def main(argv: Sequence[str]) -> int:
    """Print the converted config, and return the exit code of the process: 2 if an option must be changed by hand."""
    options = tyro.cli(ConvertConfigOptions, prog="python -m torchtrain.convert_config", description=__doc__, args=argv)
    try:
        from torchtrain.plugins.from_torchtitan.conversion import convert_config
    except ImportError as error:
        raise ConfigError(
            f"this command needs the package tomlkit: pip install 'torchtrain[convert]' ({error})"
        ) from None
    text, to_set = convert_config(read_text(options.file), Path(options.file).name)
    sys.stdout.write(text)
    for line in to_set:
        logger.warning("to set: %s", line)
    from_text(text, "the converted config")
    return 0
