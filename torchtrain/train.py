"""Pretrain a Llama: ``torchrun -m torchtrain.train --job.config_file F``; on one rank ``python -m`` does, too."""

import gc
import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtrain.config.parse import parse, to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.environment import limit_error
from torchtrain.errors import DataError, StoppedError
from torchtrain.log import BestEffort, door, is_first_rank, logger, run_and_exit

if TYPE_CHECKING:
    from torchtrain.build import Loop, Run
    from torchtrain.faults.stopping import StopRequest


@door
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
    """Train from where the newest checkpoint stands, or from the beginning, to ``training.steps``.

    Returns 0, or the exit code of a run that stopped early because it was asked to.
    """
    # Here and not above: --help and a refused option need no torch.
    from torchtrain.build import build_loop, build_run, needs_validation
    from torchtrain.distributed.process_group import destroy_process_group, rank
    from torchtrain.export import check_export, export_hf, needs_export
    from torchtrain.faults.hangs import enable_flight_recorder
    from torchtrain.faults.stopping import StopRequest
    from torchtrain.metrics.beginning import describe
    from torchtrain.metrics.writers import set_aside_other_run
    from torchtrain.outputs import written_whole
    from torchtrain.run_plan import plan_run
    from torchtrain.shape import resolve_model
    from torchtrain.trained_model import with_longest_context

    config = with_longest_context(replace(config, model=resolve_model(config.model)))
    folder = Path(config.job.dump_folder)
    enable_flight_recorder(folder / "hangs")
    stop = StopRequest(config.faults)  # the wall-clock limit is that of the process: what follows may take minutes
    plan = plan_run(config)
    config = plan.config  # resolved: from here on there is one config, which checkpoints have, too
    check_export(config, plan.shape)
    run = build_run(config, plan, stop)  # may refuse to resume: before the run's config.toml is overwritten
    if rank() == 0:
        with BestEffort("renaming files of another run"):
            set_aside_other_run(folder, run.checkpoint.claim.run, resumed=run.step > 0)
        with BestEffort("config.toml"), written_whole(folder / "config.toml") as file:
            file.write(to_toml(config).encode())
    describe(config, plan.shape, plan.device, plan.degrees)
    steps, needed = config.training.steps, needs_validation(config, run)
    if run.step > steps or (run.step == steps and not needed and not needs_export(config, run.step, run.side_group)):
        logger.info("the run is complete: step %d of %d; to go on, raise training.steps", run.step, steps)
        destroy_process_group()
        return 0
    run_steps(config, run, build_loop(config, run, stop), stop, validate_first=needed)
    stopped = stop.agreed and (run.step < steps or needs_validation(config, run))
    if not stopped and needs_export(config, run.step, run.side_group):
        with stop.during_export(saved=config.checkpoint.enable):
            export_hf(config, run.step, run.checkpoint, run.plan.shape)
    at_end = "done" if run.step == steps else "the data ended (data.when_exhausted = 'stop')"
    ending = "stopped as asked" if stopped else at_end
    logger.info("%s: step %d of %d; everything lies in %s", ending, run.step, steps, folder)
    if not config.checkpoint.enable:
        kept = "only the weights in hf/ are" if config.checkpoint.last_save_in_hf and not stopped else "nothing is"
        logger.warning("checkpoint.enable = false: of what this run has learned, %s saved", kept)
    destroy_process_group()
    return StoppedError().exit_code if stopped else 0


def run_steps(config: JobConfig, run: "Run", loop: "Loop", stop: "StopRequest", *, validate_first: bool) -> None:
    """Train from the step after ``run.step`` to the last, or until the run is asked to stop or the data end.

    ``validate_first``: no process has finished the validation after ``run.step``: do so now, if one is due.
    """
    from torchtrain.build import needs_validation
    from torchtrain.distributed.process_group import set_timeout
    from torchtrain.faults.hangs import REPORT_SECONDS

    steps = config.training.steps
    checkpoint, guard, hangs, metrics = run.checkpoint, loop.guard, loop.hangs, loop.metrics
    gc.disable()  # all ranks collect garbage at the same step, below: none waits while another does
    with closing(run.plan.loader), metrics, loop.profiler, stop, hangs, checkpoint:
        if validate_first:
            with metrics.uncounted():
                loop.validator.maybe_run(run.step, run.step == steps)
        batches = metrics.time_waiting(run.plan.loader)
        made = 0  # the last step whose loss is at hand
        logger.info("training begins with step %d of %d", run.step + 1, steps)
        while run.step < steps and not stop.agreed:
            last = run.step + 1 == steps
            with hangs.watch(f"step {run.step + 1}"):
                batch = next(batches, None)
                if batch is None:
                    break
                run.step += 1
                made, (loss, grad_norm) = run.step, loop.train_step(run.step, batch)
                if last or checkpoint.is_due(run.step) or guard.steps_are_long:
                    guard.settle()  # no checkpoint, and no end, at a step that is not known to be good
            if guard.must_roll_back_before is not None:
                run.roll_back(guard.must_roll_back_before)
                guard.rolled_back()
                metrics.restart(run.step)
                continue
            metrics.record(run.step, loss, grad_norm, loop.schedule.rate(run.step))
            if checkpoint.is_due(run.step, last):
                with hangs.watch(f"save of step {run.step}"):
                    checkpoint.maybe_save(run.step, last)
            with metrics.uncounted():
                loop.validator.maybe_run(run.step, last)
            loop.profiler.step(run.step)
            if run.step == run.start_step + 1:  # the first step, which may compile and connects, is over
                hangs.set_timeout_after_first_step(config.comm.train_timeout_seconds, run.plan.device)
                set_timeout(hangs.timeout_seconds + REPORT_SECONDS, longer=[checkpoint.group])
            if run.step % config.training.gc_freq == 0:
                gc.collect(1)
        guard.settle()  # where the run ends before its last step
        if guard.must_roll_back_before is not None:
            run.roll_back(guard.must_roll_back_before)
        if run.start_step < run.step < steps:
            with hangs.watch(f"save of step {run.step}"):
                checkpoint.maybe_save(run.step, last=True, required=not stop.agreed)
            if made == run.step:
                metrics.record(run.step, loss, grad_norm, loop.schedule.rate(run.step), ended=True)
        if run.step < steps and not stop.agreed:  # the data end
            if run.step == 0:
                raise DataError(
                    "the data do not fill one batch, training.global_batch_size sequences of training.seq_len tokens: "
                    "give more, make batches smaller, or set data.when_exhausted = 'repeat'"
                )
            if needs_validation(config, run):
                loop.validator.maybe_run(run.step, last=True)


if __name__ == "__main__":
    run_and_exit(main)
