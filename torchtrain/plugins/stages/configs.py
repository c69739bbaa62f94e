"""Stages: a run as a list of configs, each of which continues from the last checkpoint of the one before.

A table ``[[stages]]`` has a name, a length (``steps`` or ``tokens``) and the options that differ in that stage.
``stage_configs`` merges each table into the other options. What the lengths, the layout and the learning rates make of
them is resolved in ``driver.py``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torchtrain.config.parse import BATCH_SCHEDULE, from_toml, option_of_value
from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import JobConfig, section_types, to_dict
from torchtrain.config.section import SAME_NUMBER, flat
from torchtrain.config.tokens import UNITS
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.errors import ConfigError

OWN_KEYS = ("name", "steps", "tokens")
SOURCE_KEYS = ("path", "name", "type", "sources")
"""Options of [data] and [validation] that name data: a table that sets one of them replaces the others."""
MAY_DIFFER = {
    *("data", "validation", "training", "optimizer", "lr_scheduler", "ema", "parallelism", "activation_checkpoint"),
    *("compile", "model.shape.rope_theta", "model.shape.rope_scaling", "model.shape.max_position_embeddings"),
    *("checkpoint.interval", "checkpoint.interval_tokens", "checkpoint.interval_minutes"),
    *("checkpoint.keep_latest_k", "checkpoint.keep_every", "checkpoint.keep_best_k"),
    *("metrics.log_freq", "profiling"),
}
MUST_NOT_DIFFER = {
    "model": (
        "the model of the checkpoint before has the same sizes; of [model], only shape.rope_theta, shape.rope_scaling "
        "and shape.max_position_embeddings may differ"
    ),
    "mup": "the initial weights depend on it",
    "optimizer.name": "another optimizer has other states",
    "optimizer.groups": "another optimizer of a parameter has other states",
    "optimizer.options": "another optimizer has other states",
    "optimizer.state_dtype": "the states of the checkpoint before have this dtype",
    "ema.enable": "the averages begin with the run",
    "training.deterministic": "it must be set before the first operation of the process on a GPU",
    "training.seed": "one seed determines the initial weights and the order of the data of the whole run",
    "training.steps": "the length of a stage is its own key steps or tokens",
    "training.tokens": "the length of a stage is its own key steps or tokens",
    "data.packing": "the position in the data depends on it",
    "remote_data.streams": "the position in streamed data is saved by stream",
    "lr_scheduler.total_steps": "the schedule of a stage ends with the stage",
    "lr_scheduler.total_tokens": "the schedule of a stage ends with the stage",
    "lr_scheduler.start_step": "the schedule of a stage begins with the stage",
    "lr_scheduler.initial_lr": "the schedule of a stage begins at the last learning rate of the stage before",
}
"""Options that stages must not set, with the reason."""
SET_BY_RESOLVING = {
    *("training.steps", "lr_scheduler.total_steps", "lr_scheduler.start_step", "lr_scheduler.initial_lr"),
    "optimizer.lr",
}
"""Options that the tables of a resolved config have although a user must not set them in stages."""


def stage_configs(config: JobConfig) -> list[JobConfig]:
    """A config for each stage of ``config``, whose ``job.stage`` is the stage's name.

    ``training.steps`` or ``training.tokens`` are the length of the stage; in a last stage without a length, those of
    the whole run. In a resolved config, ``training.steps`` is the last step of the stage.

    Raises:
        ConfigError: options of stages are invalid, or must not differ. One message lists those of all stages.
    """
    if config.training.global_batch_size_schedule:
        config = _ramp_to_stages(config)
    resolved = bool(config.job.stage)
    problems = [problem for number in range(len(config.stages)) for problem in _problems(config, number, resolved)]
    problems += _problems_of_run(config, resolved)
    if problems:
        raise ConfigError("\n  ".join(problems))
    base = _base_table(config, resolved)
    configs = []
    for number, table in enumerate(config.stages):
        try:
            configs.append(from_toml(JobConfig, _merged(base, table, resolved)))
        except ConfigError as error:
            problems += [f"{_label(config, number)}: {line.strip()}" for line in str(error).splitlines()]
    if problems:
        raise ConfigError("\n  ".join(problems))
    configs = configs if resolved else _with_common_sources(configs)
    shares = [config.data.largest_held_out for config in configs]
    if max(shares) > shares[0]:
        number = shares.index(max(shares))
        raise ConfigError(
            f"{_label(config, number)}: held_out = {shares[number]:g} of a source must not be larger than in the first "
            f"stage, {shares[0]:g}, which trains on documents of this share: set held_out of a source there to it, too"
        )
    return configs


def set_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a stage's ``table`` sets, by full name."""
    return flat({key: value for key, value in table.items() if key not in OWN_KEYS})


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flat``."""
    table: dict[str, Any] = {}
    for name, value in options.items():
        *sections, key = name.split(".")
        inner = table
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return table


def _label(config: JobConfig, number: int) -> str:
    return f"stages[{number}] ({config.stages[number].get('name', 'without a name')})"


def _problems(config: JobConfig, number: int, resolved: bool) -> Iterable[str]:
    """What is wrong with the table of stage ``number``, besides the values of options."""
    table, label = config.stages[number], _label(config, number)
    own_name = table.get("name")
    if not (isinstance(own_name, str) and own_name):
        yield f"{label}: name must be a text, such as name = 'long context'"
    elif [other.get("name") for other in config.stages].count(own_name) > 1:
        yield f"{label}: another stage has this name; names of stages must differ"
    steps, tokens = table.get("steps"), table.get("tokens")
    if steps is not None and not (type(steps) is int and steps >= 1):
        yield f"{label}: steps = {steps!r} must be an integer of at least 1"
    if steps is not None and tokens is not None:
        yield f"{label}: steps = {steps!r} and tokens = {tokens!r} exclude each other; set one of them"
    is_last = number == len(config.stages) - 1
    if steps is None and tokens is None and not is_last:
        yield f"{label}: set its length, steps or tokens; only the last stage may lack it, and then ends with the run"
    for name, value in set_options(table).items():
        option = option_of_value(name, value)
        if option == BATCH_SCHEDULE:
            yield f"{label}: {name} = {value!r} must be a number; make each batch size of a schedule a stage of its own"
            continue
        if resolved and option in SET_BY_RESOLVING:
            continue
        for prefix in _prefixes(option):
            if prefix in MUST_NOT_DIFFER and not any(part in MAY_DIFFER for part in _prefixes(option)[:-1]):
                yield f"{label}: {option} must not differ between stages: {MUST_NOT_DIFFER[prefix]}"
                break
        else:
            section = option.split(".")[0]
            is_known = section in section_types()
            if is_known and not _may_differ(option):
                yield f"{label}: {option} must not differ between stages: it is an option of the whole run"


def _may_differ(option: str) -> bool:
    """Whether stages may have different values of ``option``."""
    section = option.split(".")[0]
    if section in CONFIG_SECTIONS:
        return bool(CONFIG_SECTIONS[section].may_differ_between_stages)
    return any(prefix in MAY_DIFFER for prefix in _prefixes(option))


def _prefixes(option: str) -> list[str]:
    """``option`` and the tables that contain it, from the longest name to the shortest."""
    parts = option.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _problems_of_run(config: JobConfig, resolved: bool) -> Iterable[str]:
    """What is wrong with options outside of the stages of ``config``."""
    if not config.checkpoint.enable:
        yield (
            "checkpoint.enable = false does not go with stages: each continues from the last checkpoint of the one "
            "before"
        )
    if resolved:
        return
    for option in ("total_steps", "total_tokens", "decay_tokens", "start_step", "initial_lr"):
        value = getattr(config.lr_scheduler, option)
        if value:
            yield (
                f"lr_scheduler.{option} = {value!r} does not go with stages: [lr_scheduler] spans all of them; for a "
                "decay of its own, make it a stage with [stages.lr_scheduler]"
            )
    length = config.training.tokens or config.training.steps
    is_set = config.training.tokens or config.training.steps != JobConfig().training.steps
    lasts = [key for key in ("steps", "tokens") if key in config.stages[-1]]
    if is_set and lasts:
        yield (
            f"training.{'tokens' if config.training.tokens else 'steps'} = {length!r} and the {lasts[0]} of the last "
            "stage exclude each other; set one of them"
        )
    if not is_set and not lasts:
        yield (
            f"{_label(config, len(config.stages) - 1)}: set its length, or training.tokens, or training.steps to "
            f"another number than its default, {length}"
        )


def _base_table(config: JobConfig, resolved: bool) -> dict[str, Any]:
    """The options outside of the stages; of a resolved config, without those that any stage sets."""
    table = to_dict(config)
    del table["stages"]
    if not resolved:
        return table
    varying = {option for stage in config.stages for option in set_options(stage)}
    return nested({name: value for name, value in flat(table).items() if name not in varying})


def _merged(base: Mapping[str, Any], table: Mapping[str, Any], resolved: bool) -> dict[str, Any]:
    """The table of the config of a stage."""
    options, changes = flat(base), set_options(table)
    for section in ("data", "validation"):
        named = [f"{section}.{key}" for key in SOURCE_KEYS]
        if any(name in changes for name in named) and not resolved:
            for key in (*SOURCE_KEYS, "subset", "revision", "weight", "label"):
                options.pop(f"{section}.{key}", None)
    if "lr_scheduler" in table and not resolved:  # a schedule of its own
        options = {name: value for name, value in options.items() if not name.startswith("lr_scheduler.")}
        options["lr_scheduler.warmup_steps"] = 0
    if not resolved:
        for pair in SAME_NUMBER.items():  # as an option of the command line replaces its counterpart in the file
            for name, other in (pair, pair[::-1]):
                if name in changes and other not in changes:
                    options.pop(other, None)
    if not resolved and (table.get("steps") or table.get("tokens")):
        options.pop("training.tokens", None)
        options.pop("training.steps", None)
        changes = {**changes, **{f"training.{key}": table[key] for key in ("steps", "tokens") if key in table}}
    return nested({**options, **changes, "job.stage": table["name"]})


def _with_common_sources(configs: Sequence[JobConfig]) -> list[JobConfig]:
    """Give sources the same number in all stages, because a source that has it continues from its position.

    A stage keeps the positions of sources of earlier stages that it does not read: with the weight 0.
    """

    def keys_of(config: JobConfig) -> list[Any]:
        keys, seen = [], Counter[Any]()
        for source in config.data.all:
            key = str({**_plain(source), "weight": 0, "revision": None, "label": ""})
            keys.append((key, seen[key]))
            seen[key] += 1
        return keys

    if all(keys_of(config) == keys_of(configs[0]) for config in configs):
        return list(configs)
    known: dict[Any, SourceConfig] = {}
    options_of_source = to_dict(SourceConfig()).keys() | {"revision"}
    result = []
    for config in configs:
        own = dict(zip(keys_of(config), config.data.all, strict=True))
        for key, source in own.items():
            known.setdefault(key, source)
        sources = tuple(
            SourceConfig(**{**_plain(source), "weight": own[key].weight if key in own else 0.0})
            for key, source in known.items()
        )
        table = {
            **to_dict(DataConfig()),
            **{k: v for k, v in to_dict(config.data).items() if k not in options_of_source},
        }
        table["sources"] = [to_dict(source) for source in sources]
        data = from_toml(DataConfig, table, "data.")
        result.append(replace(config, data=data))
    return result


def _plain(source: SourceConfig) -> dict[str, Any]:
    """The options of one source; the default source by its type."""
    options = {name: value for name, value in asdict(source).items() if name in SourceConfig.__dataclass_fields__}
    return {**options, "type": source.type or ("" if source.is_set else "standard_library")}


STEP_OF_RAMP = re.compile(r"\s*([1-9][0-9]*)(?:\s+at\s+([0-9]+(?:\.[0-9]+)?)([KMBT]?))?\s*")


def batch_schedule(text: str) -> list[tuple[int, int, str]]:
    """The batch sizes of ``training.global_batch_size_schedule``: tokens from which on each holds, size, name.

    Raises:
        ConfigError: ``text`` is no such schedule.
    """
    parts = [STEP_OF_RAMP.fullmatch(part) for part in text.split(",")]
    tokens = [0 if part is None or part[2] is None else round(float(part[2]) * UNITS[part[3]]) for part in parts]
    if None in parts or parts[0] is None or parts[0][2] is not None or sorted(set(tokens)) != tokens:
        raise ConfigError(
            f"training.global_batch_size = {text!r} must be batch sizes with increasing numbers of tokens, from which "
            "on each holds, such as '256, 512 at 1B, 1024 at 10B'"
        )
    sizes = []
    for begin, part in zip(tokens, parts, strict=True):
        assert part is not None
        sizes.append((begin, int(part[1]), f"batch {part[1]} from {part[2]}{part[3]}" if begin else f"batch {part[1]}"))
    return sizes


def _ramp_to_stages(config: JobConfig) -> JobConfig:
    """``config`` with a stage for each batch size of ``training.global_batch_size_schedule``."""
    text = config.training.global_batch_size_schedule
    if config.stages:
        raise ConfigError(
            f"training.global_batch_size = {text!r} and [[stages]] exclude each other: make each batch size a stage, "
            "and set training.global_batch_size to a number in each"
        )
    sizes = batch_schedule(text)
    stages: list[dict[str, Any]] = []
    for number, (begin, size, name) in enumerate(sizes):
        table: dict[str, Any] = {"name": name, "training": {"global_batch_size": size}}
        if number + 1 < len(sizes):
            table["tokens"] = str(sizes[number + 1][0] - begin)
        stages.append(table)
    training = replace(config.training, global_batch_size_schedule="")
    return replace(config, training=training, stages=tuple(stages))
