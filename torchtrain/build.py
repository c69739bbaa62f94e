"""The joinery: the one place where the config meets the parts. Every door goes through it, so that none drifts."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard

from torchtrain.attention.backends import attention_backend_name
from torchtrain.checkpoint.hf import save_hf
from torchtrain.checkpoint.manager import CheckpointManager, Stop
from torchtrain.checkpoint.states import STATES, ModelState, OptimizerState
from torchtrain.checkpoint.weights import find_weights, load_weights
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Loader
from torchtrain.devices import peak_flops
from torchtrain.distributed.mesh import Mesh
from torchtrain.distributed.process_group import init_process_group, rank, side_group, world_size
from torchtrain.errors import FaultError
from torchtrain.faults.hangs import HangWatch
from torchtrain.faults.stopping import StopRequest
from torchtrain.faults.update_guard import UpdateGuard
from torchtrain.float8 import compute_scales_after_updates, gathers_float8
from torchtrain.initialization import layout_independent_init
from torchtrain.log import logger
from torchtrain.lr_schedule import LRSchedule
from torchtrain.metrics import MetricsRecorder
from torchtrain.models.llama import Transformer
from torchtrain.models.llama.flops import flops_per_token
from torchtrain.optimizers.averages import Averages
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model, initialize_buffers
from torchtrain.profiling import Profiler
from torchtrain.run_plan import Plan
from torchtrain.shape import given
from torchtrain.steps.fingerprinted_step import step_maker
from torchtrain.steps.train_step import TrainStep
from torchtrain.validation import Validator


@dataclass
class Run:
    """The parts of a run that is ready for its next step."""

    plan: Plan
    model: ParallelModel
    microbatches: Microbatches
    optimizer: torch.optim.Optimizer
    averages: Averages | None
    checkpoint: CheckpointManager
    side_group: dist.ProcessGroup  # for small messages in CPU memory, all from the main thread
    first_step: int  # the last that was done before
    step: int  # the last that is done

    def roll_back(self, bad_step: int) -> None:
        """Go back to the newest good checkpoint before ``bad_step``, but not in the data: what was read is passed over.

        Raises:
            FaultError: there is none.
        """
        step = self.checkpoint.step_before(bad_step)
        if step is None:
            raise FaultError(
                f"faults.on_bad_numbers = 'rollback', but there is no good checkpoint before step {bad_step} to go "
                "back to; a lower optimizer.lr, another seed or on_bad_numbers = 'skip' may get past it"
            )
        self.checkpoint.load(step, only=("model", "optimizer", "ema"))
        self.step = step

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights."""
        assert self.averages is not None
        self.checkpoint.before_update()
        return self.averages.exchanged()


def build_run(config: JobConfig, plan: Plan, stop: Stop | None = None) -> Run:
    """Let the ranks meet, and make model, optimizer and place in the data: new, or as a checkpoint has them.

    In this order: meta device, parallelize, ``to_empty``, ``init_weights`` or load, optimizer. ``stop``: whether the
    run was asked to stop; None: it never is.
    """
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if not dist.is_initialized():
        init_process_group(plan.device, config.comm.init_timeout_seconds)
    mesh = Mesh(plan.device, plan.degrees)
    model = build_parallel_model(
        plan.model,
        mesh,
        plan.device,
        config,
    )
    parts = model.parts
    tied = plan.model.tied_embeddings
    states: dict[str, Stateful] = {"model": ModelState(parts, tied)}  # the others follow, before a load or a save
    folder = Path(config.job.dump_folder) / "checkpoint"
    # The global batch in numbers, and the revisions: -1 with other ranks, and the newest later, would be others.
    training = replace(config.training, global_batch_size=plan.global_batch_size)
    config_toml = to_toml(replace(config, training=training, data=plan.data, validation=plan.validation))
    checkpoint = CheckpointManager(config.checkpoint, folder, states, config_toml, plan.loader.identity, stop)
    step = checkpoint.step_to_load()
    initial = config.checkpoint.initial_load_path
    if step is None and not initial:
        initialize(parts, config.training.seed, plan.device)
    else:
        initialize_buffers(parts, plan.device)  # the load overwrites all else
    if initial and step is None:
        # These make no other tensors: a run may go on with others, for longer sequences and the like.
        wanted = {"rope_scaling", "rope_theta", "norm_eps"} & given(config.model.shape).keys()
        load_weights(parts, find_weights(Path(initial)), plan.model, wanted)
        logger.info("starts from the weights in %s", initial)
    elif initial:
        logger.info(
            "checkpoint.initial_load_path = %r is not used: the run resumes from its own step %d", initial, step
        )
    optimizer = build_optimizer(parts, config.optimizer, mesh, plan.model)
    states["optimizer"] = OptimizerState(parts, optimizer, tied)
    averages = Averages(parts, config.ema) if config.ema.enable else None
    if averages is not None:
        states["ema"] = averages
    if gathers_float8(config.float8, plan.degrees.fsdp):
        compute_scales = compute_scales_after_updates(parts, optimizer)
        if averages is not None:
            averages.after_exchange = compute_scales
    if model.sums is not None:
        states["sums"] = model.sums
    side = side_group(plan.device, config.comm.init_timeout_seconds)
    if world_size() > 1:
        for loader in (plan.loader, *plan.validation_loaders.values()):
            loader.connect(side)
    states["loader"] = LoaderState(plan.loader, mesh)
    if step is not None:
        checkpoint.load(step)
    microbatches = Microbatches(mesh, plan.device, config.training.local_batch_size, plan.document_start)
    return Run(plan, model, microbatches, optimizer, averages, checkpoint, side, step or 0, step or 0)


