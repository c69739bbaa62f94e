"""Run in stages: a trainer for each, which resumes from the last checkpoint of the stage before.

A stage is the run that one would start by hand from that checkpoint with the options of the stage, bitwise. So nothing
but checkpoints passes from one to the next: each stage has its own process groups, model and data loader.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from torchtrain.checkpoint.resume import HeldLease
from torchtrain.checkpoint.saved_run import SavedRun
from torchtrain.checkpoint.storage import checkpoint_storage
from torchtrain.config.run_plan import OtherStageError, plan_of
from torchtrain.config.schema import JobConfig, to_dict
from torchtrain.config.section import flat
from torchtrain.config.tokens import format_tokens, parse_tokens, with_decay_ratio
from torchtrain.datasets.build import open_source, source_key
from torchtrain.datasets.data_source import DataSource, SourceContext, StreamRequest
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.agreement import on_all_ranks, on_rank0
from torchtrain.distributed.mesh import resolve_parallel_dims
from torchtrain.distributed.process_group import Rendezvous, destroy_process_group, pick_device, rank, world_size
from torchtrain.errors import CheckpointError, ConfigError, DataError, StoppedError
from torchtrain.fault_tolerance.stop_request import StopRequest
from torchtrain.logging import logger
from torchtrain.metrics.writers import has_validation
from torchtrain.models.spec import DecoderConfig, count_parameters
from torchtrain.optimizers.lr_schedule import LRSchedule
from torchtrain.plugins.stages.configs import batch_schedule, nested, set_options, stage_configs
from torchtrain.plugins.stages.table import in_columns
from torchtrain.resolve import check_config, resolve, with_pinned_data
from torchtrain.trainer import Trainer

Resolve = Callable[[JobConfig], tuple[JobConfig, DecoderConfig]]
Build = Callable[[JobConfig, Rendezvous, StopRequest, HeldLease], Trainer]


def resolve_stages(config: JobConfig, resolve_one: Resolve) -> list[JobConfig]:
    """The resolved config of each stage: ``training.steps`` is its last step, counted from the beginning of the run.

    Each also holds ``stages``, in which every table sets all options that differ between any two stages: so the config
    of any stage is the config of the run.

    Args:
        resolve_one: resolves the config of one stage, apart from the others; also returns the config of its model.

    Raises:
        ConfigError: the options of any stage are invalid; one message for all stages.
    """
    configs, problems = stage_configs(config), []
    resolved: list[tuple[JobConfig, DecoderConfig]] = []
    for own in configs:
        # The number of steps of a last stage without a length, and so of its schedule, is not known yet.
        schedule = replace(own.lr_scheduler, decay_tokens="")
        try:
            resolved.append(resolve_one(replace(own, lr_scheduler=schedule)))
        except ConfigError as error:
            problems.append(f"stage {own.job.stage!r}: {error}")
    if problems:
        raise ConfigError("\n  ".join(problems))
    if config.job.stage:
        return [replace(own, stages=config.stages) for own, _ in resolved]
    tables = config.stages or tuple({} for _ in configs)
    ends = _last_steps(config, resolved)
    # Only batches of a schedule, which have no tables, may have no step.
    with_steps = [number for number, (before, end) in enumerate(itertools.pairwise([0, *ends])) if end > before]
    resolved, ends = [resolved[number] for number in with_steps], [ends[number] for number in with_steps]
    warmup = _warmup_steps(config.lr_scheduler.warmup_tokens, resolved, ends)
    finished: list[JobConfig] = []
    for number, (own, model) in enumerate(resolved):
        own = replace(own, training=replace(own.training, steps=ends[number]))
        if "lr_scheduler" in tables[number]:
            decay_tokens = configs[number].lr_scheduler.decay_tokens
            before = finished[-1] if finished else None
            own = _with_own_schedule(own, model, before, tables[number], decay_tokens)
        else:
            schedule = replace(own.lr_scheduler, total_steps=ends[-1])
            if warmup is not None:
                schedule = replace(schedule, warmup_steps=warmup)
            own = replace(own, lr_scheduler=schedule)
        finished.append(own)
    return _with_tables(finished, ends)


def _tokens_per_step(config: JobConfig) -> int:
    return config.training.global_batch_size * config.training.seq_len


def _last_steps(config: JobConfig, resolved: Sequence[tuple[JobConfig, DecoderConfig]]) -> list[int]:
    """The last step of each stage, counted from the beginning of the run.

    A batch of a schedule of batch sizes begins with the first step that has at least its tokens before it. If that
    step is also the first of the next one, or the end of the run, the batch has no step.
    """
    ramp = config.training.global_batch_size_schedule
    borders = [begin for begin, _, _ in batch_schedule(ramp)[1:]] if ramp else []
    ends: list[int] = []
    step, tokens = 0, 0
    for number, (own, model) in enumerate(resolved):
        per_step, length = _tokens_per_step(own), own.training.steps
        has_length = not config.stages or {"steps", "tokens"} & config.stages[number].keys()
        if number == len(resolved) - 1 and (not has_length or not config.stages):
            before = borders[-1] if borders else tokens  # without the tokens by which the last step exceeds the border
            if config.training.tokens:
                total = parse_tokens(config.training.tokens, partial(count_parameters, model))
                length, ends_before = -(-(total - tokens) // per_step), total <= before
            else:
                length = config.training.steps - step
                ends_before = length <= 0
            if ends_before:
                given = config.training.tokens or config.training.steps
                name = "tokens" if config.training.tokens else "steps"
                raise ConfigError(
                    f"training.{name} = {given!r} ends before the last stage, {own.job.stage!r}, begins (after step "
                    f"{step}, {format_tokens(tokens)} tokens); raise it, or shorten the stages"
                )
        elif borders:
            length = -(-(borders[number] - tokens) // per_step)
        length = max(0, length)
        step, tokens = step + length, tokens + length * per_step
        ends.append(step)
    return ends


def _warmup_steps(text: str, resolved: Sequence[tuple[JobConfig, DecoderConfig]], ends: Sequence[int]) -> int | None:
    """The steps of a warm-up in tokens, at the beginning of the run, which may span several stages; None if not set."""
    if not text:
        return None
    tokens = parse_tokens(text, partial(count_parameters, resolved[0][1]))
    begin = 0
    for (own, _), end in zip(resolved[:-1], ends[:-1], strict=True):
        of_stage = (end - begin) * _tokens_per_step(own)
        if tokens <= of_stage:
            return begin + round(tokens / _tokens_per_step(own))
        tokens, begin = tokens - of_stage, end
    return begin + round(tokens / _tokens_per_step(resolved[-1][0]))


def _with_own_schedule(
    own: JobConfig, model: DecoderConfig, before: JobConfig | None, table: dict[str, object], decay_tokens: str
) -> JobConfig:
    """``own``, the config of a stage with a learning-rate schedule of its own, with the beginning and end of that.

    Args:
        before: the config of the stage before; None for the first stage.
        table: the table of the stage.
    """
    start, rate, optimizer = 0, 0.0, own.optimizer
    if before is not None:
        start = before.training.steps
        rate = LRSchedule(before.lr_scheduler, before.optimizer.lr, start).rate(start)
        if "optimizer.lr" not in set_options(table):
            if rate == 0:
                raise ConfigError(
                    f"stage {own.job.stage!r} begins at the last learning rate of the stage before, which is 0; set "
                    "stages.optimizer.lr, or lr_scheduler.min_lr_factor of the stage before"
                )
            optimizer = replace(optimizer, lr=rate)
    end = own.training.steps
    schedule = replace(own.lr_scheduler, start_step=start, total_steps=end, initial_lr=rate)
    if decay_tokens:
        decay = round(parse_tokens(decay_tokens, partial(count_parameters, model)) / _tokens_per_step(own))
        try:
            schedule = with_decay_ratio(replace(schedule, decay_tokens=decay_tokens), decay, end - start)
        except ConfigError as error:
            raise ConfigError(f"stage {own.job.stage!r}: {error}") from None
    return replace(own, lr_scheduler=schedule, optimizer=optimizer)


def _with_tables(configs: Sequence[JobConfig], ends: Sequence[int]) -> list[JobConfig]:
    options = [flat({key: value for key, value in to_dict(own).items() if key != "stages"}) for own in configs]
    names = sorted({name for of_stage in options for name in of_stage})
    varying = [
        name
        for name in names
        if name != "job.stage" and any(of_stage.get(name) != options[0].get(name) for of_stage in options)
    ]
    tables = []
    for number, (own, of_stage) in enumerate(zip(configs, options, strict=True)):
        length = ends[number] - (ends[number - 1] if number else 0)
        values = nested({name: of_stage[name] for name in varying if name in of_stage})
        tables.append({"name": own.job.stage, "steps": length, **values})
    return [replace(own, stages=tuple(tables)) for own in configs]


def train_in_stages(config: JobConfig, build: Build) -> int:
    """Train all stages of ``config`` that are not finished; returns the exit code of the process.

    ``build`` makes the trainer of a stage.
    """
    # First, because the wall-clock limit counts from the start of the process, and setup may take minutes.
    stop = StopRequest(config.faults)
    device = pick_device(config.job.device)

    saved = SavedRun(config)

    def resolve_and_check(own: JobConfig) -> tuple[JobConfig, DecoderConfig]:
        run = resolve(own, world_size(), saved)
        check_config(run, device, saved)
        return run.config, run.model_config

    stages = resolve_stages(config, resolve_and_check)
    rendezvous, held = Rendezvous(config.comm.init_timeout_seconds), HeldLease()
    number = rendezvous.agree("first stage", lambda: _stage_to_begin(stages))
    logger.info("the stages of the run:\n%s", in_columns(plan_of(stages[number]).table()))
    is_set_up = has_trained = False
    with ExitStack() as handlers:
        while True:
            stage = stages[number]
            first = plan_of(stage).first_step(number)
            logger.info(
                "stage %r (%d of %d): steps %d to %d, %d sequences of %d tokens a step",
                *(stage.job.stage, number + 1, len(stages), first, stage.training.steps),
                *(stage.training.global_batch_size, stage.training.seq_len),
            )
            built = _build_or_other_step(build, stage, rendezvous, stop, held)
            if isinstance(built, int):
                number = stage_of_step(stages, built)
                destroy_process_group()
                _release_memory(stage)
                continue
            trainer = built
            if trainer.step < first - 1:
                raise CheckpointError(f"the checkpoints of stage {stages[number - 1].job.stage!r} have disappeared")
            if not is_set_up:
                if number + 1 < len(stages):
                    open_data_of_later_stages(stages[number:], trainer)
                handlers.enter_context(stop)  # until here, a signal ends the process, as in a run without stages
                is_set_up = True
            if stop.agree(trainer.gloo_group):  # everything is saved
                logger.info("stopped as requested: before stage %r continues", stage.job.stage)
                destroy_process_group()
                return StoppedError().exit_code
            trainer.metrics.same_process = has_trained
            code, step = trainer.train(), trainer.step
            has_trained = True
            del trainer, built
            _release_memory(stage)
            # Not by the code, which is 0 of a stopped run, too, if torchrun has restarts left.
            if stop.agreed or number == len(stages) - 1:
                return code
            if step < stage.training.steps:
                logger.warning(
                    "the data of stage %r ended at step %d of %d: later stages are not trained. Set "
                    "data.when_exhausted = 'repeat', give more data, or shorten the stage",
                    *(stage.job.stage, step, stage.training.steps),
                )
                return code
            number += 1


def _build_or_other_step(
    build: Build, stage: JobConfig, rendezvous: Rendezvous, stop: StopRequest, held: HeldLease
) -> Trainer | int:
    """The trainer of ``stage``, or the step of the checkpoint to resume from if that belongs to another stage.

    It does, if newer checkpoints are damaged, or checkpoint.load_step is set. When this function has returned, nothing
    refers to the memory of the trainer whose construction failed.
    """
    try:
        return build(stage, rendezvous, stop, held)
    except OtherStageError as error:
        return error.step


def open_data_of_later_stages(stages: Sequence[JobConfig], trainer: Trainer) -> None:
    """Open and tokenize the sources that only later stages read, so that missing data are an error at the start.

    ``stages``: that of ``trainer``, then the later ones. Datasets of the Hugging Face hub are not downloaded.
    Collective.

    Raises:
        ConfigError, DataError: see ``build_dataloader``. The message names the stage.
        DataError: data are streamed by another number of readers in another stage, or do not fill one window there.
    """
    of_validation = [source for loader in trainer.validation_loaders.values() for source in loader.sources]
    # The held-out parts come last: they are of sources that are there already.
    of_first = zip(_sources(stages[0]), [*trainer.dataloader.sources, *of_validation], strict=False)
    known: dict[str, DataSource] = {section + source_key(source): found for (section, source), found in of_first}
    opened: list[tuple[JobConfig, str, DataSource]] = []
    held_out: list[tuple[JobConfig, SourceConfig, DataSource]] = []

    for own in stages[1:]:
        # Asks the hub for datasets that have no revision.
        on_rank0(partial(with_pinned_data, own, trainer.saved), trainer.gloo_group)
        for section, source in _sources(own):
            key = section + source_key(source)
            # Validation begins again in each stage, where its data may be read in another number of streams.
            is_known = key in known and (section == "data" or isinstance(known[key], TokenDataset))
            if not is_known:
                if source.source_type == "hub" and source.download:
                    continue
                context = SourceContext(
                    section=f"stage {own.job.stage!r}: {section}",
                    tokenizer=trainer.tokenizer,
                    global_batch_size=own.training.global_batch_size,
                    verify_bytes=own.data.verify_gib * 2**30,
                    plugins=own.plugins,
                    held_out=source.held_out > 0,
                )
                known[key] = open_source(source, context, trainer.gloo_group)
                if source.held_out:
                    held_out.append((own, source, known[key]))
            opened.append((own, section, known[key]))

    def check() -> None:
        for own in stages[1:]:
            with _naming(own):
                for section in own.plugins.values():
                    section.check_data()
        for own, config, source in held_out:
            with _naming(own):
                source.part(config.held_out, held_out=True, section="data")
        for own, section, source in opened:
            with _naming(own):
                source.stream(_request(own, trainer.tokenizer, section))

    on_all_ranks(check, trainer.gloo_group)


@contextmanager
def _naming(stage: JobConfig) -> Iterator[None]:
    """Add the name of the stage to errors."""
    name = f"stage {stage.job.stage!r}: "
    try:
        yield
    except (ConfigError, DataError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else DataError
        raise kind(name + str(error).removeprefix(name)) from None


def _request(config: JobConfig, tokenizer: Tokenizer, section: str) -> StreamRequest:
    """The windows that this rank needs from a source in the stage with ``config``."""
    dims, batch = resolve_parallel_dims(config.parallelism, world_size()), config.training.global_batch_size
    first = batch // dims.batch * dims.batch_rank(rank())
    is_training, longest = section == "data", config.data.longest_seq_len
    return StreamRequest(
        tokenizer,
        config.training.seq_len,
        batch,
        range(first, first + batch // dims.batch),
        seed=0,
        repeat=is_training and config.data.when_exhausted == "repeat",
        longest_seq_len=max(longest, plan_of(config).longest_seq_len) if is_training else longest,
        packing=config.data.packing if is_training else "cut",
    )


def _sources(config: JobConfig) -> list[tuple[str, SourceConfig]]:
    """The sources of training and validation data, each with its section."""
    validation = config.validation.all if config.validation.enable else ()
    return [*(("data", source) for source in config.data.all), *(("validation", source) for source in validation)]


def stage_of_step(stages: Sequence[JobConfig], step: int) -> int:
    """The stage that continues from the checkpoint of ``step``; the last one if that is the end of the run."""
    return next((number for number, own in enumerate(stages) if step < own.training.steps), len(stages) - 1)


def _stage_to_begin(stages: Sequence[JobConfig]) -> int:
    """The stage to continue with, by the names of the checkpoints. Called on rank 0."""
    load_step = stages[0].checkpoint.load_step
    saved = checkpoint_storage(stages[0]).steps()
    step = max([0, *saved]) if load_step == -1 else load_step
    number = stage_of_step(stages, step)
    metrics = Path(stages[0].job.dump_folder) / "metrics.jsonl"
    ended = number and stages[number - 1].training.steps == step
    if ended and stages[number - 1].validates and not has_validation(metrics, step):
        return number - 1  # the run was stopped between the last save of the stage and its validation
    return number


def _release_memory(stage: JobConfig) -> None:
    """Free what the trainer of ``stage`` has left, before the next one allocates."""
    gc.collect()
    if stage.compile.enable:
        torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
