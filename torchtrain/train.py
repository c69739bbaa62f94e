"""Pretrain a Llama: ``torchrun -m torchtrain.train --job.config_file F``; on one rank ``python -m`` does, too."""

import os
import shlex
from collections.abc import Sequence

from torchtrain.cli import command, is_first_rank, run_and_exit
from torchtrain.config.parse import parse
from torchtrain.config.schema import JobConfig
from torchtrain.environment import limit_error
from torchtrain.logging import logger


@command
def main(argv: Sequence[str]) -> int:
    """Run the trainer; returns the exit code of the process."""
    config = parse(argv, print_errors=is_first_rank())
    try:
        return train(config)
    except RuntimeError as error:
        names = [type(of).__name__ for of in (error, error.__cause__)]  # a pipeline raises another one from it
        allocates = "OutOfMemoryError" in names or "can't allocate memory" in str(error)  # CUDA, CPU
        if allocates and not limit_error(error):
            estimate = f"{shlex.join(argv)} --estimate.world_size {os.environ.get('WORLD_SIZE', '1')}"
            logger.error(
                f"{error}\nTo see where the memory of such a run goes, and what would fit: python -m "
                f"torchtrain.estimate {estimate}, with --estimate.search for a layout (docs/estimate.md)"
            )
        raise


def train(config: JobConfig) -> int:
    """Train as ``config`` says; returns the exit code of the process (see ``Trainer.train``)."""
    # Here and not above: --help and a config that is rejected need no torch.
    from torchtrain.trainer import Trainer

    trainer = Trainer(config)
    if config.debug.fingerprint_steps:
        from torchtrain.comparison.fingerprint_hook import FingerprintHook

        trainer.train_step.hooks.append(FingerprintHook(trainer.config, trainer.model))
    return trainer.train()


if __name__ == "__main__":
    run_and_exit(main)
