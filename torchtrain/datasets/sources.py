"""From a source of the config to its documents or tokens."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchtrain.config.schema import SourceConfig, SourcesConfig
from torchtrain.datasets.files import open_files, open_standard_library
from torchtrain.datasets.formats import kind_of
from torchtrain.datasets.hub import download, find_revision, list_files, open_downloaded, open_streamed
from torchtrain.datasets.prepared import MANIFEST, UNFINISHED, PreparedTokens
from torchtrain.datasets.text import TextSource
from torchtrain.errors import DataError
from torchtrain.files import names_in, with_retries
from torchtrain.logging import logger

One = TypeVar("One", bound=SourceConfig)
Several = TypeVar("Several", bound=SourcesConfig)


def open_prepared(source: SourceConfig, key: str, tokenizer_hash: str, verify_bytes: float) -> PreparedTokens | None:
    """The folder that ``source`` names, if it holds prepared data."""
    label = f"{key}.path = {source.path!r}"
    if len(source.paths) == 1 and Path(source.paths[0], MANIFEST).exists():
        opened = PreparedTokens(Path(source.paths[0]), tokenizer_hash, verify_bytes, label)
        if opened.skipped:
            logger.info("%s: %d documents were skipped when it was prepared", opened.name, opened.skipped)
        return opened
    for path in map(Path, source.paths):
        if (path / UNFINISHED).exists():
            raise DataError(f"{label}: {path} is only partly prepared; run torchtrain.prepare again to finish it")
        inner = [path / name for name in names_in(path) if not kind_of(name)[0]] if path.is_dir() else []
        prepared = [str(folder) for folder in (path, *inner) if (folder / MANIFEST).exists()]
        if prepared:
            raise DataError(
                f"{label} holds prepared data in several folders ({', '.join(prepared)}); name each in a table "
                "[[data.sources]] with its path and its weight"
            )
    return None


def with_revisions(config: Several, saved: SourcesConfig | None, key: str) -> Several:
    """``config`` with the revision of each dataset of the hub: its own, that in ``saved``, or else the newest."""

    def pin(source: One, key: str) -> One:
        if not source.name or source.revision:
            return source
        for old in saved.all if saved else ():
            if old.revision and (old.name, old.subset, old.split) == (source.name, source.subset, source.split):
                return replace(source, revision=old.revision)
        return replace(source, revision=find_revision(source, label_of(source, key)))

    sources = tuple(pin(source, f"{key}.sources[{number}]") for number, source in enumerate(config.sources))
    return replace(pin(config, key), sources=sources)


def label_of(source: SourceConfig, key: str) -> str:
    return f"{key}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"


def ask_hub(source: SourceConfig, key: str, verify_bytes: float) -> Any:
    """What ``open_text`` needs from the hub, which one rank asks for all; None for local data. Can be pickled."""
    if not source.name:
        return None
    label = label_of(source, key)
    return download(source, label, verify_bytes) if source.download else list_files(source, label)


def open_text(source: SourceConfig, key: str, lanes: int, from_hub: Any, verify_bytes: float = math.inf) -> TextSource:
    """The documents of ``source``, the value of ``key``, if need be streamed by ``lanes`` readers side by side.

    Args:
        from_hub: the result of ``ask_hub``.
        verify_bytes: local files, and a converted copy, are hashed in full up to this size.
    """
    if source.path:
        opening = partial(
            open_files,
            source.paths,
            source.text_column,
            f"{key}.path = {source.path!r}",
            verify_bytes,
            split=source.split,
            skip_not_utf8=source.skip_not_utf8,
        )
        return with_retries(opening, Path(source.paths[0]))
    if not source.name:
        return open_standard_library()
    label = label_of(source, key)
    if source.download:
        return open_downloaded(source, label, from_hub, verify_bytes)
    return open_streamed(source, lanes, label, from_hub, verify_bytes)
