"""From a config to a run: the one place where the config meets the parts, for every command alike."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.checkpoint.hf import check_same_shape
from torchtrain.checkpoint.manager import CheckpointManager, Stop
from torchtrain.checkpoint.start import find_start
from torchtrain.checkpoint.states import LoaderState, ModelState, OptimizerState
from torchtrain.checkpoint.weights import find_weights, load_weights
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.devices import peak_flops
from torchtrain.distributed.agreement import of_first_rank
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import init_process_group, rank, set_timeout, side_group, world_size
from torchtrain.errors import FaultError
from torchtrain.faults.hangs import REPORT_SECONDS, HangWatch
from torchtrain.faults.stopping import StopRequest
from torchtrain.faults.update_guard import SpikeWindow, UpdateGuard
from torchtrain.float8 import compute_scales, gathers_float8
from torchtrain.initialization import layout_independent_init
from torchtrain.log import logger
from torchtrain.lr_schedule import LRSchedule
from torchtrain.metrics.recorder import MetricsRecorder
from torchtrain.metrics.writers import has_validation
from torchtrain.models.llama import Transformer
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.optimizers.averages import Averages
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model, initialize_buffers
from torchtrain.profiling import Profiler
from torchtrain.run_plan import Plan
from torchtrain.shape import given, longest_context, model_shape
from torchtrain.steps.fingerprinted_step import StepFunction, make_step
from torchtrain.trained_model import saved_config
from torchtrain.validation import Validator


@dataclass
class Run:
    """The parts of a run that is ready for its next step."""

    plan: Plan
    model: ParallelModel
    microbatches: Microbatches
    optimizer: torch.optim.Optimizer
    averages: Averages | None
    window: SpikeWindow
    checkpoint: CheckpointManager
    side_group: dist.ProcessGroup  # for small messages in CPU memory, all from the main thread
    start_step: int  # the step that this process starts after: that of the checkpoint it resumed from, or 0
    step: int  # the last step that is done

    def roll_back(self, bad_step: int) -> None:
        """Go back to the newest good checkpoint before ``bad_step``. Not in the data: the loader goes on where it is.

        Raises:
            FaultError: there is none.
        """
        step = self.checkpoint.roll_back(bad_step, only=("model", "optimizer", "ema"))
        if step is None:
            raise FaultError(
                f"faults.on_bad_numbers = 'rollback', but there is no good checkpoint before step {bad_step} to go "
                "back to; a lower optimizer.lr, another seed or on_bad_numbers = 'skip' may get past it"
            )
        self.step = step

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights."""
        assert self.averages is not None
        self.checkpoint.before_update()
        return self.averages.exchanged()


