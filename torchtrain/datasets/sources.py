"""From a source of the config to its documents or tokens."""

from pathlib import Path

from torchtrain.config.schema import Source
from torchtrain.datasets.files import open_files, open_standard_library
from torchtrain.datasets.formats import kind_of
from torchtrain.datasets.hub import open_downloaded, open_streamed
from torchtrain.datasets.prepared import MANIFEST, UNFINISHED, PreparedTokens
from torchtrain.datasets.text import TextSource
from torchtrain.errors import DataError
from torchtrain.log import logger
from torchtrain.reading import names_in


def open_prepared(source: Source, key: str, tokenizer_hash: str, verify_bytes: float) -> PreparedTokens | None:
    """The folder that ``source`` names, if it holds prepared data."""
    label = f"{key}.path = {source.path!r}"
    for path in map(Path, source.paths):
        if (path / MANIFEST).exists() and len(source.paths) == 1:
            break
        if (path / UNFINISHED).exists():
            raise DataError(f"{label}: {path} is not prepared to its end; run torchtrain.prepare again, it goes on")
        inner = [path / name for name in names_in(path) if not kind_of(name)[0]] if path.is_dir() else []
        prepared = [str(folder) for folder in (path, *inner) if (folder / MANIFEST).exists()]
        if prepared:
            raise DataError(
                f"{label}: what is prepared ({', '.join(prepared)}) are sources of their own; name each by a table "
                "[[data.sources]] with its path and its weight"
            )
    else:
        return None
    opened = PreparedTokens(path, tokenizer_hash, verify_bytes, label)
    if opened.skipped:
        logger.info("%s: %d documents were skipped when it was prepared", opened.name, opened.skipped)
    return opened


def open_text(source: Source, key: str, lanes: int) -> TextSource:
    """The documents of ``source``, if need be streamed by ``lanes`` readers side by side; ``key`` is its config key."""
    if source.path:
        return open_files(source.paths, source.text_column, f"{key}.path = {source.path!r}")
    if not source.name:
        return open_standard_library()
    label = f"{key}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"
    if source.download:
        return open_downloaded(source, label)
    return open_streamed(source, lanes, label)
