"""A section of the config: a frozen dataclass that checks its values by the types of its fields.

The docstring of a field is the documentation of the option, shown by ``--help``, and its type defines the valid values.
The sections are in the ``options.py`` of the folder whose components read them, those of a run in ``schema.py``.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from torchtrain.config.registry import Registry
from torchtrain.errors import ConfigError
from torchtrain.files import is_url


def require(holds: bool, rule: str) -> None:
    """Raise ``ConfigError(rule)`` unless ``holds``."""
    if not holds:
        raise ConfigError(rule)


Rule = tuple[str, Callable[[Any], bool]]
"""The text after "must" in the error message, and a function that returns whether a value is valid."""


def at_least(minimum: float) -> Rule:
    return f"be at least {minimum}", lambda value: value >= minimum


FINITE: Rule = ("be a finite number", lambda value: value < math.inf)

# Types of options, annotated with the rules for their values. None is valid for every rule.
Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
CountOrAuto = Annotated[int, ("be -1 or at least 1", lambda value: value == -1 or value >= 1)]
Fraction = Annotated[float, ("be between 0 and 1", lambda value: 0 <= value <= 1)]
NotNegative = Annotated[float, at_least(0), FINITE]
NO_URL = "be a local path; URLs are not supported: give a folder where the storage is mounted, or copy the files"
LOCAL: Rule = (NO_URL, lambda value: not is_url(value))
LocalPath = Annotated[str, LOCAL]
TOKENS = r"([0-9]+(?:\.[0-9]+)?)([KMBT]?|x)"
"""A number of tokens, such as 500M or 20B, or of tokens for each parameter of the model, such as 20x."""
TokenCount = Annotated[
    str,
    (
        "be a number of tokens such as '500M' or '20B', or of tokens for each parameter such as '20x'",
        lambda value: not value or bool(re.fullmatch(TOKENS, value) and 0 < float(value.rstrip("KMBTx")) < 2**63),
    ),
]


def require_local(path: str, option: str) -> None:
    """Raise ``ConfigError`` if ``path``, the value of ``option``, is a URL."""
    require(not is_url(path), f"{option} = {path!r} must {NO_URL}")


@cache
def rules_of(hint: Any) -> list[Rule]:
    """The rules in a type, such as ``Count | None`` or ``tuple[Count, ...]``."""
    parts = get_args(hint)  # for Annotated: the type, then its annotations
    return [part for part in parts if isinstance(part, tuple)] + [rule for part in parts for rule in rules_of(part)]


@cache
def registries_of(hint: Any) -> list[Registry]:
    """The registries in a type, such as ``Annotated[str, OPTIMIZERS] | None``."""
    parts = get_args(hint)
    own = [part for part in parts if isinstance(part, Registry)]
    return own + [registry for part in parts for registry in registries_of(part)]


def key_of(field_name: str) -> str:
    """The TOML key of a field: its name without the trailing underscore of a Python keyword (``import_``)."""
    return field_name.rstrip("_")


def check_values(options: Any, prefix: str) -> None:
    """Raise ``ConfigError`` for the first field, of a dataclass or of one nested in it, that violates a rule of its
    type.

    The value of a field that is annotated with a ``Registry`` must be the name of one of its entries.
    """
    for option in fields(options):
        value, name = getattr(options, option.name), f"{prefix}{key_of(option.name)}"
        hint: Any = option.type
        for registry in registries_of(hint):
            if value is not None:
                registry.check(value, name)
        if is_dataclass(value):
            check_values(value, f"{name}.")
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if is_dataclass(item):
                check_values(item, f"{name}[{number}].")
        for rule, holds in rules_of(hint):
            for one in value if isinstance(value, tuple) else (value,):
                require(one is None or holds(one), f"{name} = {one!r} must {rule}")


class Section:
    """Base class of a section that checks its values. ``name``: the name of the section in the TOML file."""

    section_name: ClassVar[str]
    changes_run: ClassVar[bool] = True
    """Of a plugin: whether its options change results, so that a run resumes with others only by ``allow_changes``."""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.section_name = name

    def __post_init__(self) -> None:
        check_values(self, f"{self.section_name}." if self.section_name else "")

    is_of_data: ClassVar[bool] = False
    """Of a plugin: whether its options say how the data are read, so that a replay of a step keeps them."""
    output_files: ClassVar[tuple[str, ...]] = ()
    """Of a plugin: files and folders that it writes to the dump folder, and that are renamed if another run begins
    there."""
    may_differ_between_stages: ClassVar[bool] = False
    """Of a plugin: whether the stages of a run may have different options."""

    def check(self, config: Any) -> None:
        """Of a plugin: raise ConfigError if these options do not go with the others of the ``JobConfig``. Called for
        each config, also for sections with the defaults."""

    def check_run(self, run: Any, device: Any) -> None:
        """Of a plugin: raise ConfigError if a run cannot have these options, given the ``resolve.ResolvedRun`` and the
        ``torch.device``. Called on each rank before the process groups are initialized."""

    def check_data(self) -> None:
        """Of a plugin: raise ConfigError if data that these options name cannot be loaded. Called on each rank before
        training begins, for the later stages of a run; the first one loads them."""

    def next_commands(self, config: Any, path: str) -> Sequence[str]:  # noqa: ARG002
        """Of a plugin: commands that use what a complete run with ``config`` has saved. ``path``: their argument, a
        folder or URL as a shell takes it."""
        return ()

    @property
    def trainer_class(self) -> str:
        """Of a plugin: "module:attribute" of the subclass of ``trainer.Trainer`` that trains a run with these options.
        "": any does."""
        return ""


AnySection = TypeVar("AnySection", bound=Section)
SAME_NUMBER = {
    "training.tokens": "training.steps",
    "lr_scheduler.warmup_tokens": "lr_scheduler.warmup_steps",
    "lr_scheduler.total_tokens": "lr_scheduler.total_steps",
    "lr_scheduler.decay_tokens": "lr_scheduler.decay_ratio",
    "checkpoint.interval_tokens": "checkpoint.interval",
    "validation.interval_tokens": "validation.interval",
}
"""Options in tokens, and those in steps that stand for the same number."""


def require_one(section: Any, in_tokens: str, other: str) -> None:
    """Raise ``ConfigError`` if two options of ``section`` that stand for the same number are both set.

    An option that has its default counts as not set. On the command line, one replaces the other in the file.
    """
    tokens, value, name = getattr(section, in_tokens), getattr(section, other), section.section_name
    defaults = {option.name: option.default for option in fields(section)}
    require(
        not tokens or value == defaults[other],
        f"{name}.{in_tokens} = {tokens!r} and {name}.{other} = {value!r} exclude each other; set one of them",
    )


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to options by full name: ``{"a": {"b": 1}}`` to ``{"a.b": 1}``."""
    options: dict[str, Any] = {}
    for key, value in table.items():
        options |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return options
