"""The trainer: a training run from its config to its final checkpoint, readable from top to bottom.

``Trainer.__init__`` builds all components in a fixed order, ``Trainer.train`` runs the training loop, and ``TrainStep``
performs one optimizer step. Only this file determines the order of the components; they do not depend on it themselves.
"""

import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.checkpoint.resume import HeldLease, ResumePoint, find_resume_point
from torchtrain.checkpoint.resume_compatibility import hash_of_changes, is_same_run
from torchtrain.checkpoint.saved_run import SavedRun
from torchtrain.checkpoint.states import LoaderState, ModelState
from torchtrain.checkpoint.storage import StoredCheckpoint, checkpoint_storage
from torchtrain.checkpoint.weights import (
    check_same_architecture,
    find_weights,
    load_weights,
    saved_config,
)
from torchtrain.config.parse import to_toml
from torchtrain.config.registry import HOOKS
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.datasets.build import build_loaders, document_start
from torchtrain.datasets.dataloader import Batch
from torchtrain.devices import peak_flops
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks, on_all_ranks, on_rank0
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import (
    Rendezvous,
    all_reduce,
    destroy_process_group,
    env_int,
    gloo_group,
    init_process_group,
    pick_device,
    rank,
    set_timeout,
    world_size,
)
from torchtrain.distributed.replicas import Replicas
from torchtrain.errors import FaultError, StoppedError, TorchtrainError
from torchtrain.fault_tolerance.nonfinite_guard import NonFiniteGuard, SpikeDetector
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.fault_tolerance.watchdog import REPORT_SECONDS, Watchdog, enable_flight_recorder
from torchtrain.files import atomic_write, require_folder
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import BestEffort, logger
from torchtrain.metrics.history import validation_losses
from torchtrain.metrics.hooks import Hook, Hooks
from torchtrain.metrics.profiler import Profiler
from torchtrain.metrics.recorder import MetricsRecorder
from torchtrain.metrics.results import log_results, run_results
from torchtrain.metrics.run_description import describe_run, warn_about_checkpoints, warn_about_validation
from torchtrain.metrics.validation import Validator
from torchtrain.metrics.writers import has_validation, last_start, rename_files_of_other_run
from torchtrain.models.initialization import layout_independent_init
from torchtrain.models.loss import TokenLoss, exact_nats
from torchtrain.models.model_config import (
    build_model_config,
    given,
    longest_context,
)
from torchtrain.models.spec import Decoder, DecoderConfig, flops_per_token
from torchtrain.optimizers.clipping import clip_grad_norm
from torchtrain.optimizers.container import OptimizerContainer
from torchtrain.optimizers.ema import EMA
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.parallelisms.attention_backend import choose_attention_backend
from torchtrain.parallelisms.linear_conversion import linear_conversion
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model, initialize_buffers
from torchtrain.resolve import (
    ResolvedRun,
    check_config,
    require_choice,
    require_possible_folder,
    resolve,
    with_pinned_data,
)


