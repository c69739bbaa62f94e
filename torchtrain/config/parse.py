"""Parse a ``JobConfig`` from a TOML file and the command line, which overrides the file.

The values of the command line replace those of the file's table, and ``from_toml`` checks the result: unknown options
and invalid values are rejected with the same messages in both.
"""

import argparse
import dataclasses
import difflib
import functools
import os
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli
import tomli_w

from torchtrain.config.registry import CONFIG_SECTIONS, OPTION_HINTS, disable_plugins, import_modules
from torchtrain.config.schema import JobConfig, JobSection, section_types, to_dict
from torchtrain.config.section import SAME_NUMBER, flat, key_of
from torchtrain.config.urls import local_copy
from torchtrain.errors import ConfigError
from torchtrain.files import MISSING, printable, read_file
from torchtrain.logging import logger

Section = TypeVar("Section")

BATCH_SIZE, BATCH_SCHEDULE = "training.global_batch_size", "training.global_batch_size_schedule"
"""A text as the value of the first option is that of the second."""

MOST_OF_ONE_NAME = 3
"""Options of one name in different sections that an unknown key of this name may mean."""

TRAIN = "Pretrain a Llama model. Options may also be set in a TOML file (--job.config_file), by section and key."


def parse(
    argv: Sequence[str], prog: str = "torchtrain.train", description: str = TRAIN, *, print_help: bool = True
) -> JobConfig:
    """Parse the command line ``argv``, and the config file that it names.

    Args:
        argv: the command line, without the name of the program.
        prog: the name of the program for ``--help``.
        description: the description for ``--help``, its paragraphs separated by empty lines.
        print_help: whether to print the page of ``--help``. All ranks parse, but only rank 0 prints.

    Raises:
        ConfigError: the config file, the command line, or their combination is invalid.
        SystemExit: after ``--help``.
    """
    file = config_file(argv)
    argv = with_batch_schedule(argv)
    disable_plugins(job_option("disable_plugins", argv, file))
    import_modules(job_option("import", argv, file))
    # Values of the file are not checked yet: the command line may override those that are invalid together.
    defaults = from_file(file, checked=False) if file else JobConfig()
    topic = help_topic(argv)
    if topic is not None:
        from torchtrain.config.help import help_page

        text = help_page(topic, prog, description, defaults)
        if print_help:
            sys.stdout.write(f"{text}\n")
        raise SystemExit(0)
    unset_replaced(defaults, argv)
    table = to_dict(defaults)
    for name, value in read_options(argv, table).items():
        *tables, key = name.split(".")
        options = table
        for part in tables:
            options = options.setdefault(part, {})
        options[key] = value
        if value is None:
            del options[key]
    table["job"]["dump_folder"] = table["job"]["dump_folder"] or f"outputs/{Path(file).stem if file else 'default'}"
    return from_toml(JobConfig, table)


def read_options(argv: Sequence[str], table: dict[str, Any]) -> dict[str, Any]:
    """The options in ``argv`` by full name, with their values as in a TOML file, whose types are not checked.

    Args:
        argv: the command line.
        table: the options of the file, or their defaults. The types of options that no dataclass has are those of their
            values in it.

    Raises:
        ConfigError: an option is unknown, or has no value or too many. One message lists all of them, one per line.
    """
    known = option_types(command_line_type())
    of_file = flat(table)
    values, problems = {}, []
    for word, words in options_in(argv):
        name = word[2:].replace("-", "_")
        table_name, _, key = name.rpartition(".")
        negated = f"{table_name}.{key[3:]}" if key.startswith("no_") else ""
        try:
            if known.get(negated) is bool and not words:
                values[negated] = False
            elif name in known:
                values[name] = from_words(known[name], words, name)
            elif name in of_file:
                like = of_file[name]
                hint = tuple[type(like[0]), ...] if isinstance(like, list) and like else type(like)  # type: ignore[misc]
                values[name] = from_words(hint, words, name)
            else:
                problems.append(unknown_option(word, name, known))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n  ".join(["the command line:", *problems] if len(problems) > 1 else problems))
    return values


