"""CPU seconds of a training step with losses by source and with norms by layer, relative to a step without them.

    python scripts/benchmarks/benchmark_metrics.py

Steps with and without these metrics alternate in one process with one thread, on the debug model.
"""

import statistics
import time
from argparse import ArgumentParser
from tempfile import TemporaryDirectory

import torch

from torchtrain.cli import run_and_exit
from torchtrain.config.parse import parse
from torchtrain.plugins.diagnostics.loss_by_source import LossBySource
from torchtrain.plugins.diagnostics.norms import NormsByLayer
from torchtrain.trainer import Trainer

KINDS = (None, LossBySource, NormsByLayer)
WARM_UP = 2


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of each kind")
    count = parser.parse_args().steps
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        options = ["--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", folder]
        options += ["--checkpoint.enable", "false", "--metrics.enable_tensorboard", "false"]
        options += ["--diagnostics.norms_freq", "1", "--diagnostics.enable_loss_by_source", "true"]
        trainer = Trainer(parse(options, "torchtrain.train", ""))
        hooks = list(trainer.hooks.all)
        for hook in hooks:
            if isinstance(hook, NormsByLayer):
                hook.report = lambda *_: None
        seconds: dict[object, list[float]] = {kind: [] for kind in KINDS}
        for step, batch in enumerate(trainer.dataloader):
            if step == count * len(KINDS):
                break
            kind = KINDS[step % len(KINDS)]
            trainer.hooks.all[:] = [hook for hook in hooks if kind is not None and isinstance(hook, kind)]
            before = time.process_time()
            trainer.train_step(step + 1, batch)
            seconds[kind].append(time.process_time() - before)
        print(f"{statistics.median(seconds[None][WARM_UP:]):.3f} CPU seconds per step")
        for kind in KINDS[1:]:
            ratios = [a / b for a, b in zip(seconds[kind][WARM_UP:], seconds[None][WARM_UP:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{kind.__name__}: {middle:.3f} times as many (quartiles {low:.3f} to {high:.3f})")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