class Trainer:
    """Trains the model described by ``config``. Every rank creates a Trainer; all methods are collective.

    Raises:
        ConfigError, DataError: the config is invalid, or its data cannot be used for training.
        CheckpointError: checkpoints exist, but none of them can be resumed from.
        StorageError: a file system, the network or another rank does not respond.
    """

    step: int
    """The optimizer step that is being executed or was executed last, counted from 1; 0 before the first one."""
    takes_lease = True
    """Whether the writer lease of the checkpoints is acquired at the start; see ``find_resume_point``."""

    def __init__(
        self,
        config: JobConfig,
        rendezvous: Rendezvous | None = None,
        stop: StopRequest | None = None,
        held: HeldLease | None = None,
    ) -> None:
        # First, because the wall-clock limit counts from the start of the process, and setup may take minutes.
        self.stop = StopRequest(config.faults) if stop is None else stop
        self.device = pick_device(config.job.device)
        run = self.resolve_and_check(config)
        self.init_process_groups(run.config, rendezvous)
        self.complete_config(run)
        self.open_outputs()  # before the data, because text may take hours to tokenize
        self.build_loaders()
        self.create_dump_folder()

        self.hooks = Hooks()
        self.build_model()
        resume_point = self.find_resume_point(held)
        self.init_or_load_weights(resume_point.step)
        self.build_optimizer()  # after to_empty, which replaces parameters
        self.build_checkpointer(resume_point)
        self.step = self.start_step = self.load_checkpoint()
        self.set_timeouts(resume_point)
        self.build_step()

    def resolve_and_check(self, config: JobConfig) -> ResolvedRun:
        """Resolve and check the config before process-group initialization, so that a mistake in it is reported within
        seconds, on any number of ranks."""
        self.saved = SavedRun(config)
        run = resolve(config, world_size(), self.saved)
        check_config(run, self.device, self.saved)
        require_choice(config)
        self.tokenizer, self.model_config, self.parallel_dims = run.tokenizer, run.model_config, run.parallel_dims
        return run

    def init_process_groups(self, config: JobConfig, rendezvous: Rendezvous | None) -> None:
        """Build the ``mesh``, whose dimensions are those along which ranks communicate, and a ``gloo_group`` of all."""
        # Of a run in stages also "auto", which undoes the choice of the stage before.
        if config.training.attention_backend != "auto" or plan_of(config).has_stages:
            choose_attention_backend(config.training.attention_backend)
        enable_flight_recorder(Path(config.job.dump_folder) / "hangs")
        if config.training.deterministic:
            use_deterministic_kernels()
        init_process_group(self.device, config.comm.init_timeout_seconds, rendezvous)
        self.mesh = Mesh(self.device, self.parallel_dims, self.build_replicas(config))
        self.gloo_group = gloo_group(self.device, config.comm.init_timeout_seconds)

    def complete_config(self, run: ResolvedRun) -> None:
        """Set ``config``, which from here on includes what may change in the course of a run, such as a revision of the
        data, and what follows from it."""
        self.config = on_rank0(partial(with_pinned_data, run.config, self.saved), self.gloo_group)
        self.config_toml = to_toml(self.config)
        self.plan = plan_of(self.config)
        self.folder = Path(self.config.job.dump_folder)
        self.run_folder = self.find_run_folder()

    def open_outputs(self) -> None:
        """Open the ``storage`` of the checkpoints. Raise an error if it, or the dump folder, cannot be written; nothing
        is left there."""
        folder = self.config.job.dump_folder
        on_rank0(partial(require_possible_folder, folder, "job.dump_folder"), self.gloo_group)
        self.storage = checkpoint_storage(self.config)
        if self.config.checkpoint.enable:
            # Nodes may have different credentials.
            is_first_of_node = env_int("LOCAL_RANK", 0) == 0
            on_all_ranks(lambda: self.storage.check_access() if is_first_of_node else None, self.gloo_group)

    def build_loaders(self) -> None:
        """Open the data, and build the ``dataloader`` and the ``validation_loaders`` by label, for this rank's rows."""
        dims = self.parallel_dims
        count = self.config.training.global_batch_size // dims.batch
        first = dims.batch_rank(rank()) * count
        self.dataloader, self.validation_loaders = build_loaders(
            self.config,
            self.tokenizer,
            range(first, first + count),
            self.device,
            self.gloo_group if world_size() > 1 else None,
        )
        self.dataloader.stop = self.stop

    def create_dump_folder(self) -> None:
        """Create the dump folder, or raise an error if it cannot be written."""
        # After the checks of the config and the data, so that a rejected run leaves no folder behind.
        label = f"job.dump_folder = {self.config.job.dump_folder!r}"
        on_all_ranks(partial(require_folder, self.folder, label), self.gloo_group)

    def build_model(self) -> None:
        """Build the parallelized ``model``, whose parameters have memory and no values yet."""
        # On the meta device, parallelized, then to_empty.
        build = build_cpu_model if self.device.type == "cpu" else build_parallel_model
        self.model = build(self.model_config, self.mesh, self.device, self.config)
        self.linear_conversion = linear_conversion(self.config)

    def find_resume_point(
        self, held: HeldLease | None, group: torch.distributed.ProcessGroup | None = None
    ) -> ResumePoint:
        """Select the checkpoint to resume from, and acquire the writer lease. The arguments: see the function."""
        return find_resume_point(
            self.config.checkpoint,
            self.storage,
            self.config_toml,
            lambda: self.dataloader.identity,
            held,
            data_files=lambda: [source.file_table() for source in self.dataloader.sources],
            takes_lease=self.takes_lease,
            group=group,
            is_same_run=partial(
                is_same_run, last_start(self.run_folder / "metrics.jsonl"), hash_of_changes(self.config_toml)
            ),
        )

    def build_optimizer(self) -> None:
        """Build the ``optimizer``, its ``schedule``, and what else follows the weights."""
        config, model_parts = self.config, self.model.model_parts
        self.optimizer = build_optimizer(model_parts, config.optimizer, self.mesh, self.model_config)
        if self.device.type == "cpu":
            use_cpu_kernels(self.optimizer)
        self.schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps)
        warn_of_zero_rate(self.schedule, config.training.steps)
        self.ema = EMA(model_parts, config.ema) if config.ema.enable else None
        self.spikes = SpikeDetector(config.faults, self.device)
        self.model_state = ModelState(model_parts, self.model_config.tied_embeddings)
        # All that changes the weights.
        self.optimizer.after_step = self.model_state.after_load = self.weights_changed
        if self.ema is not None:
            self.ema.after_swap = self.weights_changed

    def build_checkpointer(self, resume_point: ResumePoint) -> None:
        """Build the ``checkpointer``, which saves and loads all state that the next step depends on."""
        self.output_copies = self.storage.output_copies(
            self.run_folder, lambda: self.hooks.kept_files, self.write_kept_files
        )
        self.checkpointer = CheckpointManager(
            self.config.checkpoint,
            self.storage,
            self.states(),
            self.config_toml,
            resume_point,
            self.stop,
            self.output_copies,
            step_group=self.gloo_group,
            validation_losses=partial(validation_losses, self.run_folder),
        )

    def load_checkpoint(self) -> int:
        """Load the checkpoint to resume from; returns its step, 0 in a new run."""
        return self.checkpointer.resume() or 0

    @property
    def resumes_from(self) -> str:
        """What has the state from which training continues, for messages."""
        return self.checkpointer.loaded

    def set_timeouts(self, resume_point: ResumePoint) -> None:
        """Set the timeouts of the mesh's process groups, which are torch's defaults until here: 10 minutes for NCCL, 30
        for gloo."""
        set_timeout(self.config.comm.init_timeout_seconds + REPORT_SECONDS, longer=[resume_point.group])

    def build_step(self) -> None:
        """Build ``train_step`` and what accompanies it: metrics, watchdog, guard, validation, profiling, hooks."""
        config, device = self.config, self.device
        self.description = describe_run(
            config,
            self.model_config,
            device,
            self.parallel_dims,
            self.dataloader.sources,
            self.tokenizer,
            self.start_step,
            self.resumes_from,
        )
        self.metrics = self.build_metrics()
        self.watchdog = Watchdog(
            self.folder / "hangs",
            rank(),
            world_size(),
            config.comm.init_timeout_seconds,
            doing=self.checkpointer.status,
            synchronize=partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None,
            hosts=gather_from_all_ranks(socket.gethostname, self.gloo_group),
        )
        self.guard = NonFiniteGuard(config.faults, self.metrics.record_event)
        self.step_check = StepCheck(
            self.guard,
            self.spikes,
            self.stop,
            self.checkpointer.clock,
            # A step after a bad one takes a batch that a rollback does not give back: that must not depend on time.
            needs_result=lambda step: (
                config.faults.on_nonfinite == "rollback"
                or step == config.training.steps
                or self.checkpointer.is_due(step)
            ),
        )
        microbatches = Microbatches(
            self.mesh, device, config.training.local_batch_size, document_start(config, self.tokenizer)
        )
        self.train_step = TrainStep(
            self.model,
            microbatches,
            self.optimizer,
            self.schedule,
            self.step_check,
            max_norm=config.training.max_norm,
            wait_for_copies=self.checkpointer.wait_for_copies,
            ema=self.ema,
            hooks=self.hooks,
        )
        self.validator = self.build_validator(microbatches)
        self.profiler = Profiler(
            config.profiling, self.folder / "traces", rank(), device, self.start_step, self.metrics.untimed
        )
        self.hooks.add([HOOKS[name](self) for name in HOOKS])
        self.hooks.begin_interval()

    def build_replicas(self, config: JobConfig) -> Replicas:  # noqa: ARG002
        """What connects this job with other replicas: here nothing."""
        return Replicas()

    def find_run_folder(self) -> Path:
        """The folder with the metrics and exports of the run: here that of this job's outputs."""
        return self.folder

    def build_metrics(self) -> MetricsRecorder:
        """The recorder of metrics, which is opened when training begins."""
        config, device = self.config, self.device
        return MetricsRecorder(
            config.metrics,
            self.folder,
            device=device,
            loss_group=self.mesh.loss.get_group(),
            tokens_per_step=config.training.global_batch_size * config.training.seq_len,
            tokens_after=self.plan.tokens_after,
            stage=config.job.stage,
            flops_per_token=flops_per_token(self.model_config, config.training.seq_len),
            peak_flops=peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
            start_step=self.start_step,
            last_step=config.training.steps,
            config_toml=self.config_toml,
            run=self.checkpointer.lease.run,
            generation=self.checkpointer.lease.generation,
            options=hash_of_changes(self.config_toml),
            data=self.checkpointer.start.data,
            description=self.description.record,
            hooks=self.hooks,
        )

    def build_validator(self, microbatches: Microbatches) -> Validator | None:
        """The validator; None if there are no held-out data."""
        if not self.config.validates:
            return None
        return Validator(
            self.config.validation,
            self.validation_loaders,
            self.model,
            microbatches,
            self.metrics.record_validation,
            averaged=self.averaged_weights,
            must_stop=partial(self.stop.agree, self.gloo_group),
            watch=self.watchdog.watch,
            hooks=self.hooks,
        )

    def states(self) -> dict[str, Stateful]:
        """The state that a checkpoint contains, as ``Stateful`` objects by name."""
        states: dict[str, Stateful | None] = {
            "model": self.model_state,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "sums": self.model.reducer.state,
            "spikes": self.spikes if self.config.faults.spike_threshold > 0 else None,
            "loader": LoaderState(self.dataloader, self.mesh),
        }
        return {name: state for name, state in states.items() if state is not None}

    def weights_changed(self) -> None:
        """Called whenever the weights have changed: for converted linear layers."""
        if self.linear_conversion is not None:
            self.linear_conversion.after_change(self.model.model_parts, self.parallel_dims.fsdp)

    def init_or_load_weights(self, resume_step: int | None) -> None:
        """Initialize the model, or load its weights from ``checkpoint.initial_load_path``.

        If ``resume_step`` is given, only buffers are initialized: the checkpoint of that step contains all parameters.
        """
        config, model_parts = self.config, self.model.model_parts
        initial = config.checkpoint.initial_load_path
        if resume_step is None and not initial:
            initialize(model_parts, config.training.seed, self.device)
            self.weights_changed()
            return
        initialize_buffers(model_parts, self.device)
        if resume_step is not None:
            if initial:
                logger.info(
                    f"checkpoint.initial_load_path = {initial!r} is not used: the run resumes from its own step "
                    f"{resume_step}"
                )
            return
        folder = find_weights(initial)
        saved = broadcast_from_rank0(lambda: saved_config(folder))
        check_initial_weights(saved, config, self.model_config, folder)
        load_weights(model_parts, folder, self.model_config)
        self.weights_changed()
        logger.info("starts from the weights in %s", initial)

    def train(self) -> int:
        """Train until ``training.steps``, the end of the data, or a stop request.

        Returns the exit code of the process: 0, or that of ``StoppedError`` if the run was stopped before its end. The
        end of a stage of the run is the end of the run only for the last stage, or if the data have ended.
        """
        self.prepare_dump_folder()
        self.log_beginning()
        missed_validation, stopped = self.misses_validation(), False
        if self.has_work(missed_validation):
            with self.running():
                if missed_validation:
                    self.run_validation(last=self.step == self.config.training.steps)
                self.run_steps()
                self.hooks.after_last_step()
            stopped = self.was_stopped()
            if not stopped:
                self.export()
            if stopped or not self.is_between_stages:
                self.log_end(stopped)
        else:
            self.log_completion()
        destroy_process_group()
        return StoppedError().exit_code if stopped else 0

    def log_beginning(self) -> None:
        """Log what the run is."""
        self.description.log()
        warn_about_validation(self.config.validation)
        warn_about_checkpoints(self.config, self.model_config, self.start_step)

    def has_work(self, missed_validation: bool) -> bool:
        """Whether steps are left, or the last step of the run lacks its validation or an export."""
        steps = self.config.training.steps
        return self.step < steps or (self.step == steps and (missed_validation or bool(self.missing_exports())))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager of the training loop: all that has threads, files or handlers of signals is closed after."""
        gc.disable()  # run_steps collects garbage at the same step on all ranks, so that no rank waits for another's
        try:
            with (
                self.stop.explaining_lost_ranks(),
                closing(self.dataloader),
                self.metrics,
                self.profiler,
                self.stop,
                self.watchdog,
                self.checkpointer,
            ):
                yield
        finally:
            gc.enable()

    def was_stopped(self) -> bool:
        """Whether the run was asked to stop, and is not complete."""
        stopped = self.stop.agreed and (self.step < self.config.training.steps or self.misses_validation())
        if self.is_between_stages:
            stopped = stopped or self.stop.agree(self.gloo_group)
        return stopped

    def export(self) -> None:
        """Let the hooks export the weights of the last step."""
        if missing := self.missing_exports():
            with self.stop.during_export(saved=self.config.checkpoint.enable):
                for hook in missing:
                    hook.export(self.step)

    def log_completion(self) -> None:
        """Log that nothing is left of the run, or of its stage."""
        if self.is_between_stages:
            logger.info("stage %r is complete: step %d", self.config.job.stage, self.step)
        else:
            steps, way = self.config.training.steps, self.plan.way_to_continue
            logger.info("the run is complete: step %d of %d; to continue it, %s", self.step, steps, way)

    def log_end(self, stopped: bool) -> None:
        """Log how the run ended and where its outputs are."""
        checkpoint = self.config.checkpoint
        steps = self.plan.last_step
        if stopped:
            ending = "stopped as requested"
        elif self.step >= self.config.training.steps:
            ending = "done"
        else:
            ending = "the data ended (data.when_exhausted = 'stop')"
        logger.info("%s: step %d of %d; outputs are in %s", ending, self.step, steps, self.run_folder)
        if rank() == 0:
            log_results(self.config_of_run(), self.description, self.step, self.hooks, is_complete=not stopped)
            if checkpoint.enable and not stopped:  # a run that is stopped has little time left
                self.output_copies.store()

    def prepare_dump_folder(self) -> None:
        """Rename files of another run, restore the metrics in the checkpoint, and write the resolved config."""
        if rank() == 0:
            with BestEffort("renaming files of another run"):
                rename_files_of_other_run(self.folder, self.checkpointer.lease.run, resumed=self.step > 0)
            self.restore_outputs()
            with BestEffort("config.toml"), atomic_write(self.folder / "config.toml") as file:
                file.write(self.config_toml.encode())

    def restore_outputs(self) -> None:
        """Restore the metrics in the checkpoint that the run resumes from. On rank 0."""
        self.checkpointer.restore_outputs()

    def write_kept_files(self, step: int) -> None:
        """Let the hooks write what is kept after the save of ``step``. On rank 0, in the thread of the save."""
        with suppress(TorchtrainError):  # no step has been logged yet
            config = self.config_of_run()
            results = run_results(config, self.description, step, is_complete=False, warn=logger.debug)
            self.hooks.write_kept_files(results)

    def run_steps(self) -> None:
        """The training loop: train steps with metrics, checkpoints, validation and rollbacks."""
        steps = self.config.training.steps
        batches = self.metrics.time_waiting(self.dataloader)
        if self.step < steps:  # else only the last validation or an export is missing
            if self.config.compile.enable:
                logger.info("compiling: the first step may take a minute or two; later runs find most of it in a cache")
            logger.info("training begins with step %d of %d", self.step + 1, steps)
        while self.step < steps and not self.stop.agreed:  # the step check sets it, on all ranks after the same step
            taken = self.take_step(batches)
            if taken is None:
                break
            loss, grad_norm = taken
            if self.guard.must_roll_back_before is not None:
                self.roll_back()
                continue
            self.metrics.record(self.step, loss, grad_norm, self.schedule.rate(self.step))
            self.save(last=self.step == steps)
            self.run_validation(last=self.step == steps)
            if self.step == self.start_step + 1:
                self.shorten_timeouts()
            self.profiler.step(self.step)
            if self.step % self.config.training.gc_freq == 0:
                gc.collect(1)
        if self.step < steps:
            self.end_early()

    def take_step(self, batches: Iterator[Batch]) -> tuple[TokenLoss, Tensor] | None:
        """Train on the next batch; returns what ``TrainStep`` does, or None if there is no step to take."""
        with self.watchdog.watch(f"step {self.step + 1}"):
            batch = next(batches, None)
            if batch is None:
                return None
            self.step += 1
            result = self.train_step(self.step, batch)
            self.step_check.wait_if_needed(self.step)
        return result

    def end_early(self) -> None:
        """Complete a run that ends before ``training.steps``, on a stop request or because the data ended.

        The last step is checked, saved and logged like the final step of a run.
        """
        self.step_check.wait()
        if self.guard.must_roll_back_before is not None:
            self.roll_back()
        if self.step > self.start_step:
            self.save(last=True, required=not self.stop.agreed)
            self.metrics.record_last()
        if not self.stop.agreed and self.misses_validation():
            self.run_validation(last=True)

    def save(self, last: bool, *, required: bool = True) -> None:
        """Save a checkpoint if one is due; see ``CheckpointManager.maybe_save``."""
        if self.checkpointer.is_due(self.step, last):
            with self.watchdog.watch(f"save of step {self.step}"):
                self.checkpointer.maybe_save(self.step, last, required)

    def run_validation(self, last: bool) -> None:
        """Run validation if it is due; its time does not count as training time in the metrics."""
        if self.validator is not None:
            with self.metrics.untimed():
                self.validator.maybe_run(self.step, last)

    def misses_validation(self) -> bool:
        """Whether no validation after the current step has been recorded, due or not; False if validation is off."""
        if not (self.config.validates and self.step):
            return False
        file = self.run_folder / "metrics.jsonl"
        return not broadcast_from_rank0(lambda: has_validation(file, self.step), self.gloo_group)

    @property
    def is_between_stages(self) -> bool:
        """Whether the current step is the last of a stage of the run that another one follows."""
        return not self.plan.is_last and self.step >= self.config.training.steps

    def missing_exports(self) -> list[Hook]:
        """The hooks that have not exported the weights of the current step, the last one."""
        return [] if self.is_between_stages else self.hooks.missing_exports(self.step)

    def config_of_run(self) -> JobConfig:
        """The config, with the folder of the run."""
        return replace(self.config, job=replace(self.config.job, dump_folder=str(self.run_folder)))

    def roll_back(self) -> None:
        """Load the newest valid checkpoint from before the bad step. The data loader is not rewound.

        Raises:
            FaultError: no such checkpoint exists.
        """
        bad_step = self.guard.must_roll_back_before
        assert bad_step is not None
        step = self.checkpointer.roll_back(bad_step, only=("model", "optimizer", "ema"))
        if step is None:
            raise FaultError(
                f"faults.on_nonfinite = 'rollback', but there is no valid checkpoint before step {bad_step} to load; "
                "lower optimizer.lr, change training.seed, or set faults.on_nonfinite = 'skip'"
            )
        self.step = step
        self.step_check.reset()
        self.metrics.undo(step)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """A context manager that swaps the averaged (EMA) weights into the model."""
        assert self.ema is not None
        self.checkpointer.wait_for_copies()
        return self.ema.swapped_in()

    def shorten_timeouts(self) -> None:
        """Shorten the timeouts after the first step, which may be slow because it compiles and connects the ranks."""
        self.watchdog.set_timeout_after_first_step(self.config.comm.train_timeout_seconds, self.device)
        set_timeout(self.watchdog.timeout_seconds + REPORT_SECONDS, longer=[self.checkpointer.group])


@dataclass(eq=False)
class TrainStep:
    """One optimizer step over all microbatches. Call it with the step's number and this rank's rows of the batch."""

    model: ParallelModel
    microbatches: Microbatches
    optimizer: OptimizerContainer
    schedule: LRSchedule
    step_check: StepCheck
    _: KW_ONLY
    max_norm: float
    """Maximum L2 norm of the gradient; a gradient with a larger norm is scaled down to it."""
    wait_for_copies: Callable[[], None]
    """Called immediately before the optimizer step."""
    ema: EMA | None = None
    hooks: Hooks = field(default_factory=Hooks)

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        """Run the step with number ``step``, counted from 1.

        Returns the loss computed by this rank and the gradient norm before clipping. Both stay on the device, so that
        the host does not wait for them.
        """
        self.hooks.before_step(step, batch)
        # The number of tokens of the global batch is known before the first backward. Dividing each loss by it gives
        # every token the same weight, whatever its rank and microbatch, and gradients only have to be summed.
        global_tokens = (batch.labels != IGNORE_INDEX).sum().to(self.model.device, non_blocking=True)
        all_reduce(global_tokens, group=self.model.mesh.batch.get_group())
        self.model.mesh.replicas.all_reduce(global_tokens)
        loss = self.forward_backward(batch, global_tokens)
        while not self.model.finish_gradients():  # only a plugin's reducer asks for this (exact sums), and logs why
            self.optimizer.zero_grad()
            loss = self.forward_backward(batch, global_tokens)
        loss = self.model.mesh.replicas.sum_loss(loss)
        grad_norm = self.clip_and_update(step, loss)
        self.hooks.after_step(step, batch, loss, grad_norm)
        return loss, grad_norm

    def forward_backward(self, batch: Batch, global_tokens: Tensor) -> TokenLoss:
        """Forward and backward of all microbatches; gradients are accumulated in the parameters' ``grad``."""
        self.hooks.before_forward_backward(batch)
        count = len(batch.tokens) // self.microbatches.local_batch_size
        self.model.begin_gradients(len(batch.tokens))
        losses = torch.zeros(2, dtype=torch.float64, device=self.model.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.model.device)
        for i, microbatch in enumerate(self.microbatches(batch)):
            tokens += (microbatch.labels != IGNORE_INDEX).sum()
            self.hooks.before_microbatch(i)
            losses += exact_nats(self.model.forward_backward(microbatch, global_tokens, is_last=i == count - 1))
        self.hooks.after_backward()
        z_loss = losses[1] if self.model.loss.z_weight else None
        return TokenLoss(losses[0], tokens * self.model.has_loss, z_loss)

    def clip_and_update(self, step: int, loss: TokenLoss) -> Tensor:
        """Clip the gradient and update the parameters, unless the step is bad.

        Returns the gradient norm before clipping.
        """
        tied_replicas = self.sync_tied_embedding_grads()
        self.hooks.after_gradients()
        grad_norm = clip_grad_norm(self.model.model_parts, self.max_norm, self.model.reducer, tied_replicas)
        self.model.mesh.replicas.vote()
        # A tensor on the device, 1 if the update must be skipped: the host does not wait for it.
        skip = self.step_check(step, loss, grad_norm)
        self.schedule.apply(self.optimizer, step)
        self.wait_for_copies()
        self.optimizer.step(skip)
        self.model.finish_step(skip)
        if self.ema is not None:
            self.ema.update(step, skip)
        self.hooks.after_update()
        self.optimizer.zero_grad()
        return grad_norm

    def sync_tied_embedding_grads(self) -> Sequence[nn.Parameter]:
        """Sum the gradient of a tied embedding over the two pipeline stages that hold a replica of it.

        Returns this rank's replicas that the gradient norm must not count a second time.
        """
        if self.model.pipeline is None:
            return ()
        self.model.pipeline.sync_tied_embedding_grads()
        return self.model.pipeline.tied_replicas


