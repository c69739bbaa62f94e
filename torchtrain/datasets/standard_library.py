"""The Python standard library as text: its source code, its docstrings, and the English prose in these."""

import ast
import os
import re
import sysconfig
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from torchtrain.datasets.local_files import identify
from torchtrain.datasets.text_input import LocalFile, TextFiles, TextsInMemory


def standard_library() -> TextFiles:
    """The source code of the Python standard library."""
    return _text_of(standard_library_files())


@cache  # a tenth of a second, for training, for validation and in each stage
def _text_of(files: tuple[Path, ...]) -> TextFiles:
    identity = identify(files)
    # Each file is a document, as a text file is.
    texts = [LocalFile(file, f"{file.name}.txt") for file in files]
    return TextFiles(texts, "text", "the Python standard library", lambda: identity, skip_not_utf8=False)


def standard_library_docs() -> TextsInMemory:
    """The docstrings of the Python standard library: English text, one document per module."""
    return TextsInMemory(_docstrings_of_modules(), "the docstrings of the Python standard library")


def standard_library_prose() -> TextsInMemory:
    """The sentences in the docstrings of the Python standard library and in pydoc's pages about the language."""
    texts = list(_docstrings_of_modules())
    with suppress(ImportError):  # some systems do not install it
        from pydoc_data.topics import topics

        texts += topics.values()
    prose = [text for text in map(_prose, texts) if text]
    return TextsInMemory(prose, "the prose of the Python standard library")


def _prose(text: str) -> str:
    """The different paragraphs of ``text`` that are sentences of words, without markup, each as one line."""
    paragraphs = [" ".join(re.sub(r"[*`]", "", part).split()) for part in re.split(r"\n\s*\n", text)]
    sentences = [
        part
        for part in paragraphs
        if re.fullmatch(r"[A-Z].*\.", part)
        and part.count(" ") >= 5
        and len(re.sub(r"[^A-Za-z ,.']", "", part)) > 0.96 * len(part)
    ]
    return "\n\n".join(dict.fromkeys(sentences))


@cache  # parsing the library takes seconds, and each stage opens its sources
def _docstrings_of_modules() -> list[str]:
    return list(filter(None, map(_docstrings, standard_library_files())))


def _docstrings(module: Path) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences in the source code
            tree = ast.parse(module.read_bytes())
    except SyntaxError:  # some modules are examples of errors
        return ""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


@cache
def standard_library_files() -> tuple[Path, ...]:
    """The modules of the standard library without their tests, which some systems do not install."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        files += [path for path in paths if path.is_file() and not path.is_symlink()]
    return tuple(files)


STANDARD_LIBRARY = {
    "standard_library": standard_library,
    "standard_library_docs": standard_library_docs,
    "standard_library_prose": standard_library_prose,
}
"""The texts by ``data.type``."""
