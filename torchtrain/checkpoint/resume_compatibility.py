"""What a changed config means for a run that resumes.

Each option is of one kind. *Harmless* ones only watch the run. *Layout* ones split or speed up the same run. Others
*change the run* from here on. With *impossible* ones the checkpoint does not fit the run.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import tomli
import xxhash

from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.schema import default_options, section_types
from torchtrain.config.section import flat
from torchtrain.errors import CheckpointError
from torchtrain.files import is_url, printable
from torchtrain.models.options import RopeScalingConfig
from torchtrain.optimizers.options import LRSchedulerConfig


class Kind(Enum):
    HARMLESS = "harmless"
    LAYOUT = "layout"
    CHANGES = "changes the run"
    IMPOSSIBLE = "impossible"


# By section, and by option where that is of another kind than its section. What is not here changes the run.
KINDS = {
    Kind.HARMLESS: {
        *("job", "checkpoint", "faults", "validation", "metrics", "profiling", "comm"),
        # training.steps counts by lr_scheduler.total_steps (see options_in), and data.revision by the data's identity.
        *("training.steps", "training.gc_freq", "data.prefetch", "data.revision", "data.verify_gib"),
        *("data.label", "data.longest_seq_len"),  # of which a checkpoint keeps the block size
        "model.shape.max_position_embeddings",  # only said of exports
        "stages",  # compared by the plan of the run
    },
    Kind.LAYOUT: {
        *("parallelism", "activation_checkpoint", "compile", "optimizer.implementation", "ema.offload"),
        "training.local_batch_size",  # only says how the global batch is divided
        *("training.loss_chunk_tokens", "training.attention_backend"),
        *("training.enable_cpu_offload", "training.deterministic"),
    },
    Kind.CHANGES: {
        *("optimizer", "ema", "mup", "lr_scheduler", "training", "data"),
        "model.shape.rope_theta",
        *(f"model.shape.rope_scaling.{option.name}" for option in fields(RopeScalingConfig)),
        "model.tokenizer_path",  # a copy in another folder is the same tokenizer
    },
    # Another optimizer has other states, another packing other windows.
    Kind.IMPOSSIBLE: {"model", "optimizer.name", "data.packing"},
}

MAX_SHOWN, MAX_NAMES = 100, 4  # of a value in a message: characters, and names of tables

TOTAL_STEPS = "lr_scheduler.total_steps"

EXCLUDE = "data.exclude"
SAME_ELSEWHERE = ("data.path", "data.name", EXCLUDE, "model.tokenizer_path")
"""Options that name files or folders: a change is harmless where the content is the same as before."""


def kind_of(key: str) -> Kind:
    """Kind of an option such as ``optimizer.lr``."""
    if key.startswith("stages["):  # compared by the plan of the run
        return Kind.HARMLESS
    section = key.split(".")[0]
    if section in CONFIG_SECTIONS:
        return Kind.CHANGES if CONFIG_SECTIONS[section].changes_run else Kind.HARMLESS
    if section in ("estimate", "prepare"):  # of plugins that are not installed, whose commands do not train
        return Kind.HARMLESS
    found = (kind for name in (key, key.split(".")[0]) for kind, names in KINDS.items() if name in names)
    return next(found, Kind.CHANGES)


@dataclass(frozen=True)
class Difference:
    """An option whose value differs between the checkpoint and this run; None: not set."""

    key: str
    saved: Any
    current: Any
    files: str = field(default="", kw_only=True)
    """The data files that differ, if known."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.key)

    def __str__(self) -> str:
        files = f"; {self.files}" if self.files else ""
        current, saved = _shown(self.current, self.saved), _shown(self.saved, self.current)
        return f"{printable(self.key)} = {current} (checkpoint: {saved}{files})"


def _shown(value: Any, other: Any) -> str:
    """``value`` for a message; of a list of tables what differs from ``other``, or the names of the tables."""
    tables = [table for table in (value, other) if isinstance(table, list) and table and isinstance(table[0], dict)]
    if not tables:
        text = repr(value)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
    if len(tables) == 2 and len(value) == len(other):
        return ", ".join(
            f"[{number}] {key} = {table[key]!r}"
            for number, (table, before) in enumerate(zip(value, other, strict=True))
            for key in table
            if table[key] != before.get(key)
        )
    names = [str(table.get("path") or table.get("name") or table.get("type")) for table in value or ()]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"[{', '.join(names[:MAX_NAMES])}{more}]"


