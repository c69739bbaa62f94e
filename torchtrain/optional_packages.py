"""Optional packages: those that the extras of pyproject.toml list, and how to install them."""

import os
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from traceback import walk_tb

import tomli

from torchtrain.errors import ConfigError

DISTRIBUTION = "torchtrain-llama"
"""The name of this package for pip: ``torchtrain`` on PyPI is a package of somebody else."""
ROOT = Path(__file__).parent.parent


def install_command(extra: str, *, with_constraints: bool = True) -> str:
    """The command that installs the packages of ``extra``, such as ``pip install 'numpy>=2.0'``.

    In a clone of the repository it has the option ``-c constraints.txt``, for versions that go together, unless
    ``with_constraints`` is false: for packages that require other versions.
    """
    requirements = [line.partition(";")[0].strip() for line in _requirements(extra)]
    if not requirements:  # the files of the package were copied, and not installed
        return f"install the packages of {extra!r} in torchtrain's pyproject.toml"
    constraints = ROOT / "constraints.txt"
    options = ["-c", os.path.relpath(constraints)] if with_constraints and constraints.is_file() else []
    return shlex.join(["pip", "install", *requirements, *options])


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """The error to report if a plugin of this repository has imported a package that is not installed.

    It has the command that installs what the plugin needs: an extra with the name of the plugin, in which "_" is "-".
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    functions = [frame.f_code.co_name for frame in frames]
    if ("torchtrain.config.registry", "import_modules") in zip(names, functions, strict=True):
        return None  # a module of the user has imported it
    modules = [name.split(".") for name in names]
    plugins = [parts[2] for parts in modules if parts[:2] == ["torchtrain", "plugins"] and len(parts) > 2]
    package = (error.name or "").partition(".")[0]
    if not plugins or package in ("", "torchtrain"):
        return None
    extra = plugins[-1].replace("_", "-")
    command = install_command(extra) if _requirements(extra) else shlex.join(["pip", "install", package])
    return ConfigError(f"the plugin {plugins[-1]} needs the package {package}, which is not installed: {command}")


def _requirements(extra: str) -> Sequence[str]:
    """The requirements of ``extra``: in the pyproject.toml of a clone, or in the metadata of the installed package."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        extras: dict[str, list[str]] = tomli.loads(project.read_text("utf-8"))["project"]["optional-dependencies"]
        return extras.get(extra, [])
    try:
        required = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    return [line for line in required if re.search(rf"extra == ['\"]{extra}['\"]", line)]
