"""Optional packages: those that the extras of pyproject.toml list, and how to install them."""

import os
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import tomli

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


def _requirements(extra: str) -> Sequence[str]:
    """The requirements of ``extra``: in the pyproject.toml of a clone, or in the metadata of the installed package."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        found: list[str] = tomli.loads(project.read_text("utf-8"))["project"]["optional-dependencies"][extra]
        return found
    try:
        required = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    return [line for line in required if re.search(rf"extra == ['\"]{extra}['\"]", line)]
