"""Plant a fault in the code that a process has loaded."""

from importlib import import_module
from inspect import unwrap
from pathlib import Path
from types import FunctionType
from typing import Any

PACKAGE = Path(__file__).parents[3] / "torchtrain"


def plant(file: str, old: str, new: str, package: str = "torchtrain") -> None:
    """Replace functions of a module of ``package`` by those of its source with ``new`` in place of ``old``.

    Args:
        file: the path in the package, such as ``trainer.py``.
    """
    module = import_module(f"{package}.{file.removesuffix('.py').replace('/', '.')}")
    text = Path(str(module.__file__)).read_text()
    assert text.count(old) == 1, f"{old!r} must be in {file} once"
    faulty: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(text.replace(old, new), file, "exec"), faulty)

    def replace_code(originals: Any, faulty_ones: Any) -> None:
        for name, found in originals.items():
            if getattr(found, "__module__", "") == module.__name__:
                if isinstance(found, type):
                    replace_code(vars(found), vars(faulty_ones[name]))
                elif isinstance(found, FunctionType | classmethod | staticmethod):
                    own, faulty_one = (unwrap(function) for function in (found, faulty_ones[name]))
                    own.__code__ = faulty_one.__code__  # of a decorated function its own

    replace_code(vars(module), faulty)