def options_in(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The options of ``argv``, each with its words: the one after ``=``, or those up to the next option."""
    rest = list(argv)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        words = [value] if equals else []
        while rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        yield option, words


def option_types(section: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each option of a dataclass, and of those nested in it, by full name."""
    hints = _type_hints(section)
    types_by_name: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        name, hint = prefix + key_of(field.name), hints[field.name]
        types_by_name |= option_types(hint, f"{name}.") if dataclasses.is_dataclass(hint) else {name: hint}
    return types_by_name


def from_words(hint: Any, words: Sequence[str], name: str) -> Any:
    """The value of the option ``name`` of the type ``hint``, as in a TOML file, that ``words`` of the command line are.

    A word that is no value of the type stays a text, which ``convert`` rejects. None unsets an option.
    """
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None, or X | tuple[X, ...]
        first, second = typing.get_args(hint)
        if second is types.NoneType and [*words] == ["None"]:
            return None
        hint = second if typing.get_origin(second) is tuple and len(words) > 1 else first
    if typing.get_origin(hint) is tuple:
        return [from_words(typing.get_args(hint)[0], [word], name) for word in words]
    if hint is bool and not words:
        return True
    if len(words) != 1:
        raise ConfigError(f"--{name} needs one value, and has {' '.join(map(repr, words)) or 'none'}")
    word = words[0]
    if hint is bool:
        return {"true": True, "false": False}.get(word.lower(), word)
    if typing.get_origin(hint) is Literal:
        hint = type(typing.get_args(hint)[0])
    try:
        return hint(word)
    except ValueError:
        return word


def unknown_option(word: str, name: str, known: Iterable[str]) -> str:
    """The error message about an option of the command line that does not exist."""
    if not word.startswith("--"):
        return f"{word!r} is not an option: options are named --SECTION.OPTION; see --help"
    if about := about_option(name):
        return f"--{name} is not a known option: {about}"
    section, dot, rest = name.partition(".")
    sections = section_types()
    if not dot:
        last_words = {key: option for option in known for key in (option.rpartition(".")[2], option.replace(".", "_"))}
        near = difflib.get_close_matches(name, last_words, n=1)
        hint = f"; did you mean '--{last_words[near[0]]}'?" if near else ""
        return f"{word} is not a known option: options are named --SECTION.OPTION{hint or '; see --help'}"
    if section not in sections and (plugin := CONFIG_SECTIONS.missing_plugin(section)):
        return f"{name} needs {plugin}"
    if section == "stages":
        return f"--{name}: stages are tables of a config file, [[stages]] (docs/stages.md)"
    near = difflib.get_close_matches(section, sections, n=1)
    if not near:
        return (
            f"--{name}: there is no section {section!r}, or it is of a plugin that is not installed; there are "
            f"{', '.join(sections)}"
        )
    table = next((option for option in known if name.startswith(f"{option}.")), "")
    if table:
        return f"--{name}: set it in the config file, in the table {table}; the command line can then change it"
    options = [option.partition(".")[2] for option in known if option.startswith(f"{near[0]}.")]
    closest = [f"{near[0]}.{option}" for option in difflib.get_close_matches(rest, options, n=1)]
    meant = [f"'--{option}'" for option in (rest not in options and options_named(rest)) or closest]
    if meant:
        return f"--{name} is not a known option; did you mean {' or '.join(meant)}?"
    return f"--{name} is not a known option; python -m torchtrain.train --help {near[0]} lists those of [{near[0]}]"


def about_option(name: str) -> str:
    """What is known of the option ``name``, which does not exist here; empty if nothing is."""
    texts = (OPTION_HINTS[source].about_option(name) for source in OPTION_HINTS)
    return next(filter(None, texts), "")


def command_line_type() -> type[Any]:
    """A dataclass whose fields are the sections. [[stages]] are only in files: they are tables of any options."""
    sections = [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in section_types().items()]
    return dataclasses.make_dataclass("JobConfig", sections, frozen=True)


def with_batch_schedule(argv: Sequence[str]) -> list[str]:
    """``argv``, in which a schedule of batch sizes is the value of its own option, which a number unsets."""
    words: list[str] = []
    for number, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name.replace("-", "_") != f"__{BATCH_SIZE}":
            words.append(word)
        elif "," in (value or "".join(argv[number + 1 : number + 2])):
            words.append(word.replace(name, f"--{BATCH_SCHEDULE}"))
        else:
            words += [f"--{BATCH_SCHEDULE}", "", word]
    return words


def unset_replaced(defaults: JobConfig, argv: Sequence[str]) -> None:
    """Unset options of a config file whose counterpart in steps or in tokens ``argv`` sets, and the held-out part of
    the default data if ``argv`` names others. Changes ``defaults``."""
    given = {word.partition("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
    for pair in SAME_NUMBER.items():
        for name, other in (pair, pair[::-1]):
            if name in given and other not in given:
                section, _, key = other.partition(".")
                options = getattr(defaults, section)
                vars(options)[key] = getattr(type(options)(), key)
    names_data = not given.isdisjoint(("data.path", "data.name", "data.type"))
    of_default_data = defaults.data.held_out and not (defaults.data.is_set or defaults.data.sources)
    if names_data and of_default_data and "data.held_out" not in given:
        logger.info(
            "data.held_out = %s of the config file is for its own data, and the command line names others: set "
            "--data.held_out to validate on a share of them",
            defaults.data.held_out,
        )
        vars(defaults.data)["held_out"] = 0.0


def help_topic(argv: Sequence[str]) -> str | None:
    """The word after ``--help`` or ``-h`` in ``argv``, '' if there is none; None without such an option."""
    for number, word in enumerate(argv):
        option, _, topic = word.partition("=")
        if option in ("--help", "-h"):
            following = argv[number + 1] if number + 1 < len(argv) else ""
            return (topic or ("" if following.startswith("-") else following)).strip("[]").replace("-", "_")
    return None


def config_file(argv: Sequence[str]) -> str:
    """Value of ``--job.config_file`` in ``argv``, or ''.

    Raises:
        ConfigError: there are several, of which only one could be read.
    """
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--job.config_file", "--job.config-file", nargs="?", dest="files", action="append", default=[])
    files = [file or "" for file in option.parse_known_args(argv)[0].files]
    if len(files) > 1:
        raise ConfigError(f"--job.config_file is given {len(files)} times, as {', '.join(files)}: give one file")
    return os.path.expanduser(files[0]) if files else ""


def job_option(name: str, argv: Sequence[str], file: str) -> Sequence[str]:
    """A list of names in [job], of the command line or else of the config ``file``; no other option is read."""
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument(f"--job.{name}", f"--job.{name.replace('_', '-')}", nargs="*", dest="names")
    names: Sequence[str] | None = option.parse_known_args(argv)[0].names
    if names is not None:
        return names
    job = read_table(read_text(file), file).get("job") if file else None
    if not isinstance(job, dict) or name not in job:
        return ()
    try:
        found = from_toml(JobSection, {name: job[name]}, "job.")
    except ConfigError as error:
        raise in_file(file, error) from None
    return next(value for key, value in vars(found).items() if key_of(key) == name)


def from_file(path: str, *, checked: bool = True) -> JobConfig:
    """Parse the TOML file ``path``; other options have their defaults. ``checked`` and errors: as for ``from_toml``."""
    return from_text(read_text(path), path, checked=checked)


def read_text(path: str, option: str = "job.config_file") -> str:
    """The text of the config file ``path``, also a URL, which is the value of ``option``.

    Raises:
        ConfigError: there is no such file, or it is not UTF-8.
    """
    try:
        data = read_file(local_copy(path, option))
        return data.decode("utf-8-sig")  # editors on Windows may add a byte order mark
    except MISSING:
        message = f"{option} = {path!r} is not a file (looked for {Path(path).absolute()})"
        files = [*train_configs(), *_configs_in(Path(path).parent)] if option == "job.config_file" else []
        configs = {Path(file).stem: file for file in files}
        if near := closest(Path(path).stem, configs):
            message += f"; did you mean {configs[near]!r}?"
        elif configs:
            message += f". There are:\n{by_folder(configs.values())}"
        raise ConfigError(message) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def read_table(text: str, path: str) -> dict[str, Any]:
    """The TOML ``text`` of the file ``path`` as a dict. Raises ConfigError if it is not valid TOML."""
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and Python's of a number with thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {printable(str(error))}") from None


def from_text(
    text: str, path: str, *, only_model: bool = False, only_known: bool = False, checked: bool = True
) -> JobConfig:
    """As ``from_file``, from the ``text`` of the file.

    ``only_model``: only the options that define the model, [model] and training.seq_len. Others may have values that
    this version rejects. ``only_known``: without unknown sections, such as those of a plugin that is not installed.
    """
    table = read_table(text, path)
    modules = missing_modules(table)
    if only_model:
        table = {name: table[name] for name in ("model", "training") if name in table}
        if isinstance(table.get("training"), dict):
            table["training"] = {key: value for key, value in table["training"].items() if key == "seq_len"}
    if only_known:
        known = {*section_types(), "stages"}
        table = {name: value for name, value in table.items() if name in known}
    try:
        return from_toml(JobConfig, table, checked=checked)
    except ConfigError as error:
        if modules:
            listed = " ".join(modules)
            error = ConfigError(
                f"{error}; its job.import names modules that are not imported here, because loading a checkpoint runs "
                f"no code: give --import {listed} (torchtrain.train: --job.import {listed})"
            )
        raise in_file(path, error, table) from None


def missing_modules(table: dict[str, Any]) -> list[str]:
    """The modules in ``job.import`` of a config's ``table`` that have not been imported."""
    job = table.get("job")
    names = job.get("import") if isinstance(job, dict) else None
    return [str(name) for name in names if name not in sys.modules] if isinstance(names, list) else []


def in_file(path: str, error: ConfigError, table: dict[str, Any] | None = None) -> ConfigError:
    """``error`` with the name of the config file before its message, and after it what is known of such a ``table``."""
    texts = (OPTION_HINTS[source].about_file(flat(table or {}).keys()) for source in OPTION_HINTS)
    lines = [*str(error).split("\n"), *(f"  {text}" for text in texts if text)]
    return ConfigError("\n".join([f"{path}:", f"  {lines[0]}", *lines[1:]]) if len(lines) > 1 else f"{path}: {error}")


def train_configs() -> list[str]:
    """Paths of the configs that come with the package, relative to the working folder if they are inside it."""
    folder = Path(__file__).parent.parent.parent / "train_configs"
    with suppress(ValueError, OSError):
        folder = folder.relative_to(Path.cwd())
    return _configs_in(folder)


def by_folder(files: Iterable[str]) -> str:
    """The names of ``files``, a line for each folder."""
    names: dict[Path, list[str]] = {}
    for file in files:
        names.setdefault(Path(file).parent, []).append(Path(file).name)
    here = Path()
    return "\n".join(
        f"  in {'the working folder' if folder == here else folder}: {', '.join(found)}"
        for folder, found in names.items()
    )


def _configs_in(folder: Path) -> list[str]:
    """The TOML files in ``folder`` whose top-level keys are all sections of ``JobConfig``."""
    found = []
    for file in sorted(folder.glob("*.toml")):
        with suppress(OSError, ValueError):
            table = tomli.loads(file.read_text(encoding="utf-8-sig"))
            if table and table.keys() <= {*section_types(), "stages"}:
                found.append(str(file))
    return found


def from_toml(section: type[Section], table: dict[str, Any], prefix: str = "", checked: bool = True) -> Section:
    """Build the dataclass ``section`` from a parsed TOML table.

    Args:
        section: the class.
        table: the table. Keys that it lacks have their defaults.
        prefix: what precedes the keys of the table in error messages, such as ``training.``.
        checked: whether to check the rules of the values; if not, only names and types are checked.

    Raises:
        ConfigError: a key is unknown or a value is invalid. One message lists all such keys, one per line.
    """
    hints = _type_hints(typing.cast(Any, section))
    names = {key_of(field.name): field.name for field in dataclasses.fields(section)}  # type: ignore[arg-type]
    values, plugins, problems = {}, {}, []
    is_whole = section is JobConfig
    sections = section_types() if is_whole else {}
    for key, value in table.items():
        name = printable(prefix + key)
        if option_of_value(name, value) != name:
            key = option_of_value(name, value).removeprefix(prefix)
        try:
            if is_whole and key in CONFIG_SECTIONS:
                plugins[key] = convert(sections[key], value, name, checked)
                continue
            if key in names and not (is_whole and key == "plugins"):
                values[names[key]] = convert(hints[names[key]], value, name, checked)
                continue
        except ConfigError as error:
            problems.append(str(error))
            continue
        abouts = {inner: about_option(inner) for inner in flat({name: value})}
        if any(abouts.values()):
            for inner, about in abouts.items():
                problems.append(f"{printable(inner)} is not a known key{': ' if about else ''}{about}")
        else:
            kind = "section" if isinstance(value, dict) and not prefix else "key"
            elsewhere = options_named(key) if prefix else []
            hint = did_you_mean(key, sections or names, prefix)
            if elsewhere:
                hint = f"; did you mean {' or '.join(map(repr, elsewhere))}?"
            if is_whole and (plugin := CONFIG_SECTIONS.missing_plugin(key)):
                hint = f": it is of {plugin}"
            elif is_whole and isinstance(value, dict) and not hint.startswith("; did you mean"):
                hint += "; or it is of a plugin that is not installed"
            problems.append(f"{name} is not a known {kind}{hint}")
    if problems:
        raise ConfigError("\n  ".join(problems))
    if is_whole:
        values["plugins"] = {name: options for name, options in plugins.items() if options != type(options)()}
    if checked:
        return section(**values)
    unchecked = section()
    vars(unchecked).update(values)  # without calling __post_init__, which checks the rules
    return unchecked


@functools.cache
def _type_hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


def option_of_value(name: str, value: Any) -> str:
    """The option that ``name = value`` sets: a text as the batch size is a schedule of batch sizes."""
    return BATCH_SCHEDULE if name == BATCH_SIZE and isinstance(value, str) else name


def convert(hint: Any, value: Any, name: str, checked: bool = True) -> Any:
    """Convert the parsed TOML ``value`` of the key ``name`` to the type ``hint``.

    Raises:
        ConfigError: the value has another type. ``checked``: as for ``from_toml``.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # X | None (TOML has no None), or X | tuple[X, ...]
        is_list = isinstance(value, list) and typing.get_origin(arguments[1]) is tuple
        return convert(arguments[is_list], value, name, checked)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{name} = {value!r} must be a table, [{name}]")
        return from_toml(typing.cast(type[Any], hint), value, f"{name}.", checked)
    if origin is dict:  # options of a registered component, which checks them itself
        if not isinstance(value, dict):
            raise ConfigError(f"{name} = {value!r} must be a table, [{name}]")
        return value
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            choices = ", ".join(repr(choice) for choice in arguments)
            near = closest(str(value), map(str, arguments))
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"{name} = {value!r} must be one of {choices}{hint}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{name} = {value!r} must be a list")
        return tuple(convert(arguments[0], item, f"{name}[{i}]", checked) for i, item in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance, because bool is a subclass of int
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{name} = {value!r} must be {words[hint]}")
    if hint is str:
        if "\0" in value or value.encode(errors="ignore").decode() != value:  # a checkpoint could not store it
            raise ConfigError(f"{name} = {value!r} must be text in UTF-8 without NUL characters")
        if value.startswith("~/"):  # a path that no shell has expanded: in a file, or after "="
            return os.path.expanduser(value)
    return value


def did_you_mean(word: str, choices: Iterable[Any], prefix: str = "") -> str:
    """'; did you mean ...?' with the closest of ``choices``, or the list of all choices if none is close."""
    strings = [str(choice) for choice in choices]
    near = closest(word, strings)
    return f"; did you mean {prefix + near!r}?" if near else f"; there are {', '.join(strings) or 'none'}"


def closest(word: str, choices: Iterable[str]) -> str:
    """The first of ``choices`` that begins with ``word``, or else the one most like it; '' if none is close."""
    strings = list(choices)
    longer = [choice for choice in strings if word and choice.startswith(word)]
    return next(iter(longer or difflib.get_close_matches(word, strings, n=1)), "")


def options_named(key: str) -> list[str]:
    """The options of all sections that are named ``key``, as after one has moved; none if they are so many that the
    name says little, such as ``enable``."""
    named = sorted(option for option in option_types(command_line_type()) if option.rpartition(".")[2] == key)
    return named if len(named) <= MOST_OF_ONE_NAME else []


def to_toml(config: JobConfig) -> str:
    """Serialize the config as TOML; ``from_text`` parses it to the same config."""
    return tomli_w.dumps(to_dict(config))