@dataclass
class Loop:
    """What the training loop calls."""

    train_step: TrainStep
    schedule: LRSchedule
    guard: UpdateGuard
    validator: Validator
    metrics: MetricsRecorder
    profiler: Profiler
    hangs: HangWatch


def build_loop(config: JobConfig, run: Run, stop: StopRequest) -> Loop:
    """All that goes on around the steps of ``run``. Collective."""
    plan, folder = run.plan, Path(config.job.dump_folder)
    schedule = LRSchedule(config.lr_scheduler, config.optimizer.lr, config.training.steps)
    metrics = MetricsRecorder(
        config.metrics,
        folder,
        device=plan.device,
        loss_group=run.model.mesh.loss.get_group(),
        side_group=run.side_group,
        tokens_per_step=plan.global_batch_size * config.training.seq_len,
        flops_per_token=flops_per_token(plan.model, config.training.seq_len),
        peak_flops=peak_flops(torch.cuda.get_device_name(plan.device)) if plan.device.type == "cuda" else None,
        first_step=run.first_step,
        last_step=config.training.steps,
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
        averages=run.averages,
    )
    validator = Validator(
        config.validation,
        plan.validation_loaders,
        run.model,
        run.microbatches,
        plan.tokenizer.token_bytes,
        metrics.record_validation,
        averaged=run.averaged,
        must_stop=partial(stop.agree, run.side_group),
        watch=hangs.watch,
    )
    profiler = Profiler(config.profiling, folder / "traces", rank(), plan.device, run.first_step)
    if config.compile.enable:
        logger.info("compiling: the first step may take a minute or two; later runs find most of it in a cache")
    return Loop(train_step, schedule, guard, validator, metrics, profiler, hangs)


def export_hf(config: JobConfig, run: Run) -> None:
    """Write the weights to ``hf/`` in the dump folder, as transformers loads them. Collective."""
    folder = Path(config.job.dump_folder) / "hf"
    state = run.checkpoint.states[STATES[config.checkpoint.export_weights]]
    weights = state.state_dict()
    save_hf(weights, folder, run.plan.model, config.checkpoint.export_dtype, config.model.tokenizer_path)
    logger.info("wrote %s", folder)


def initialize(parts: Sequence[Transformer], seed: int, device: torch.device) -> None:
    """Fill the parameters and buffers of ``parts``, sharded or not, as ``seed`` says."""
    with layout_independent_init(parts, seed):
        for part in parts:
            part.init_weights()
    initialize_buffers(parts, device)


class LoaderState(Stateful):
    """The loader's place as a tensor sharded by rows of the batch: another number of ranks deals it out anew."""

    def __init__(self, loader: Loader, mesh: Mesh):
        self.loader = loader
        self.mesh = mesh

    def state_dict(self) -> dict[str, Any]:
        rows = self.loader.state_dict()["rows"]
        return {"rows": DTensor.from_local(rows, self.mesh.batch, [Shard(0)], run_check=False)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict({"rows": state_dict["rows"].to_local().cpu()})


def describe(plan: Plan, config: JobConfig) -> None:
    """Log what is about to be trained, and on what."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(plan.model).parameters())
    axes = [f"{axis} {degree}" for axis, degree in asdict(plan.degrees).items() if degree > 1]
    logger.info(
        "%s parameters, vocabulary %d; %d rank(s) on %s%s; %d sequences a step",
        f"{parameters:,}",
        plan.model.vocab_size,
        world_size(),
        plan.device.type,
        f" ({' x '.join(axes)})" if axes else "",
        plan.global_batch_size,
    )
    dtype = config.training.mixed_precision_param
    numbers = dtype if config.float8.recipe == "none" else f"{dtype} and float8 ({config.float8.recipe})"
    logger.info(
        "%s, %s; attention: %s",
        numbers,
        "compiled" if config.compile.enable else "not compiled",
        attention_backend_name(config.training.attention_backend, plan.model, getattr(torch, dtype), plan.device),
    )
