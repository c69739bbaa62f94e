"""Check a run without training it: ``python -m torchtrain.check RANKS --job.config_file F``."""

from collections.abc import Sequence

from torchtrain.cli import command, run_and_exit
from torchtrain.config.parse import parse
from torchtrain.errors import ConfigError
from torchtrain.logging import logger

CHECK = """Check a run on RANKS ranks without training it, such as before it is queued: python -m torchtrain.check RANKS
[options of the trainer]. One process validates the options for that number of ranks, loads the tokenizer, opens the
data, checks that the dump folder and the checkpoints can be written, and logs the description of the run."""


@command
def main(argv: Sequence[str]) -> int:
    """Check the run, and return the exit code of the process."""
    first, options = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    config = parse(options, "torchtrain.check", CHECK)
    if not (first.isdecimal() and int(first)):
        raise ConfigError(
            f"the first argument must be the number of ranks of the run, at least 1, not {first!r}: python -m "
            "torchtrain.check 8 --job.config_file ..."
        )
    logger.info("checking %s on %s ranks: importing PyTorch", config.job.config_file or "the options", first)
    from torchtrain.resolve import check_run

    check_run(config, int(first))
    logger.info("no errors found: nothing has been trained or stored")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
