"""The joinery: the one place where the config meets the parts. Every door goes through it, so that none drifts."""

import errno
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

from torchtrain.checkpoint.hf import is_hf_folder, save_hf
from torchtrain.checkpoint.history import newest_config
from torchtrain.checkpoint.manager import CheckpointManager, Stop
from torchtrain.checkpoint.states import STATES, ModelState, OptimizerState
from torchtrain.checkpoint.storage import CONFIG
from torchtrain.checkpoint.weights import find_weights, load_weights
from torchtrain.config.parse import from_file, to_toml
from torchtrain.config.schema import (
    ActivationCheckpoint,
    Comm,
    Compile,
    Data,
    JobConfig,
    Parallelism,
    Source,
    Training,
    Validation,
)
from torchtrain.datasets.build import build_loader
from torchtrain.datasets.hub import Ask, alone
from torchtrain.datasets.loader import Loader
from torchtrain.datasets.sources import with_revisions
from torchtrain.distributed.agreement import of_first_rank_in_its_time
from torchtrain.distributed.mesh import Degrees, Mesh, resolve_degrees
from torchtrain.distributed.process_group import init_process_group, pick_device, rank, side_group, world_size
from torchtrain.errors import CheckpointError, ConfigError, FaultError
from torchtrain.initialization import layout_independent_init
from torchtrain.log import logger
from torchtrain.metrics.writers import check_writers
from torchtrain.models.families import read_hf_config
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.attention_backend import attention_backend_name, choose_attention_backend
from torchtrain.optimizers.averages import Averages
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.parallelisms.float8 import check_float8, compute_scales_after_updates, gathers_float8
from torchtrain.parallelisms.limits import check_layout
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model, initialize_buffers
from torchtrain.parallelisms.tensor_parallel import apply_tensor_parallel
from torchtrain.shape import check_vocabulary, given, model_shape
from torchtrain.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Plan:
    """What is known of a run before its ranks meet."""

    device: torch.device
    degrees: Degrees
    model: TransformerConfig
    global_batch_size: int
    tokenizer: Tokenizer
    loader: Loader
    validation_loaders: dict[str, Loader]  # by the label of their source
    document_start: int | None  # token before which attention stops, if it does
    data: Data  # with the revisions of what comes from the hub
    validation: Validation


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


def plan_run(config: JobConfig) -> Plan:
    """Refuse what cannot work, open the tokenizer and the data; so early that there is one clear error.

    There is no process group yet, unless data come from the hub.
    """
    assert not config.model.hf_folder, "resolve_model comes first"
    device = pick_device(config.job.device)
    check_writers(config.metrics)
    if config.checkpoint.initial_load_path:
        find_weights(Path(config.checkpoint.initial_load_path))
    degrees = resolve_degrees(config.parallelism, world_size())
    global_batch_size = resolve_global_batch_size(config, degrees)
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    model = replace(model_shape(config.model, tokenizer, config.training.seq_len), **asdict(config.mup))
    check_run(config, device, degrees, model)
    if config.data.document_mask and tokenizer.bos_id is None:
        raise ConfigError(
            "data.document_mask = true needs a tokenizer with a token that begins a document (bos); that of "
            f"model.tokenizer_path = {config.model.tokenizer_path!r} has none"
        )
    choose_attention_backend(config.training.attention_backend, device)
    ask: Ask = alone
    if any(source.name for source in (*config.data.all, *(config.validation.all if config.validation.enable else ()))):
        # One of the ranks asks for all.
        init_process_group(device, config.comm.init_timeout_seconds)
        ask = of_first_rank_in_its_time
        config = _with_revisions(config)
    rows_per_part = global_batch_size // degrees.batch
    first_row = degrees.batch_rank(rank()) * rows_per_part
    open_loader = partial(
        build_loader,
        tokenizer=tokenizer,
        seq_len=config.training.seq_len,
        global_batch_size=global_batch_size,
        rows=range(first_row, first_row + rows_per_part),
        seed=config.training.seed,
        device=device,
        ask=ask,
    )
    validation_loaders = {}
    for number, source in enumerate(config.validation.all if config.validation.enable else ()):
        section = f"validation.sources[{number}]" if config.validation.sources else "validation"
        fields = asdict(source)  # one source, with the loader's options of [data]
        once = replace(config.data, **{key: fields[key] for key in asdict(Source())}, sources=(), when_exhausted="stop")
        validation_loaders[source.label] = open_loader(once, section=section, drop_last=False)
    plan = Plan(
        device,
        degrees,
        model,
        global_batch_size,
        tokenizer,
        open_loader(config.data),
        validation_loaders,
        tokenizer.bos_id if config.data.document_mask else None,
        config.data,
        config.validation,
    )
    make_dump_folder(Path(config.job.dump_folder))  # last: a run that is refused leaves nothing
    return plan


def _with_revisions(config: JobConfig) -> JobConfig:
    """``config`` with the revision of each dataset of the hub: as the run's newest checkpoint has it, or else now."""
    ask, folder = of_first_rank_in_its_time, Path(config.job.dump_folder) / "checkpoint"
    saved = ask(lambda: newest_config(folder, config.checkpoint.load_step)) if config.checkpoint.enable else None
    data, validation = config.data, config.validation
    data = with_revisions(data, saved.data if saved else None, "data", ask)
    if validation.enable:
        validation = with_revisions(validation, saved.validation if saved else None, "validation", ask)
    return replace(config, data=data, validation=validation)


