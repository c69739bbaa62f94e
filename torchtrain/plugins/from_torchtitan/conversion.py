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
from torchtrain.config.parse import read_table
from torchtrain.config.schema import default_options
from torchtrain.config.section import flat
from torchtrain.errors import ConfigError
from torchtrain.files import printable
from torchtrain.plugins.from_torchtitan.options import TOML_ENDS, find_option, torchtitan_options, versions_with
from torchtrain.plugins.from_torchtitan.values import (
    C4,
    FILTERS,
    NORM_DECAY,
    SMALL_DATASETS,
    LeftOut,
    TorchtitanFile,
    translate,
)

# Sections whose defaults matter only if this option is on.
SWITCHES = {
    "validation": "validation.enable",
    "float8": "float8.recipe",
    "checkpoint": "checkpoint.enable",
    "huggingface": "huggingface.export",
    "replicas": "replicas.id",
}
# Defaults with another meaning, or of data and tokenizers that only torchtitan has.
NOT_NEEDED = (
    *("job.dump_folder", "job.description", "model.name", "model.tokenizer_path", "data.name", "training.seed"),
    *("parallelism.pipeline_parallel_microbatches", "parallelism.pipeline_parallel_layers_per_stage"),
)
MICROBATCHES_ARE_STAGES_UNTIL = "2025-04-07"  # by default; since then, a microbatch is one sequence
TORCHTITANS_DEFAULT = "# torchtitan's default"


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


@dataclass(frozen=True)
class Converted:
    text: str
    """The config for torchtrain."""
    left_out: list[str]
    """Options of torchtitan that have an effect there, and none in ``text``, with the reason."""
    to_set: list[str]
    """What is left to set, which are the last lines of ``text``, too."""


