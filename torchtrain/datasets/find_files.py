"""Find data files: a file, all files in a folder, or all files that match a pattern."""

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from torchtrain.datasets.data_identity import shortened
from torchtrain.datasets.file_formats import kind_of, suffixes
from torchtrain.errors import DataError
from torchtrain.files import MISSING, json_object, names_in, read_file
from torchtrain.logging import logger


def find_files(pattern: str, label: str, split: str) -> list[Path]:
    """The non-empty data files that ``pattern`` names, in a fixed order.

    Raises:
        DataError: there are none, or a folder has files of several formats.
    """
    path = Path(pattern)
    if path.is_dir():
        files = _files_of_folder(path, label, split)
    else:
        found = [path] if path.is_file() else _matches(Path(path.anchor), path.parts[bool(path.anchor) :])
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise DataError(f"{label} does not exist (looked for {path.absolute()})")
    if bad := [file.name for file in files if not kind_of(file.name)[0]]:
        raise DataError(f"{label}: {bad[0]} must end in one of {suffixes()}")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise DataError(f"{label} has no documents")
    return files


def _files_of_folder(folder: Path, label: str, split: str) -> list[Path]:
    """The data files in a folder; without .md files, which often describe the data, if there are others."""
    files = sorted(file for file in _walk(folder, split) if kind_of(file.name)[0] and not file.is_dir())
    if not files:
        raise DataError(f"{label} is a folder without data files; they must end in one of {suffixes()}")
    if gone := [file for file in files if not file.is_file()]:  # opening a pipe would block indefinitely
        raise DataError(f"{label}: {gone[0]} is not a file, or a broken link; restore what it names, or remove it")
    kinds = {kind_of(file.name)[0] for file in files}
    if "md" in kinds and len(kinds) > 1:
        left_out = [str(file) for file in files if kind_of(file.name)[0] == "md"]
        files = [file for file in files if kind_of(file.name)[0] != "md"]
        kinds.remove("md")
        logger.info("%s: left out %d .md file(s): %s", label, len(left_out), shortened(left_out))
    if len(kinds) > 1:
        patterns = [f"{str(folder).rstrip('/')}/**/*.{kind}*" for kind in sorted(kinds)]
        raise DataError(
            f"{label} mixes files of several formats (.{', .'.join(sorted(kinds))}), of which some may only describe "
            f"the data. Name those to read by a pattern, or several in a list: path = {json.dumps(patterns)}"
        )
    return files


def _matches(folder: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """Paths in ``folder`` that match the parts of a pattern. Unlike ``glob``, it raises errors of the file system."""
    if not pattern:
        yield folder
        return
    part, *rest = pattern
    if part == "**":
        for inner in _walk(folder):
            yield from _matches(inner, rest or ["*"])
    elif has_magic(part):
        for name in _names_of_data(folder) if folder.is_dir() else ():
            if fnmatchcase(name, part):
                yield from _matches(folder / name, rest)
    elif (folder / part).exists():
        yield from _matches(folder / part, rest)


def _walk(path: Path, split: str = "", above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """``path`` and, if it is a folder, everything in it except hidden files; symbolic links are followed.

    Args:
        split: in a folder that ``DatasetDict.save_to_disk`` wrote, only this split, or several as in "train+test"; "":
            all splits.

    Raises:
        StorageError: a folder cannot be read.
    """
    if not path.is_dir():
        yield path
    elif (real := path.resolve()) not in above:  # otherwise a link to a folder above
        yield path
        names = _names_of_data(path)
        splits = _json_in(path, "dataset_dict.json", names, "splits") if split else None
        if isinstance(splits, list):
            if unknown := sorted(set(split.split("+")) - set(names).intersection(splits)):
                raise DataError(
                    f"{path} holds a DatasetDict without a split {unknown[0]!r} (split); its splits are "
                    f"{', '.join(map(str, splits))}"
                )
            names = split.split("+")
        for name in names:
            yield from _walk(path / name, split, above | {real})


def _names_of_data(folder: Path) -> list[str]:
    """Names in ``folder`` without hidden ones; if ``Dataset.save_to_disk`` wrote it, only the files of the dataset.

    Such a folder may also contain the cache files of ``load_from_disk(...).map(...)``, which have the same format.
    """
    names = [name for name in names_in(folder) if not name.startswith(".")]
    listed = _json_in(folder, "state.json", names, "_data_files")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in listed):
        return names
    files = [str(entry["filename"]) for entry in listed]
    if missing := sorted(set(files) - set(names)):
        raise DataError(
            f"{folder}: {missing[0]!r} is missing, which its state.json lists: restore it, or save the dataset again"
        )
    return files


def _json_in(folder: Path, name: str, names: Sequence[str], key: str) -> Any:
    """The value of ``key`` in the JSON file ``name``; None if there is no such file or key."""
    if name not in names:
        return None
    try:
        content = json_object(read_file(folder / name))
    except MISSING:
        return None
    return content.get(key) if content is not None else None
