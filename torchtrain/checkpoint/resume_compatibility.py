"""What a changed config means for a run that resumes.

Each option is of one kind. *Harmless* ones only watch the run. *Layout* ones split or speed up the same run. Others
*change the run* from here on. With *impossible* ones the checkpoint does not fit the run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import tomli

from torchtrain.config.parse import renamed_to, to_dict
from torchtrain.config.schema import JobConfig, RopeScalingConfig, flat
from torchtrain.errors import CheckpointError
from torchtrain.files import printable


class Kind(Enum):
    HARMLESS = "harmless"
    LAYOUT = "layout"
    CHANGES = "changes the run"
    IMPOSSIBLE = "impossible"


# By section, and by option where that is of another kind than its section. What is not here changes the run.
KINDS = {
    Kind.HARMLESS: {
        *("job", "prepare", "checkpoint", "faults", "validation", "metrics", "profiling", "comm", "debug", "estimate"),
        # training.steps counts by lr_scheduler.total_steps (see options_in), and data.revision by the data's identity.
        *("training.steps", "training.gc_freq", "data.prefetch", "data.revision", "data.verify_gib"),
        "model.shape.max_position_embeddings",  # only said of exports
    },
    Kind.LAYOUT: {
        *("parallelism", "activation_checkpoint", "compile", "optimizer.implementation", "ema.offload"),
        "training.local_batch_size",  # only says how the global batch is divided
        *("training.loss_chunk_tokens", "training.attention_backend"),
        *("training.enable_cpu_offload", "training.deterministic"),
    },
    Kind.CHANGES: {
        *("optimizer", "ema", "mup", "lr_scheduler", "training", "data", "float8"),
        "model.shape.rope_theta",
        *(f"model.shape.rope_scaling.{option.name}" for option in fields(RopeScalingConfig)),
        "model.tokenizer_path",  # a copy in another folder is the same tokenizer
    },
    # Another optimizer has other states; the position in streamed data is saved by stream.
    Kind.IMPOSSIBLE: {"model", "optimizer.name", "data.streams"},
}

TOTAL_STEPS = "lr_scheduler.total_steps"

SAME_ELSEWHERE = ("data.path", "data.name", "model.tokenizer_path")
"""Options that name files or folders: a change is harmless where the content is the same as before."""


def kind_of(key: str) -> Kind:
    """Kind of an option such as ``optimizer.lr``."""
    found = (kind for name in (key, key.split(".")[0]) for kind, names in KINDS.items() if name in names)
    return next(found, Kind.CHANGES)


@dataclass(frozen=True)
class Difference:
    """An option whose value differs between the checkpoint and this run; None: not set."""

    key: str
    saved: Any
    current: Any

    @property
    def kind(self) -> Kind:
        return kind_of(self.key)

    def __str__(self) -> str:
        return f"{printable(self.key)} = {self.current!r} (checkpoint: {self.saved!r})"


def differences(saved_toml: str, current_toml: str) -> list[Difference]:
    """Options in which two resolved configs differ, in the order of their names."""
    saved, current = options_in(saved_toml), options_in(current_toml)
    return [
        Difference(key, saved.get(key), current.get(key))
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key) != current.get(key)
    ]


def options_in(text: str) -> dict[str, Any]:
    """The options in ``text`` by full name, with defaults, also those that depend on other options."""
    saved = {renamed_to(key) or key: value for key, value in flat(tomli.loads(text)).items()}
    options = {**flat(to_dict(JobConfig())), **saved}  # an older config lacks newer options
    for source in options.get("data.sources", ()):
        source.pop("revision", None)  # as data.revision
    total = options.setdefault(TOTAL_STEPS, options["training.steps"])
    if options["lr_scheduler.decay_type"] == "constant" and options["lr_scheduler.warmup_steps"] <= total:
        del options[TOTAL_STEPS]  # it has no effect after the warm-up if the rate is then constant
    return options


def check_resume_compatibility(
    saved_toml: str,
    current_toml: str,
    allow_changes: Iterable[str],
    saved_data: Mapping[str, str] = MappingProxyType({}),
    current_data: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """What to log about the config of a run that resumes: one line for each kind of difference.

    ``saved_data`` and ``current_data``: the identity of data and tokenizer by option; older checkpoints lack it.

    Raises:
        CheckpointError: a difference that is impossible, or one that changes the run and is not in ``allow_changes``.
    """
    found: Mapping[Kind, list[Difference]] = {kind: [] for kind in Kind}
    for difference in differences(saved_toml, current_toml):
        key = difference.key
        elsewhere = key in SAME_ELSEWHERE and same_content(saved_data.get(key, ""), current_data.get(key))
        found[Kind.HARMLESS if elsewhere else difference.kind].append(difference)
    changed = {difference.key for difference in found[Kind.CHANGES]}
    for key, saved in saved_data.items():
        current = current_data.get(key, saved)  # another option names the data now: a difference of the config
        if not same_content(saved, current) and (key not in changed or key == "model.tokenizer_path"):
            found[Kind.CHANGES].append(Difference(key, saved, current))
    if found[Kind.IMPOSSIBLE]:
        raise CheckpointError(
            f"the checkpoint does not fit this run: {_joined(found[Kind.IMPOSSIBLE])}. Set the old value again, or "
            "start a new run in another job.dump_folder (from these weights: checkpoint.initial_load_path)"
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
            messages.append(
                f"{_joined(others)}. Set the old value again, put files back, or, if this is what you want, add it to "
                f"the config: {allow}"
            )
        if extended:
            messages.append(_another_length(saved_toml, current_toml, allow))
        raise CheckpointError(f"resuming would not continue the same run: {'. Also, '.join(messages)}")
    return [
        f"config differs from the checkpoint's ({kind.value}): {_joined(found[kind])}" for kind in Kind if found[kind]
    ]


def _another_length(saved_toml: str, current_toml: str, allow: str) -> str:
    """That training.steps changes the schedule, and the two ways to go on."""
    saved, current = options_in(saved_toml), options_in(current_toml)
    length = flat(tomli.loads(saved_toml)).get(TOTAL_STEPS, saved["training.steps"])
    constant = saved["lr_scheduler.decay_type"] == "constant"
    floor = "optimizer.lr" if constant else f"lr_scheduler.min_lr_factor = {saved['lr_scheduler.min_lr_factor']}"
    return (
        f"training.steps = {current['training.steps']} is also the length of the learning-rate schedule, since "
        f"{TOTAL_STEPS} is not set, and the checkpoint's schedule has {length} steps. Either keep that schedule, by "
        f"{TOTAL_STEPS} = {length}: later steps have its last rate ({floor}). Or take the longer or shorter one from "
        f"here on, by {allow}"
    )


def source_identities(data: Mapping[str, str]) -> list[str]:
    """The identity of each source in ``data`` (``DataLoader.identity``)."""
    return [identity for key, text in data.items() if key.startswith("data.") for identity in text.split("; ")]


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


def _joined(found: Iterable[Difference]) -> str:
    return "; ".join(map(str, found))
