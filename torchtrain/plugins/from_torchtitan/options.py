"""The options of torchtitan's whole history: what becomes of each, and since and until when torchtitan had it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from torchtrain.config.parse import command_line_type, option_types

TOML_ENDS = "2026-02-23"  # the day on which Python functions replaced torchtitan's TOML files


@dataclass(frozen=True)
class TorchtitanOption:
    """An option of torchtitan. Days are texts such as 2025-06-17, which compare as the days do."""

    here: str = ""
    """torchtrain's option; empty: it has no counterpart, and ``note`` says why."""
    note: str = ""
    default: Any = None
    """torchtitan's newest default."""
    before: Mapping[str, Any] = field(default_factory=dict)
    """Older defaults, by the day on which they changed."""
    same: Sequence[Any] = ()
    """Values that have no effect, or whose effect torchtrain or another of its options has."""
    since: str = ""
    until: str = ""
    """The day on which torchtitan renamed or removed it; empty: it still has it."""

    @property
    def about(self) -> str:
        """What an error about this option says after its name."""
        which = f"it is named {self.here} in torchtrain" if self.here else "it has no counterpart in torchtrain"
        return f"{which}{f' ({self.note})' if self.note else ''}"

    def default_before(self, day: str) -> Any:
        """The default on the last day before ``day``."""
        return next((self.before[change] for change in sorted(self.before) if day <= change), self.default)

    def exists_before(self, day: str) -> bool:
        """Whether torchtitan had the option on the last day before ``day``."""
        return self.since < day and (not self.until or day <= self.until)


@cache
def torchtitan_options() -> dict[str, TorchtitanOption]:
    """All options by full name; a name that ends in * stands for all options of a section."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {name: TorchtitanOption(**entry) for name, entry in tomli.loads(text).items()}


def find_option(name: str) -> TorchtitanOption | None:
    """The option ``name`` of torchtitan; None if it never had it."""
    options = torchtitan_options()
    if name in options:
        return options[name]
    stars = (option for star, option in options.items() if star.endswith("*") and name.startswith(star[:-1]))
    return next(stars, None)


def versions_with(names: Iterable[str]) -> tuple[str, str]:
    """The first day, and the day after the last one, on which torchtitan's TOML files had all options in ``names``.

    Names that torchtitan never had are ignored. If no version had all, the first day is not before the second one.
    """
    found = [option for option in map(torchtitan_options().get, names) if option and option.since]
    first = max((option.since for option in found), default="")
    return first, min((option.until or TOML_ENDS for option in found), default=TOML_ENDS)


class TorchtitanHints:
    """Hints about options of torchtitan, ``config.registry.OptionHints``."""

    def about_option(self, name: str) -> str:
        option = find_option(name)
        return option.about if option else ""

    def about_file(self, names: Collection[str]) -> str:
        own = option_types(command_line_type())
        if not any(find_option(name) for name in names if name not in own):
            return ""
        return (
            "to convert a config file of torchtitan: python -m torchtrain.convert_config FILE --output my_config.toml "
            "(docs/from-torchtitan.md)"
        )


HINTS = TorchtitanHints()
