"""Options of components: a class in a registry has a dataclass of its own, ``Options``, and a table in the config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtrain.config.parse import from_toml
from torchtrain.errors import ConfigError


@dataclass(frozen=True)
class NoOptions:
    """Options of a component that has none of its own."""


class Component:
    """Base class of components that a name in the config selects, with options of their own.

    Where a section selects one component, the table is [SECTION.options], such as [lr_scheduler.options]; where it may
    select several, [SECTION.options.NAME], such as [optimizer.options.lion].
    """

    Options: ClassVar[type] = NoOptions
    """A frozen dataclass: its fields are the options, with their types and defaults."""

    @classmethod
    def read_options(cls, table: Mapping[str, Any], name: str) -> Any:
        """The options in ``table``, whose full name is ``name``, as an instance of ``Options``.

        Raises:
            ConfigError: a key is unknown, or a value has another type.
        """
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} = {table!r} must be a table, [{name}]")
        return from_toml(cls.Options, dict(table), f"{name}.")