def convert_config(text: str, name: str) -> Converted:
    """Convert the ``text`` of a TOML file of torchtitan. ``name``: that of the file, for the first line.

    Raises:
        ConfigError: the text is not valid TOML.
    """
    conversion = Conversion(flat(read_table(text, name)))
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigError(f"{name} is not valid TOML: {printable(str(error))}") from None
    lines = [f"# {name} of torchtitan, converted by torchtrain.convert_config", f"# {conversion.version}"]
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
    return Converted("\n".join(lines) + "\n", conversion.left_out, to_set)


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
        """``theirs``: all values of torchtitan's file by full name."""
        since, until = versions_with(theirs)
        has_version = since < until
        self.file = TorchtitanFile(theirs, until if has_version else TOML_ENDS)
        self.sections: dict[str, list[Line]] = {}
        self.values: dict[str, Any] = {}
        self.set_by: dict[str, str] = {}  # torchtitan's option by ours
        self.left_out: list[str] = []
        between = f"from {since} to {until}" if since else f"until {until}"
        self.version = f"Its options are those of torchtitan {between}; defaults are those of the last day."
        if not has_version:
            self.version = f"No version of torchtitan has all of its options; defaults are those of {TOML_ENDS}."

    def add(self, name: str, item: Item, above: list[str]) -> None:
        """Convert one key of torchtitan."""
        if isinstance(item, AoT):
            self.leave_out(name, item, LeftOut("tables have no counterpart in torchtrain"), above)
            return
        value, comment = item.unwrap(), item.trivia.comment
        translated = translate(name, value, self.file)
        if isinstance(translated, LeftOut):
            self.leave_out(name, item, translated, above)
            return
        for number, (here, ours) in enumerate(translated.items()):
            other = self.set_by.get(here, name)
            if self.values.get(here, ours) != ours and not self.is_newer(name, other):
                self.leave_out(name, item, LeftOut(f"{here} is set by {other}"), above)
                continue
            if self.values.get(here, ours) != ours:
                self.left_out.append(f"{other}: {here} is set by {name}")
            self.set_by[here] = name
            if number > 0:
                self.put(here, ours, comment=f"# {name} of torchtitan")
            else:
                is_same = ours == value and isinstance(value, type(ours))
                self.put(here, ours, item.as_string() if is_same else "", comment, above)

    def is_newer(self, name: str, other: str) -> bool:
        """Whether torchtitan's version has the option ``name``, and no longer or not yet ``other``."""
        has_name, has_other = (
            option is None or option.exists_before(self.file.day) for option in map(find_option, (name, other))
        )
        return has_name and not has_other

    def put(self, here: str, value: Any, written: str = "", comment: str = "", above: Sequence[str] = ()) -> None:
        """Set the option ``here``, in place of an earlier value, whose comments are kept above it."""
        section, _, key = here.partition(".")
        lines = self.sections.setdefault(section, [])
        earlier = [text for line in lines if line.key == key for text in (*line.above, line.comment) if text]
        lines[:] = [line for line in lines if line.key != key]
        lines.append(Line(key, written or toml(value), comment, [*earlier, *above]))
        self.values[here] = value

    def leave_out(self, name: str, item: Item, why: LeftOut, above: list[str]) -> None:
        """Keep a key without a counterpart as a comment, in the section that it was in."""
        section, _, key = name.rpartition(".")
        target = section if section in SECTIONS else "job"
        written = " ".join(item.as_string().split())
        shown = f"{key if target == section else name} = {written}"
        self.sections.setdefault(target, []).append(Line("", f"# {shown}  # {why.reason}", above=above))
        if why.has_effect:
            self.left_out.append(f"{name} = {written}: {why.reason}")

    def add_comments(self, table: str, comments: list[str]) -> None:
        """Keep ``comments`` at the end of the section that they were in."""
        section = table.partition(".")[0]
        self.sections.setdefault(section if section in SECTIONS else "job", []).append(Line("", "\n".join(comments)))

    def add_defaults(self) -> None:
        """Write out the defaults of torchtitan's version that differ from torchtrain's."""
        if "model.flavor" not in self.values:
            model = translate("model.flavor", self.file.get("model.flavor"), self.file)
            assert not isinstance(model, LeftOut)
            for here, value in model.items():
                self.put(here, value, comment=TORCHTITANS_DEFAULT)
        for here, ours in default_options().items():
            section = here.partition(".")[0]
            switch = SWITCHES.get(section)
            is_off = switch and switch != here and self.values.get(switch, False) in (False, "none")
            if here in self.values or here in NOT_NEEDED or is_off:
                continue
            defaults = self.defaults_of(here)
            if defaults.get(here, ours) != ours:
                for name, value in defaults.items():
                    self.put(name, value, comment=TORCHTITANS_DEFAULT)
        if NORM_DECAY not in self.values:
            decay = self.defaults_of("optimizer.weight_decay")[NORM_DECAY]
            self.put(NORM_DECAY, decay, comment="# torchtitan also decays norms")
        if self.file.has_float8 and not any(map(self.file.values.get, FILTERS)):
            self.left_out.append("float8 of the output layer, torchtitan's default: here it stays in bfloat16")
        stages = self.values.get("parallelism.pipeline_parallel_degree", 1)
        microbatches = "parallelism.pipeline_parallel_microbatches"
        if self.file.day <= MICROBATCHES_ARE_STAGES_UNTIL and stages != 1 and microbatches not in self.values:
            self.put(microbatches, stages, comment=TORCHTITANS_DEFAULT)

    def defaults_of(self, here: str) -> dict[str, Any]:
        """torchtitan's default of what is our option ``here``, as values of ours; empty if it has none.

        If its version had no such option, it was fixed to what became the first default.
        """
        named = {name: option for name, option in torchtitan_options().items() if option.here == here and option.since}
        at_the_time = [name for name, option in named.items() if option.exists_before(self.file.day)]
        for name in at_the_time or sorted(named, key=lambda name: named[name].since):
            default = named[name].default_before(self.file.day)
            translated = None if default is None else translate(name, default, self.file)
            return translated if isinstance(translated, dict) else {}
        return {}

    def to_set(self) -> list[str]:
        """What the user has to set or to provide."""
        lines = []
        tokenizer = self.values.get("model.tokenizer_path", "")
        if tokenizer and not Path(str(tokenizer)).exists():
            lines.append(f"model.tokenizer_path: {tokenizer} does not exist here; name the tokenizer of the model")
        if self.values.get("data.name") == C4["name"]:
            lines.append(f"data: c4 is {C4['name']} on the Hugging Face Hub; for files, set data.path")
        elif "data.name" not in self.values and "data.path" not in self.values:
            theirs = self.file.get("training.dataset")
            what = "a file of torchtitan's repository" if theirs in SMALL_DATASETS else "torchtitan's default"
            lines.append(f"data: {theirs} is {what}; set data.path, or the source code of Python is read")
        if self.file.get("fault_tolerance.enable"):
            lines.append("replicas.lighthouse: the address in torchtitan's TORCHFT_LIGHTHOUSE; see docs/replicas.md")
        return lines


SECTIONS = {name.partition(".")[0] for name in default_options()} - {"stages"}