def differences(saved_toml: str, current_toml: str) -> list[Difference]:
    """Options in which two resolved configs differ, in the order of their names."""
    sections = tomli.loads(saved_toml).keys() | tomli.loads(current_toml).keys()
    saved, current = options_in(saved_toml, sections), options_in(current_toml, sections)
    of_stages = _differences_of_stages(saved.pop("stages", ()), current.pop("stages", ()))
    return of_stages + [
        Difference(key, saved.get(key), current.get(key))
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def _differences_of_stages(
    saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> list[Difference]:
    """Options in which stages of the same name differ, and the names of the stages if those differ."""
    before, now = ({table["name"]: flat(table) for table in tables} for tables in (saved, current))
    found = [Difference("stages", list(before), list(now))] if list(before) != list(now) else []
    return found + [
        Difference(f"stages[{name}].{key}", before[name].get(key), now[name].get(key))
        for name in before.keys() & now.keys()
        for key in sorted(before[name].keys() | now[name].keys())
        if before[name].get(key) != now[name].get(key)
    ]


def options_in(text: str, sections: Collection[str] = ()) -> dict[str, Any]:
    """The options in ``text`` by full name, with defaults, also those that depend on other options.

    Of plugins, only the sections in ``text`` and ``sections``: whether others are installed makes no difference.
    """
    table = tomli.loads(text)
    installed = set(CONFIG_SECTIONS).difference(table, sections)
    defaults = {name: value for name, value in default_options().items() if name.split(".")[0] not in installed}
    options = {**defaults, **flat(table)}
    for source in options.get("data.sources", ()):
        source.pop("revision", None)  # as data.revision
        source.pop("label", None)  # as data.label
    total = options.setdefault(TOTAL_STEPS, options["training.steps"])
    if options["lr_scheduler.decay_type"] == "constant" and options["lr_scheduler.warmup_steps"] <= total:
        del options[TOTAL_STEPS]  # it has no effect after the warm-up if the rate is then constant
    return options


def hash_of_changes(text: str) -> str:
    """Hash of those options in ``text`` that change the run: with the same hash, steps have the same values."""
    changing = (Kind.CHANGES, Kind.IMPOSSIBLE)
    options = {key: value for key, value in sorted(options_in(text).items()) if kind_of(key) in changing}
    return xxhash.xxh3_64_hexdigest(repr(options).encode())


def check_resume_compatibility(
    saved_toml: str,
    current_toml: str,
    allow_changes: Iterable[str],
    saved_data: Mapping[str, str] = MappingProxyType({}),
    current_data: Mapping[str, str] = MappingProxyType({}),
    changed_files: Sequence[str] = (),
) -> list[str]:
    """What to log about the config of a run that resumes: one line for each kind of difference.

    Args:
        saved_toml, current_toml: the resolved configs.
        allow_changes: options that may change the run.
        saved_data, current_data: the identity of data and tokenizer by option.
        changed_files: for each source, the files that have changed (``data_identity.describe_changes``).

    Raises:
        CheckpointError: a difference that is impossible, or one that changes the run and is not in ``allow_changes``.
    """
    found: Mapping[Kind, list[Difference]] = {kind: [] for kind in Kind}
    for difference in differences(saved_toml, current_toml):
        key = difference.key
        elsewhere = key in SAME_ELSEWHERE and same_content(saved_data.get(key, ""), current_data.get(key))
        files = _of_option(key, changed_files) if key in ("data.path", "data.name") else ""
        found[Kind.HARMLESS if elsewhere else difference.kind].append(replace(difference, files=files))
    changed = {difference.key for difference in found[Kind.CHANGES]}
    for key, saved in saved_data.items():
        current = current_data.get(key, saved)  # another option names the data now: a difference of the config
        if not same_content(saved, current) and (key not in changed or key == "model.tokenizer_path"):
            found[Kind.CHANGES].append(Difference(key, saved, current, files=_of_option(key, changed_files)))
    if found[Kind.IMPOSSIBLE]:
        raise CheckpointError(
            f"{_new_folder(current_toml)}. The checkpoint in this one does not fit this run:"
            f"{_listed(found[Kind.IMPOSSIBLE])}Set the checkpoint's value again, or start the new run from the weights "
            "of this one: checkpoint.initial_load_path"
        )
    allowed = list(allow_changes)
    rejected = [difference for difference in found[Kind.CHANGES] if difference.key not in allowed]
    if rejected:
        keys = list(dict.fromkeys(difference.key for difference in rejected))
        allow = f"checkpoint.allow_changes = {allowed + keys}"
        # The user has changed training.steps, and may never have heard of lr_scheduler.total_steps.
        extended = TOTAL_STEPS in keys and TOTAL_STEPS not in flat(tomli.loads(current_toml))
        others = [difference for difference in rejected if not (extended and difference.key == TOTAL_STEPS)]
        messages = []
        if others:
            missing = {of.key.split(".")[0] for of in others} - {*section_types(), "stages"}
            if missing:
                messages.append(
                    f" [{'], ['.join(sorted(missing))}] is of a plugin that is not installed here: install it"
                )
            restarted = ", with which a source that has other content is read from its start" if changed_files else ""
            back = ", put files back" if any(of.key in current_data for of in others) else ""
            messages.append(
                f"{_listed(others)}Set the checkpoint's value again{back}, or, if this run is to continue with the new "
                f"one, add it to the config, or give --checkpoint.allow_changes: {allow}{restarted}"
            )
        if extended:
            messages.append(_another_length(saved_toml, current_toml, "the same" if others else allow))
        # Where only the content of files has changed, or the run is to be longer, nobody means a new run.
        new = f"{_new_folder(current_toml)}. Here, " if any(of.key in changed for of in others) else ""
        raise CheckpointError(f"{new}resuming would not continue the same run:" + "\nAlso,".join(messages))
    return [
        f"config differs from the checkpoint's ({kind.value}): {joined(found[kind])}" for kind in Kind if found[kind]
    ]


def _another_length(saved_toml: str, current_toml: str, allow: str) -> str:
    """That training.steps changes the schedule, and the two ways to go on."""
    from torchtrain.optimizers.lr_schedule import LRSchedule  # it imports PyTorch

    saved, current = options_in(saved_toml), options_in(current_toml)
    length = flat(tomli.loads(saved_toml)).get(TOTAL_STEPS, saved["training.steps"])
    names = ("warmup_steps", "decay_ratio", "start_step")
    lengths: dict[str, Any] = {name: saved.get(f"lr_scheduler.{name}") for name in names}
    phases = LRSchedule(LRSchedulerConfig(total_steps=length, **lengths), 1.0, length).phases
    constant = saved["lr_scheduler.decay_type"] == "constant" or not phases.decay
    floor = "optimizer.lr" if constant else f"lr_scheduler.min_lr_factor = {saved['lr_scheduler.min_lr_factor']}"
    return (
        f" training.steps = {current['training.steps']} is also the length of the learning-rate schedule, since "
        f"{TOTAL_STEPS} is not set, and the checkpoint's schedule has {length} steps. Either keep that schedule, by "
        f"{TOTAL_STEPS} = {length}: later steps have its last rate ({floor}). Or take the longer or shorter one from "
        f"here on, by {allow}"
    )


def _of_option(key: str, changed_files: Sequence[str]) -> str:
    """The changed files of the sources that the option ``key`` names; "" if it names no data."""
    if not key.startswith("data."):
        return ""
    several = key == "data.sources"
    named = [(f"data.sources[{number}] " if several else "", files) for number, files in enumerate(changed_files)]
    return "; ".join(f"{source}{files}" for source, files in named if files)


def source_identities(data: Mapping[str, str]) -> list[str]:
    """The identity of each source in ``data`` (``DataLoader.identity``)."""
    texts = [text for key, text in data.items() if key.startswith("data.") and key != EXCLUDE]
    return [identity for text in texts for identity in text.split("; ")]


def same_content(saved: str, current: str | None) -> bool:
    """Whether two identities are equal in what both state of each source.

    One of them may lack the hash of all content, which comes last: it depends on data.verify_gib.
    """
    if current is None:
        return False
    for a, b in zip_longest(saved.split("; "), current.split("; "), fillvalue=""):
        shorter, longer = sorted((a, b), key=len)
        if longer != shorter and not (shorter and longer.startswith(f"{shorter}, ")):
            return False
    return True


def is_same_run(start: Mapping[str, Any], options: str, data: Mapping[str, str]) -> bool:
    """Whether an earlier start of a run trained with the same options on the same data, as far as that is known.

    Args:
        start: its event "start" in metrics.jsonl; empty if there is none.
        options, data: of the process that starts now: ``hash_of_changes`` and the identity of its data and tokenizer.
    """
    saved = start.get("data", {})
    same_data = all(same_content(saved[key], text) for key, text in data.items() if key in saved)
    return bool(start.get("options", options) == options and same_data)


def _new_folder(current_toml: str) -> str:
    """That a new run needs another folder, with the options for one."""
    options = options_in(current_toml)
    folder, checkpoints = options["job.dump_folder"].rstrip("/"), options["checkpoint.folder"].rstrip("/")
    elsewhere = f" --checkpoint.folder {checkpoints}_2" if is_url(checkpoints) or checkpoints.startswith("/") else ""
    return f"a new run needs a folder of its own: --job.dump_folder {folder or 'outputs/run'}_2{elsewhere}"


def _listed(found: Sequence[Difference]) -> str:
    """The differences before the next sentence, several on a line each."""
    return f" {found[0]}. " if len(found) == 1 else "".join(f"\n  {difference}" for difference in found) + "\n"


def joined(found: Iterable[Difference]) -> str:
    return "; ".join(map(str, found))
