"""The dependencies of the core are what it imports, and what the end of a default run shows."""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import tomli
from draw_architecture import FILES, ROOT

PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLUGINS = ROOT / "torchtrain" / "plugins"
# The curves of the report, and the command that converts the weights, which the results name.
FOR_NEWCOMERS = {"matplotlib", "safetensors", "protobuf", "tomlkit", "datasets"}


def names(requirements: Iterable[str]) -> set[str]:
    """The names of distributions, as those of their modules."""
    found = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in requirements}  # type: ignore[index]
    return found - {"torchtrain_llama"}


def packages_imported_by(path: Path) -> set[str]:
    """The packages of others that a file imports, also in functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, "torchtrain"}


def test_dependencies_are_what_the_core_imports_and_what_a_default_run_shows() -> None:
    core = [path for path in FILES if PLUGINS not in path.parents]
    imported = set().union(*map(packages_imported_by, core))
    required = names(PROJECT["dependencies"])
    assert imported == required - FOR_NEWCOMERS
    assert required >= FOR_NEWCOMERS