def use_deterministic_kernels() -> None:
    """In this process, from now on; RuntimeError where an operation has none. Call it before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else torch fills every new tensor with NaN, for code that reads uninitialized memory. A step does not.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_run(config: JobConfig, plan: Plan, stop: Stop | None = None) -> Run:
    """Let the ranks meet; make model, optimizer and place in the data, new or as in a checkpoint. Collective.

    In this order: meta device, parallelize, ``to_empty``, ``init_weights`` or load, optimizer. ``stop``: whether the
    run was asked to stop; None: it never is.
    """
    if config.training.deterministic:
        use_deterministic_kernels()
    if not dist.is_initialized():
        init_process_group(plan.device, config.comm.init_timeout_seconds)
    mesh = Mesh(plan.device, plan.degrees)
    model = build_parallel_model(plan.shape, mesh, plan.device, config)
    parts = model.parts
    folder = Path(config.job.dump_folder) / "checkpoint"
    config_toml = to_toml(plan.config)
    start = find_start(config.checkpoint, folder, config_toml, plan.loader.identity)
    fill(parts, config, plan, start.step)
    optimizer = build_optimizer(parts, config.optimizer, mesh, plan.shape)
    averages = Averages(parts, config.ema) if config.ema.enable else None
    model_state = ModelState(parts, plan.shape.tied_embeddings)
    if gathers_float8(config.float8, plan.degrees.fsdp):
        rescale = partial(compute_scales, parts)
        optimizer.register_step_post_hook(rescale)
        model_state.after_load = rescale  # not only by the hook: DCP steps the optimizer before it loads the weights
        if averages is not None:
            averages.after_exchange = rescale
    window = SpikeWindow(config.faults, plan.device)
    states: dict[str, Stateful | None] = {
        "model": model_state,
        "optimizer": OptimizerState(parts, optimizer),
        "ema": averages,
        "sums": model.sums,
        "spikes": window if config.faults.spike_threshold > 0 else None,
        "loader": LoaderState(plan.loader, mesh),
    }
    kept = {name: state for name, state in states.items() if state is not None}
    checkpoint = CheckpointManager(config.checkpoint, folder, kept, config_toml, start, stop)
    side = side_group(plan.device, config.comm.init_timeout_seconds)
    for loader in (plan.loader, *plan.validation_loaders.values()) if world_size() > 1 else ():
        loader.connect(side)
    step = checkpoint.resume() or 0
    # The mesh's groups have torch's default until now: 10 minutes of NCCL, 30 of gloo.
    set_timeout(config.comm.init_timeout_seconds + REPORT_SECONDS, longer=[start.group])
    microbatches = Microbatches(mesh, plan.device, config.training.local_batch_size, plan.document_start)
    return Run(plan, model, microbatches, optimizer, averages, window, checkpoint, side, step, step)


def fill(parts: Sequence[Transformer], config: JobConfig, plan: Plan, step: int | None) -> None:
    """Give ``parts`` their first values; only their buffers where the checkpoint of ``step`` overwrites all else."""
    initial = config.checkpoint.initial_load_path
    if step is None and not initial:
        initialize(parts, config.training.seed, plan.device)
        return
    initialize_buffers(parts, plan.device)
    if step is None:
        # No weight's shape depends on these: [model.shape] may change them, as for longer sequences.
        may_differ = {"rope_scaling", "rope_theta", "norm_eps"} & given(config.model.shape).keys()
        folder = find_weights(Path(initial))
        config_of_weights = of_first_rank(lambda: saved_config(folder))
        saved, longest = config_of_weights.model, longest_context(config_of_weights)
        if longest > plan.shape.max_seq_len:
            stated = longest_context(plan.config)
            logger.warning(
                f"{folder} has weights for sequences of {longest} tokens, and training.seq_len is "
                f"{plan.shape.max_seq_len}: exports of this run, evaluate and generate take {stated} as the longest "
                "context (model.shape.max_position_embeddings)"
            )
        saved = replace(saved, vocab_size=saved.vocab_size or plan.shape.vocab_size)  # None: that of its tokenizer
        check_same_shape(model_shape(saved, None, plan.shape.max_seq_len), plan.shape, folder, may_differ)
        load_weights(parts, folder, plan.shape)
        logger.info("starts from the weights in %s", initial)
    elif initial:
        logger.info(f"checkpoint.initial_load_path = {initial!r} is not used: the run resumes from its own step {step}")


@dataclass
class Loop:
    """What the training loop calls."""

    train_step: StepFunction
    schedule: LRSchedule
    guard: UpdateGuard
    validator: Validator
    metrics: MetricsRecorder
    profiler: Profiler
    hangs: HangWatch


def build_loop(config: JobConfig, run: Run, stop: StopRequest) -> Loop:
    """All that goes on around the steps of ``run``. Collective."""
    plan, folder = run.plan, Path(config.job.dump_folder)
    global_batch_size = plan.config.training.global_batch_size
    schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps)
    if config.training.steps > schedule.total and schedule.rate(config.training.steps) == 0:
        logger.warning(
            f"after step {schedule.total} (lr_scheduler.total_steps) the learning rate is 0: later steps, up to "
            f"training.steps = {config.training.steps}, change nothing; lengthen the schedule, or raise its floor, "
            "lr_scheduler.min_lr_factor"
        )
    metrics = MetricsRecorder(
        config.metrics,
        folder,
        device=plan.device,
        loss_group=run.model.mesh.loss.get_group(),
        side_group=run.side_group,
        tokens_per_step=global_batch_size * config.training.seq_len,
        flops_per_token=flops_per_token(plan.shape, config.training.seq_len),
        peak_flops=peak_flops(torch.cuda.get_device_name(plan.device)) if plan.device.type == "cuda" else None,
        start_step=run.start_step,
        last_step=config.training.steps,
        config_toml=to_toml(config),
        run=run.checkpoint.claim.run,
    )
    guard = UpdateGuard(config.faults, stop, run.window, metrics.record_event, run.checkpoint.clock)
    timeout_seconds = config.comm.init_timeout_seconds
    hangs = HangWatch(folder / "hangs", rank(), world_size(), timeout_seconds, doing=run.checkpoint.status)
    train_step = make_step(
        config,
        folder,
        global_batch_size,
        run.model,
        run.microbatches,
        run.optimizer,
        schedule,
        guard,
        max_norm=config.training.max_norm,
        before_update=run.checkpoint.before_update,
        averages=run.averages,
    )
    validator = Validator(
        config.validation,
        plan.validation_loaders,
        run.model,
        run.microbatches,
        metrics.record_validation,
        averaged=run.averaged,
        must_stop=partial(stop.agree, run.side_group),
        watch=hangs.watch,
    )
    profiler = Profiler(config.profiling, folder / "traces", rank(), plan.device, run.start_step)
    if config.compile.enable:
        logger.info("compiling: the first step may take a minute or two; later runs find most of it in a cache")
    return Loop(train_step, schedule, guard, validator, metrics, profiler, hangs)


def needs_validation(config: JobConfig, run: Run) -> bool:
    """Whether no process has finished a validation after ``run.step``, due or not; False with none on. Collective."""
    if not (config.validation.enable and run.step):
        return False
    file = Path(config.job.dump_folder) / "metrics.jsonl"
    return not of_first_rank(lambda: has_validation(file, run.step), run.side_group)


def initialize(parts: Sequence[Transformer], seed: int, device: torch.device) -> None:
    """Fill the parameters and buffers of ``parts``, sharded or not, as ``seed`` says."""
    with layout_independent_init(parts, seed):
        for part in parts:
            part.init_weights()
    initialize_buffers(parts, device)
