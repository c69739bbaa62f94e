"""Pretrain a Llama: ``torchrun -m torchtrain.train --job.config_file F`` or, alone, ``python -m torchtrain.train``."""

import gc
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchtrain.config.parse import parse, to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.errors import StoppedError
from torchtrain.log import BestEffort, logger, run_door


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trainer; returns the exit code of the process."""
    is_first = os.environ.get("RANK", "0") == "0"

    def run() -> int:
        options = sys.argv[1:] if argv is None else argv
        config = parse(options, print_errors=is_first)
        try:
            return train(config)
        except RuntimeError as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's
                ranks = os.environ.get("WORLD_SIZE", "1")
                logger.error(
                    "%s\nTo see where the memory of such a run goes, and what would fit: python -m torchtrain.estimate "
                    "%s --estimate.world_size %s, with --estimate.search for a layout (docs/estimate.md)",
                    error,
                    shlex.join(options),
                    ranks,
                )
            raise
        except StoppedError as error:
            from torchtrain.faults.stopping import exit_code_when_stopped

            error.exit_code = exit_code_when_stopped()
            raise

    return run_door(run, speaks=is_first)


def train(config: JobConfig) -> int:
    """Train from where the newest checkpoint stands, or from the beginning, to ``training.steps``.

    Returns 0, or the exit code of a run that was asked to stop before.
    """
    # Here and not above: --help and a refused option need no torch.
    import torch
    import torch.distributed as dist

    from torchtrain.build import build_run, describe, export_hf, plan_run
    from torchtrain.distributed.process_group import rank, set_timeout, world_size
    from torchtrain.faults.hangs import REPORT_SECONDS, HangWatch, enable_flight_recorder
    from torchtrain.faults.stopping import StopRequest, exit_code_when_stopped
    from torchtrain.faults.update_guard import UpdateGuard
    from torchtrain.lr_schedule import LRSchedule
    from torchtrain.metrics import MetricsRecorder
    from torchtrain.models.llama.flops import flops_per_token, peak_flops
    from torchtrain.profiling import Profiler
    from torchtrain.shape import resolve_model
    from torchtrain.train_step import step_maker
    from torchtrain.validation import Validator

    config = replace(config, model=resolve_model(config.model))
    folder = Path(config.job.dump_folder)
    enable_flight_recorder(folder / "hangs")
    plan = plan_run(config)
    if rank() == 0:
        with BestEffort("config.toml"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    stop = StopRequest(config.faults)
    run = build_run(config, plan, stop)
    describe(plan, config)
    steps, first_step = config.training.steps, run.step
    if run.step >= steps:
        logger.info("the run is complete: step %d of %d; to go on, raise training.steps", run.step, steps)
        dist.destroy_process_group()
        return 0

    schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, steps)
    metrics = MetricsRecorder(
        config.metrics,
        folder,
        device=plan.device,
        loss_group=run.model.mesh.loss.get_group(),
        side_group=run.side_group,
        tokens_per_step=plan.global_batch_size * config.training.seq_len,
        flops_per_token=flops_per_token(plan.model, config.training.seq_len),
        peak_flops=peak_flops(torch.cuda.get_device_name(plan.device)) if plan.device.type == "cuda" else None,
        first_step=first_step,
        last_step=steps,
        config_toml=to_toml(config),
    )
    guard = UpdateGuard(config.faults, stop, plan.device, metrics.record_event)
    hangs = HangWatch(
        folder / "hangs", rank(), world_size(), config.comm.init_timeout_seconds, doing=run.checkpoint.status
    )
    train_step = step_maker(config, folder, run.model, plan.global_batch_size)(
        run.model,
        run.microbatches,
        run.optimizer,
        schedule,
        guard,
        max_norm=config.training.max_norm,
        before_update=run.checkpoint.before_update,
    )
    validator = Validator(
        config.validation,
        plan.validation_loaders,
        run.model,
        run.microbatches,
        plan.tokenizer.token_bytes,
        metrics.record_validation,
        must_stop=partial(stop.agree, run.side_group),
        watch=hangs.watch,
    )
    profiler = Profiler(config.profiling, folder / "traces", rank(), plan.device, first_step)
    if config.compile.enable:
        logger.info("compiling: the first step may take a minute or two; later runs find most of it in a cache")
    gc.disable()  # one rank that collects garbage lets all others wait: all do it at once, below

    with closing(plan.loader), metrics, profiler, stop, hangs, run.checkpoint:
        batches = metrics.time_waiting(plan.loader)
        while run.step < steps and not stop.agreed:
            last = run.step + 1 == steps
            with hangs.watch(f"step {run.step + 1}"):
                batch = next(batches, None)
                if batch is None:
                    break
                run.step += 1
                loss, grad_norm = train_step(run.step, batch)
                if last or run.checkpoint.is_due(run.step):
                    guard.settle()  # no checkpoint, and no end, at a step that is not known to be good
            if guard.must_roll_back_before is not None:
                run.roll_back(guard.must_roll_back_before)
                guard.rolled_back()
                metrics.restart(run.step)
                continue
            metrics.record(run.step, loss, grad_norm, schedule.rate(run.step))
            with hangs.watch(f"save of step {run.step}"):
                run.checkpoint.maybe_save(run.step, last)
            with metrics.uncounted():
                validator.maybe_run(run.step, last)
            profiler.step()
            if run.step == first_step + 1:
                hangs.timeout_seconds = config.comm.train_timeout_seconds
                set_timeout(hangs.timeout_seconds + REPORT_SECONDS, longer=[run.checkpoint.group])
            if run.step % config.training.gc_freq == 0:
                gc.collect(1)
        guard.settle()  # where the run ends before its last step
        if guard.must_roll_back_before is not None:
            run.roll_back(guard.must_roll_back_before)
        if first_step < run.step < steps:
            with hangs.watch(f"save of step {run.step}"):
                run.checkpoint.maybe_save(run.step, last=True, required=not stop.agreed)

    if run.step == steps and config.checkpoint.last_save_in_hf:
        export_hf(config, run)
    stopped = stop.agreed and run.step < steps
    data_ended = run.step < steps and not stopped
    ending = "stopped as asked" if stopped else "the data end (data.when_exhausted = 'stop')" if data_ended else "done"
    logger.info("%s: step %d of %d; everything lies in %s", ending, run.step, steps, folder)
    dist.destroy_process_group()
    return exit_code_when_stopped() if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