def use_deterministic_kernels() -> None:
    """Make this process use deterministic kernels; call it before the first CUDA call.

    Afterwards, an operation without a deterministic kernel raises RuntimeError.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # By default torch then fills every new tensor with NaN, to make reads of uninitialized memory deterministic. A
    # train step has no such reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def initialize(model_parts: Sequence[Decoder], seed: int, device: torch.device) -> None:
    """Initialize the parameters and buffers of the model parts, sharded or not; the values depend only on ``seed``."""
    with layout_independent_init(model_parts, seed):
        for part in model_parts:
            part.init_weights()
    initialize_buffers(model_parts, device)


def check_initial_weights(
    saved: JobConfig, config: JobConfig, model: DecoderConfig, folder: StoredCheckpoint | Path
) -> None:
    """Raise ConfigError if the weights in ``folder``, saved with the config ``saved``, do not fit ``model``."""
    # No weight's shape depends on these options, so [model.shape] may change them, for example for longer sequences.
    may_differ = {"rope_scaling", "rope_theta", "norm_eps"} & given(config.model.shape).keys()
    longest, stated = longest_context(saved), longest_context(config)
    if longest > model.max_seq_len:
        logger.warning(
            f"{folder} has weights for sequences of {longest} tokens, and training.seq_len is "
            f"{model.max_seq_len}: exports of this run, evaluate and generate take {stated} as the longest context "
            "(model.shape.max_position_embeddings)"
        )
    section = replace(saved.model, vocab_size=saved.model.vocab_size or model.vocab_size)  # None: that of its tokenizer
    check_same_architecture(build_model_config(section, None, model.max_seq_len), model, folder, may_differ)


def warn_of_zero_rate(schedule: LRSchedule, steps: int) -> None:
    """Warn if the learning rate is 0 in the last steps, which would then change nothing."""
    if steps > schedule.total and schedule.rate(steps) == 0:
        logger.warning(
            f"after step {schedule.total} (lr_scheduler.total_steps) the learning rate is 0: later steps, up to "
            f"training.steps = {steps}, change nothing; lengthen the schedule, or raise its floor, "
            "lr_scheduler.min_lr_factor"
        )
