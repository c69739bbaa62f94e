"""Pretrain a Llama model: ``torchrun -m torchtrain.train --job.config_file F``, or ``python -m`` for one rank."""

import os
import shlex
import traceback
from collections.abc import Sequence

from torchtrain import __version__
from torchtrain.cli import command, reports_errors, run_and_exit
from torchtrain.config.parse import parse
from torchtrain.config.registry import import_entry
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig
from torchtrain.environment import limit_error
from torchtrain.logging import counted, logger


@command
def main(argv: Sequence[str]) -> int:
    """Run the trainer; returns the exit code of the process."""
    config = parse(argv, print_help=reports_errors())
    # The import of PyTorch takes from three seconds to half a minute, on a busy machine or a slow file system.
    logger.info("torchtrain %s, %s: importing PyTorch", __version__, config.job.config_file or "no config file")
    try:
        return train(config)
    except RuntimeError as error:
        names = [type(of).__name__ for of in (error, error.__cause__)]  # a pipeline schedule wraps the error
        out_of_memory = "OutOfMemoryError" in names or "can't allocate memory" in str(error)  # CUDA, CPU
        if out_of_memory and not limit_error(error):
            traceback.print_exc()  # before the message, which is then the last that a person sees
            estimate = f"{shlex.join(argv)} --estimate.world_size {os.environ.get('WORLD_SIZE', '1')}"
            logger.error(
                f"error: out of memory: {str(error).splitlines()[0]}\n{memory_advice(config)}\nTo estimate the memory "
                "of this run, or with --estimate.search to find a layout that fits (docs/estimate.md): python -m "
                f"torchtrain.estimate {estimate}"
            )
            return 1
        raise


def memory_advice(config: JobConfig) -> str:
    """The batch of a rank, and the options that lower its memory."""
    training = config.training
    ways = []
    if training.local_batch_size > 1:
        ways.append("lower training.local_batch_size (with training.global_batch_size set, the run stays the same)")
    if config.activation_checkpoint.mode != "full":
        ways.append("set activation_checkpoint.mode = 'full'")
    ways += ["lower training.seq_len", "train a smaller model", "or shard it over more ranks"]
    return (
        f"A rank computes {counted(training.local_batch_size, 'sequence')} (training.local_batch_size) of "
        f"{training.seq_len:,} tokens (training.seq_len) at once: {', '.join(ways)}"
    )


def train(config: JobConfig) -> int:
    """Train as ``config`` says; returns the exit code of the process (see ``Trainer.train``)."""
    # Imported here because --help and a rejected config do not need torch, which takes seconds to import.
    from torchtrain.trainer import Trainer

    names = (section.trainer_class for section in config.plugins.values())
    name = next(filter(None, names), "")
    return plan_of(config).train(import_entry(name) if name else Trainer)


if __name__ == "__main__":
    run_and_exit(main)
