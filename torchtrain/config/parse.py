"""From a TOML file and the command line to a ``JobConfig``: defaults < file < command line.

tyro reads the command line. The file goes through ``from_toml``, which admits nothing that the dataclasses do not have.
"""

import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli
import tomli_w

from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError

Section = TypeVar("Section")


def parse(argv: Sequence[str], *, print_errors: bool = True) -> JobConfig:
    """The config of ``argv`` (without the program's name) and of the file it names.

    A bad file raises ConfigError. A bad command line, like ``--help``, ends the process, with a message unless
    ``print_errors`` is off: all ranks parse, one speaks.
    """
    import tyro  # only doors parse, and it takes a moment

    file = config_file(argv)
    defaults = from_file(file) if file else JobConfig()
    with ExitStack() as silence:
        if not print_errors:  # tyro's own console_outputs=False lets some errors through
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        config = tyro.cli(
            JobConfig,
            prog="torchtrain",
            description="Pretrain a Llama model. Options may also stand in a TOML file, by section and key.",
            args=list(argv),
            default=defaults,
            use_underscores=True,
        )
    if config.job.dump_folder:
        return config
    job = dataclasses.replace(config.job, dump_folder=f"outputs/{Path(file).stem if file else 'default'}")
    return dataclasses.replace(config, job=job)


def config_file(argv: Sequence[str]) -> str:
    """Value of the last ``--job.config_file`` in ``argv``, or ''. A launcher puts its own before those of the user."""
    found = ""
    for i, word in enumerate(argv):
        key, has_value, value = word.partition("=")
        if key.replace("-", "_") == "__job.config_file":
            found = value if has_value else "".join(argv[i + 1 : i + 2])
    return found


def from_file(path: str) -> JobConfig:
    """The config in the TOML file ``path``, defaults where it says nothing."""
    if not Path(path).is_file():
        raise ConfigError(f"job.config_file = {path!r} is not a file{nearest_file(path)}")
    try:
        table = tomli.loads(Path(path).read_text(encoding="utf-8"))
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return from_toml(JobConfig, table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_toml(section: type[Section], table: dict[str, Any], where: str = "") -> Section:
    """Build the dataclass ``section`` from a TOML table; ``where`` is the table's name in messages."""
    hints = typing.get_type_hints(section)
    names = [field.name for field in dataclasses.fields(section)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        name = f"{where}.{key}" if where else key
        if key not in names:
            kind = "section" if isinstance(value, dict) and not where else "key"
            raise ConfigError(f"{name} is no {kind}{did_you_mean(key, names, f'{where}.' if where else '')}")
        values[key] = convert(hints[key], value, name)
    return section(**values)


def convert(hint: Any, value: Any, name: str) -> Any:
    """``value`` of a TOML file as the type ``hint``; ConfigError names the key ``name``, the value and the type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return convert(arguments[0], value, name)
    if origin in (types.UnionType, typing.Union):  # X | None: TOML has no None, so a value is an X
        return convert(arguments[0], value, name)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{name} = {value!r} must be a table, [{name}]")
        return from_toml(typing.cast(type[Any], hint), value, name)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            choices = ", ".join(repr(choice) for choice in arguments)
            raise ConfigError(f"{name} = {value!r} must be one of {choices}{did_you_mean(str(value), arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{name} = {value!r} must be a list")
        return tuple(convert(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: True is an int to Python
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{name} = {value!r} must be {words[hint]}")
    return value


def did_you_mean(word: str, choices: Iterable[Any], prefix: str = "") -> str:
    """'; did you mean ...?' with the nearest of ``choices``, or the list of them where none is near."""
    strings = [str(choice) for choice in choices]
    near = difflib.get_close_matches(word, strings, n=1)
    return f"; did you mean {prefix + near[0]!r}?" if near else f"; there are {', '.join(strings)}"


def nearest_file(path: str) -> str:
    folder = Path(path).parent
    names = [str(file) for file in folder.glob("*.toml")] if folder.is_dir() else []
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_toml(config: JobConfig) -> str:
    """The config as a TOML file that gives the same config again."""
    return tomli_w.dumps(to_dict(config))


def to_dict(config: Any) -> dict[str, Any]:
    """The config, or a section of it, as nested dicts of plain values, without the keys that are None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if item is not None}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return typing.cast(dict[str, Any], plain(dataclasses.asdict(config)))
