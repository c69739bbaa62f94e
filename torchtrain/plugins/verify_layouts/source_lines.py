"""The line of a model's source in which a tensor is computed."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from torchtrain.models.spec import Decoder

MODULE_OF_KEY = re.compile(r"^(.*?)(?: input(?: \w+)?| output)?(?: gradient| update)?$")


@dataclass(frozen=True)
class SourceLine:
    """A line of source, and the module of the model that it calls or is in."""

    module: str
    class_name: str
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def source_line(model: Decoder, key: str) -> SourceLine | None:
    """The line that calls the module of the tensor ``key``; None if the tensor has no module.

    Args:
        model: the model, not parallelized.
        key: the key of a fingerprint, such as ``layers.0.attention.wq.weight gradient``.
    """
    match = MODULE_OF_KEY.match(key)
    assert match is not None
    name = match[1]
    modules = dict(model.named_modules())
    if name not in modules:
        name = name.rpartition(".")[0]  # of a parameter
    module = modules.get(name)
    if module is None or not name:
        return None
    found = _call_of(modules, name) or _forward_of(module)
    if found is None:
        return None
    file, line, text = found
    return SourceLine(name, type(module).__name__, file, line, text)


def _call_of(modules: dict[str, nn.Module], name: str) -> tuple[str, int, str] | None:
    """The line of a parent's ``forward`` that uses the module ``name``."""
    parent, _, child = name.rpartition(".")
    while parent and type(modules[parent]).__module__.startswith("torch.nn."):  # a ModuleDict or ModuleList
        parent, _, child = parent.rpartition(".")
    for cls in type(modules[parent]).__mro__:
        if "forward" not in vars(cls) or cls.__module__.startswith("torch."):
            continue
        try:
            lines, first = inspect.getsourcelines(vars(cls)["forward"])
        except (OSError, TypeError):
            continue
        called = re.compile(rf"\bself\.{re.escape(child)}\b(?!\.weight)")
        uses = [number for number, line in enumerate(lines) if called.search(line)]
        # An expression that calls it, rather than a test for None.
        calls = [number for number in uses if re.search(rf"\bself\.{re.escape(child)}(\(|\[|\.)", lines[number])]
        for number in (*calls, *uses):
            return _shown(inspect.getsourcefile(cls) or "?"), first + number, lines[number].strip()
    return None


def _forward_of(module: nn.Module) -> tuple[str, int, str] | None:
    """The ``forward`` of a module."""
    try:
        lines, first = inspect.getsourcelines(type(module).forward)
    except (OSError, TypeError):
        return None
    return _shown(inspect.getsourcefile(type(module)) or "?"), first, lines[0].strip()


def _shown(file: str) -> str:
    """The path of a file, relative to the current folder if it is in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
