"""Conversion of a TOML config of torchtitan, with its comments."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, InlineTable, Item, Table

from torchtrain.config.help import toml
from torchtrain.config.parse import FROM_TORCHTITAN, read_table
from torchtrain.config.schema import default_options, flat
from torchtrain.errors import ConfigError
from torchtrain.files import printable

# Values that have another name here, by our key.
VALUES: dict[str, dict[Any, Any]] = {
    "optimizer.name": {"AdamW": "adamw"},
    "optimizer.implementation": {True: "fused", False: "foreach"},
    "parallelism.pipeline_parallel_schedule": {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"},
    "metrics.writers": {True: ["wandb"], False: []},
    "float8.recipe": {True: "tensorwise", False: "none", "": "none", "dynamic": "tensorwise"},
}
C4 = {"name": "allenai/c4", "subset": "en"}
DATASETS: dict[str, dict[str, str]] = {"c4": C4, "c4_validation": {**C4, "split": "validation"}}
SECTION_OF_DATA = {"data": "training", "validation": "validation"}  # torchtitan's by ours
SMALL_DATASETS = ("c4_mini", "c4_test")  # files of torchtitan's repository
# The number of layers of each pipeline stage, which torchtitan does not have as a list of numbers.
BY_HAND = "parallelism.pipeline_parallel_layers_per_stage"
# Sections whose defaults matter only if this option is on.
SWITCHES = {
    "validation": "validation.enable",
    "float8": "float8.recipe",
    "checkpoint": "checkpoint.enable",
    "huggingface": "huggingface.export",
}
# Defaults with another meaning, or of data that only torchtitan has.
NOT_NEEDED = ("job.dump_folder", "job.description", "data.name", "parallelism.pipeline_parallel_microbatches", BY_HAND)


@dataclass
class Line:
    """A key with its value in TOML, or a line of comment."""

    key: str
    value: str
    comment: str = ""
    above: list[str] = field(default_factory=list)
    """Lines of comment before it."""

    def __str__(self) -> str:
        comment = f"  {self.comment}" if self.comment else ""
        return "\n".join([*self.above, f"{self.key} = {self.value}{comment}" if self.key else self.value])


def convert_config(text: str, name: str) -> tuple[str, list[str]]:
    """Convert the ``text`` of a file of torchtitan.

    Args:
        text: TOML.
        name: the name of the file, for the first line.

    Returns:
        The config for torchtrain, and what is left to set, which are its last lines, too.

    Raises:
        ConfigError: the text is not valid TOML.
    """
    conversion = Conversion(flat(read_table(text, name)))
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigError(f"{name} is not valid TOML: {printable(str(error))}") from None
    lines = [f"# {name} of torchtitan, converted by torchtrain.convert_config"]
    for full_name, item, comments in entries(document):
        if item is not None:
            conversion.add(full_name, item, comments)
        elif full_name:
            conversion.add_comments(full_name, comments)
        else:
            lines += comments
    conversion.add_defaults()
    for section, converted in conversion.sections.items():
        lines += ["", f"[{section}]", *map(str, converted)]
    to_set = conversion.to_set()
    if to_set:
        lines += ["", *(f"# To set: {line}" for line in to_set)]
    return "\n".join(lines) + "\n", to_set


def entries(table: Container | Table | InlineTable, prefix: str = "") -> Iterator[tuple[str, Item | None, list[str]]]:
    """The keys of ``table`` by full name with their values and the comments above them, in order.

    Comments that no key of the table follows have the name of the table, and no value.
    """
    comments: list[str] = []
    for key, item in table.body if isinstance(table, Container) else table.value.body:
        if isinstance(item, Comment):
            comments.append(item.as_string().strip())
        elif key is not None:
            is_table = isinstance(item, Table | InlineTable)
            if comments or not is_table:
                yield (prefix.rstrip("."), None, comments) if is_table else (f"{prefix}{key.key}", item, comments)
                comments = []
            if isinstance(item, Table | InlineTable):
                yield from entries(item, f"{prefix}{key.key}.")
    if comments:
        yield prefix.rstrip("."), None, comments


class Conversion:
    """The lines of each section of torchtrain's config, in the order in which they were added."""

    def __init__(self, theirs: Mapping[str, Any]) -> None:
        self.theirs = theirs  # all values of torchtitan's file by full name
        self.sections: dict[str, list[Line]] = {}
        self.values: dict[str, Any] = {}
        self.needs_data: list[str] = []

    def add(self, name: str, item: Item, above: list[str]) -> None:
        """Convert one key of torchtitan."""
        here, _, note = counterpart(name)
        value, comment = item.unwrap(), item.trivia.comment
        section = here.partition(".")[0]
        if name.endswith("float8.recipe_name") and not self.has_float8():
            self.add_comment(name, item, "float8 is off in torchtitan: nothing enables it", above)
            return
        if here in ("data.name", "validation.name") and self.theirs.get(f"{SECTION_OF_DATA[section]}.dataset_path"):
            self.add_comment(name, item, f"{section}.path has the data", above)
            return
        if here in ("data.name", "validation.name") and value in (*DATASETS, *SMALL_DATASETS):
            self.add_dataset(section, name, str(value), comment, above)
            return
        if isinstance(item, AoT):
            self.add_comment(name, item, "tables have no counterpart in torchtrain", above)
            return
        if name == "model.converters":
            if value not in ([], ["float8"]):
                self.add_comment(name, item, f"set {here} by hand", above)
                return
            value = "tensorwise" if value else "none"
        if name == "parallelism.pipeline_parallel_microbatch_size":
            batch_size = self.theirs.get("training.local_batch_size", self.theirs.get("training.batch_size", 8))
            if not (isinstance(batch_size, int) and isinstance(value, int) and value > 0):
                self.add_comment(name, item, f"set {here} by hand, {note}", above)
                return
            value = batch_size // value
        if here == BY_HAND and not (isinstance(value, list) and all(isinstance(n, int) for n in value)):
            self.add_comment(name, item, f"set {BY_HAND} by hand, {note}", above)
            return
        if not here:
            self.add_comment(name, item, note or "it has no counterpart in torchtrain", above)
            return
        translated = VALUES.get(here, {}).get(value, value) if isinstance(value, str | bool) else value
        from_converters = self.values.get(here) == "tensorwise" and name.endswith("recipe_name")
        if here in self.values and self.values[here] not in ("none", translated) and not from_converters:
            self.add_comment(name, item, f"{here} is set by another key", above)
            return
        written = item.as_string() if translated == item.unwrap() and isinstance(value, type(translated)) else ""
        self.put(here, translated, written, comment, above)

    def has_float8(self) -> bool:
        """Whether torchtitan's file converts linear layers to float8; without it, torchtitan ignores the recipe."""
        flags = ("float8.enable_float8_linear", "training.enable_float8_linear", "training.fp8_linear")
        return self.theirs.get("model.converters") == ["float8"] or any(map(self.theirs.get, flags))

    def put(self, here: str, value: Any, written: str = "", comment: str = "", above: Sequence[str] = ()) -> None:
        """Set the option ``here``, in place of an earlier value, whose comments are kept above it."""
        section, _, key = here.partition(".")
        lines = self.sections.setdefault(section, [])
        earlier = [text for line in lines if line.key == key for text in (*line.above, line.comment) if text]
        lines[:] = [line for line in lines if line.key != key]
        lines.append(Line(key, written or toml(value), comment, [*earlier, *above]))
        self.values[here] = value

    def add_comment(self, name: str, item: Item, note: str, above: list[str]) -> None:
        """Keep a key without a counterpart as a comment, in the section that it was in."""
        section, _, key = name.rpartition(".")
        target = section if section in SECTIONS else "job"
        shown = f"{key if target == section else name} = {' '.join(item.as_string().split())}"
        self.sections.setdefault(target, []).append(Line("", f"# {shown}  # {note}", above=above))

    def add_comments(self, table: str, comments: list[str]) -> None:
        """Keep ``comments`` at the end of the section that they were in."""
        section = table.partition(".")[0]
        self.sections.setdefault(section if section in SECTIONS else "job", []).append(Line("", "\n".join(comments)))

    def add_dataset(self, section: str, name: str, value: str, comment: str, above: list[str]) -> None:
        """Set the options of a dataset that torchtitan knows by a name of its own."""
        if value in SMALL_DATASETS:
            note = "files of torchtitan's repository: without data, torchtrain reads the source code of Python"
            line = Line("", f"# {name} = {toml(value)}  # {note}", above=above)
            self.sections.setdefault(section, []).append(line)
            return
        for key, option in DATASETS[value].items():
            self.put(f"{section}.{key}", option, "", comment if key == "name" else "", above if key == "name" else ())
        if section == "data":
            self.needs_data.append(f"data: {value} is {C4['name']} on the Hugging Face Hub; for files, set data.path")

    def add_defaults(self) -> None:
        """Write out defaults of torchtitan that differ from torchtrain's."""
        newest_last = sorted(FROM_TORCHTITAN.items(), key=lambda entry: entry[0] == entry[1][0])
        defaults = {here: default for _, (here, default, _) in newest_last if default}
        for here, ours in default_options().items():
            section = here.partition(".")[0]
            switch = SWITCHES.get(section)
            if here not in defaults or here in self.values or here in NOT_NEEDED:
                continue
            if switch and switch != here and self.values.get(switch, False) in (False, "none"):
                continue
            value = tomlkit.parse(f"x = {defaults[here]}").unwrap()["x"]
            value = VALUES.get(here, {}).get(value, value) if isinstance(value, str | bool) else value
            if value != ours:
                self.put(here, value, comment="# torchtitan's default")

    def to_set(self) -> list[str]:
        """What the user has to set or to provide."""
        tokenizer = self.values.get("model.tokenizer_path", "")
        missing = tokenizer and not Path(str(tokenizer)).exists()
        given = [f"model.tokenizer_path: {tokenizer} does not exist here; name the tokenizer of the model"]
        return [*(given if missing else []), *self.needs_data]


def counterpart(name: str) -> tuple[str, str, str]:
    """Our key for torchtitan's key ``name``, torchtitan's default and a note; ``name`` itself if only we have it."""
    if name in FROM_TORCHTITAN:
        return FROM_TORCHTITAN[name]
    for pattern, entry in FROM_TORCHTITAN.items():
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return entry
    return (name, "", "") if name in default_options() else ("", "", "")


SECTIONS = {name.partition(".")[0] for name in default_options()} - {"stages"}
