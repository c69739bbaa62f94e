"""What is known of a run before its ranks meet: everything is checked and opened here, or refused."""

import os
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from torchtrain.attention.backends import choose_attention_backend
from torchtrain.checkpoint.history import newest_config, saved_steps
from torchtrain.checkpoint.weights import find_weights
from torchtrain.config.parse import train_configs
from torchtrain.config.schema import JobConfig, Model, Source, Training
from torchtrain.datasets.build import build_loader
from torchtrain.datasets.hub import Ask, alone
from torchtrain.datasets.loader import Loader
from torchtrain.datasets.sources import with_revisions
from torchtrain.distributed.agreement import of_first_rank_untimed
from torchtrain.distributed.mesh import Degrees, resolve_degrees
from torchtrain.distributed.process_group import init_process_group, pick_device, rank, world_size
from torchtrain.errors import ConfigError
from torchtrain.metrics.writers import check_writers
from torchtrain.models.llama import TransformerConfig
from torchtrain.outputs import require_folder
from torchtrain.parallelisms.limits.layout import check_layout, resolve_global_batch_size
from torchtrain.shape import document_start, model_shape
from torchtrain.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Plan:
    """What is known of a run before its ranks meet."""

    config: JobConfig  # with global_batch_size as a number, and the revision of each dataset of the hub
    device: torch.device
    degrees: Degrees
    shape: TransformerConfig
    tokenizer: Tokenizer
    loader: Loader
    validation_loaders: dict[str, Loader]  # by the label of their source
    document_start: int | None  # id of the token that begins a document; None: attention crosses documents


def plan_run(config: JobConfig) -> Plan:
    """Refuse what cannot work, and open the tokenizer and the data: all that can be known before the ranks meet.

    With data of the hub the process group is made here already, so that one rank asks the hub for all.
    """
    assert not config.model.hf_folder, "resolve_model comes first"
    given = config
    device = pick_device(config.job.device)
    check_writers(config.metrics)
    initial, own = config.checkpoint.initial_load_path, Path(config.job.dump_folder) / "checkpoint"
    resumes = config.checkpoint.enable and bool(saved_steps(own))
    if initial and not resumes:
        find_weights(Path(initial))
    degrees = resolve_degrees(config.parallelism, world_size())
    training = replace(config.training, global_batch_size=resolve_global_batch_size(config, degrees))
    config = replace(config, training=training)
    tokenizer = load_tokenizer(config.model.tokenizer_path)
    model = replace(model_shape(config.model, tokenizer, training.seq_len), **asdict(config.mup))
    check_layout(config, device, degrees, model)
    start = document_start(config, tokenizer)
    choose_attention_backend(training.attention_backend, device)
    ask: Ask = alone
    held_out = config.validation.all if config.validation.enable else ()
    if any(source.name for source in (*config.data.all, *held_out)):
        init_process_group(device, config.comm.init_timeout_seconds)
        ask = of_first_rank_untimed
        config = _with_revisions(config)
    rows_per_part = training.global_batch_size // degrees.batch
    first_row = degrees.batch_rank(rank()) * rows_per_part
    open_loader = partial(
        build_loader,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        rows=range(first_row, first_row + rows_per_part),
        seed=training.seed,
        device=device,
        ask=ask,
    )
    validation_loaders = {}
    for number, source in enumerate(config.validation.all if held_out else ()):
        section = f"validation.sources[{number}]" if config.validation.sources else "validation"
        fields = asdict(source)  # one source, with the loader's options of [data]
        once = replace(config.data, **{key: fields[key] for key in asdict(Source())}, sources=(), when_exhausted="stop")
        validation_loaders[source.label] = open_loader(once, section=section, drop_last=False, count_bytes=True)
    loader = open_loader(config.data)
    _require_choice(given)
    folder = config.job.dump_folder
    require_folder(Path(folder), f"job.dump_folder = {folder!r}")  # last: a run that is refused leaves nothing
    if config.checkpoint.enable and os.path.lexists(own):
        require_folder(own, str(own))
    return Plan(config, device, degrees, model, tokenizer, loader, validation_loaders, start)


def _require_choice(config: JobConfig) -> None:
    """Raise ConfigError where nothing says what to train: the defaults alone are no run that anybody wants."""
    if config.job.config_file or config.model != Model() or config.training != Training():
        return
    raise ConfigError(
        f"nothing says what to train: name a config by --job.config_file, such as {', '.join(train_configs())}, or "
        "set options of [model] and [training]. ./run_llama_train.sh takes train_configs/debug_model.toml"
    )


def _with_revisions(config: JobConfig) -> JobConfig:
    """``config`` with the revision of each dataset of the hub: the newest checkpoint's, or else the newest one."""
    ask, folder = of_first_rank_untimed, Path(config.job.dump_folder) / "checkpoint"
    saved = ask(lambda: newest_config(folder, config.checkpoint.load_step)) if config.checkpoint.enable else None
    data, validation = config.data, config.validation
    data = with_revisions(data, saved.data if saved else None, "data", ask)
    if validation.enable:
        validation = with_revisions(validation, saved.validation if saved else None, "validation", ask)
    return replace(config, data=data, validation=validation)