def check_run(config: JobConfig, device: torch.device, degrees: Degrees, model: TransformerConfig) -> None:
    """ConfigError where ``device`` or the layout cannot do what ``config`` asks."""
    if config.training.enable_cpu_offload and device.type == "cpu":
        raise ConfigError("training.enable_cpu_offload needs a GPU to offload from; switch it off on CPU")
    check_layout(
        model,
        degrees,
        training=config.training,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        device_type=device.type,
        document_mask=config.data.document_mask,
    )
    check_float8(config.float8, model, device, degrees.tensor)
    if config.activation_checkpoint.mode == "memory_budget" and not config.compile.enable:
        raise ConfigError(
            "activation_checkpoint.mode = 'memory_budget' is a choice of the compiler; set compile.enable = true, or "
            "another mode, such as 'selective'"
        )


def make_dump_folder(folder: Path) -> None:
    """ConfigError where there can be no such folder, or this user may not write to it."""
    problem = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            problem = "it cannot be written to"
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # what is there already may yet be removed
            problem = error.strerror or str(error)
    if problem:
        raise ConfigError(f"job.dump_folder = {str(folder)!r} cannot be used: {problem}; name another folder")


def resolve_global_batch_size(config: JobConfig, degrees: Degrees) -> int:
    """``training.global_batch_size`` with -1 filled in; ConfigError where it does not divide."""
    local, wanted = config.training.local_batch_size, config.training.global_batch_size
    at_once = local * degrees.batch
    if wanted == -1:
        return at_once
    if wanted % at_once:
        below = wanted // at_once * at_once
        choices = f"{below} or {below + at_once}" if below else f"{at_once}"
        raise ConfigError(
            f"training.global_batch_size = {wanted} must be a multiple of local_batch_size = {local} times "
            f"{degrees.batch} data-parallel ranks = {at_once}; try {choices}, or a local_batch_size that fits"
        )
    return wanted


def build_run(config: JobConfig, plan: Plan, stop: Stop | None = None) -> Run:
    """Let the ranks meet, and make model, optimizer and place in the data: new, or as a checkpoint has them.

    In this order: meta device, parallelize, ``to_empty``, ``init_weights`` or load, optimizer. ``stop``: whether the
    run was asked to stop; None: it never is.
    """
    if not dist.is_initialized():
        init_process_group(plan.device, config.comm.init_timeout_seconds)
    mesh = Mesh(plan.device, plan.degrees)
    model = build_parallel_model(
        plan.model,
        mesh,
        plan.device,
        training=config.training,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compile=config.compile,
        float8=config.float8,
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
    return Run(plan, model, microbatches, optimizer, averages, checkpoint, side, step or 0)


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


@dataclass(frozen=True)
class TrainedModel:
    """A model to be used, not trained. ``model.config.max_seq_len`` is the length it was trained on."""

    model: Transformer
    tokenizer: Tokenizer
    device: torch.device


def load_model(
    path: Path, device: str = "auto", dtype: str = "auto", tokenizer_path: str = "", weights: str = "trained"
) -> TrainedModel:
    """Load ``path``: a run's folder, one of its checkpoints, of whatever layout, or a Hugging Face folder.

    ``dtype`` auto is bfloat16 on a GPU and float32 on the CPU. ``tokenizer_path`` wins over the tokenizer of the run's
    config and that in the folder. ``weights``: trained, or ema for the averaged ones. Under torchrun
    the ranks share the model by tensor parallelism.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: the ranks cannot share the model.
    """
    if weights not in STATES:
        raise ConfigError(f"weights = {weights!r} are not known; there are {' and '.join(STATES)}")
    folder = find_weights(path)
    if is_hf_folder(folder):
        tokenizer = load_tokenizer(tokenizer_path or str(folder))
        shape = read_hf_config(folder)
        check_vocabulary(shape.vocab_size, tokenizer)
    elif (folder / CONFIG).is_file():
        config = from_file(str(folder / CONFIG))
        tokenizer = load_tokenizer(tokenizer_path or config.model.tokenizer_path)
        shape = model_shape(config.model, tokenizer, config.training.seq_len)
    else:
        raise CheckpointError(
            f"{folder} has no {CONFIG} and so is no checkpoint; give a run's folder or a step-N in it"
        )
    place = pick_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    # A step of generation has one token: nothing that sequence parallelism could split.
    layout, ranks = Parallelism(enable_sequence_parallel=False), Degrees(tensor=world_size())
    check_layout(
        shape,
        ranks,
        training=Training(),
        parallelism=layout,
        activation_checkpoint=ActivationCheckpoint(),
        compile=Compile(),
        device_type=place.type,
    )
    init_process_group(place, Comm().init_timeout_seconds)
    with torch.device("meta"):
        model = Transformer(shape)
    if ranks.tensor > 1:
        apply_tensor_parallel(model, Mesh(place, ranks).tensor, sequence_parallel=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))  # not the buffers: RoPE stays float32
    model.to_empty(device=place)
    model.tie_weights()  # to_empty has made two parameters of a shared one
    model.init_buffers()
    load_weights([model], folder, shape, weights=weights)
    return TrainedModel(model.eval().requires_grad_(False), tokenizer, place)


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
