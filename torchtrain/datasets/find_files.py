"""Find data files: a file, all files in a folder, or all files that match a pattern."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any

from torchtrain.datasets.file_formats import SUFFIXES, kind_of
from torchtrain.datasets.mixed_folder import advice, kinds_of_descriptions, log_left_out
from torchtrain.errors import DataError
from torchtrain.files import MISSING, json_object, names_in, read_file


def find_files(pattern: str, label: str, column: str, split: str) -> list[Path]:
    """The non-empty data files that ``pattern`` names, in a fixed order.

    Raises:
        DataError: there are none, or they are of several kinds.
    """
    path = Path(pattern)
    left_out: list[Path] = []
    if path.is_dir():
        files = sorted(file for file in _walk(path, split) if kind_of(file.name)[0] and not file.is_dir())
        of_descriptions = kinds_of_descriptions(file.name for file in files)
        left_out = [file for file in files if kind_of(file.name)[0] in of_descriptions and file.is_file()]
        files = [file for file in files if kind_of(file.name)[0] not in of_descriptions]
        if not files:
            raise DataError(f"{label} is a folder without data files; they must end in one of {SUFFIXES}")
        if gone := [file for file in files if not file.is_file()]:  # opening a pipe would block indefinitely
            raise DataError(f"{label}: {gone[0]} is not a file, or a broken link; restore what it names, or remove it")
    else:
        found = [path] if path.is_file() else _matches(Path(path.anchor), path.parts[bool(path.anchor) :])
        files = sorted(file for file in found if file.is_file())
        if not files:
            raise DataError(f"{label} does not exist (looked for {path.absolute()})")
    if bad := [file.name for file in files if not kind_of(file.name)[0]]:
        raise DataError(f"{label}: {bad[0]} must end in one of {SUFFIXES}")
    files = [file for file in files if file.stat().st_size > 0]
    if not files:
        raise DataError(f"{label} has no documents")
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        kind = kind_of(file.name)[0]
        by_kind.setdefault("txt" if kind == "md" else kind, []).append(file)
    if len(by_kind) > 1:
        raise DataError(advice(pattern, label, column, by_kind, left_out))
    log_left_out(label, [str(file) for file in left_out])
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
