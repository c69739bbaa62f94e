"""The types of data sources of the core."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.datasets.cache_folder import require_outside
from torchtrain.datasets.data_source import DataSource, SourceContext, SourceType, TextInput
from torchtrain.datasets.local_files import open_text_files, require_utf8_files
from torchtrain.datasets.options import SourceConfig, SourcesConfig
from torchtrain.datasets.standard_library import STANDARD_LIBRARY
from torchtrain.datasets.text_input import TextFiles
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.token_folder import UNFINISHED, is_token_folder, open_folder
from torchtrain.errors import DataError
from torchtrain.files import names_in, with_retries
from torchtrain.logging import logger

Several = TypeVar("Several", bound=SourcesConfig)


class Files(SourceType):
    """data.type = "files": local text files, or a folder of tokens."""

    @classmethod
    def data_option(cls, config: SourceConfig) -> str:
        return "path" if config.source_type == "files" else "type"  # of a registered subclass

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> bool:
        """Whether the path is a folder of tokens."""
        return with_retries(partial(has_tokens, config, context), Path(config.paths[0]))

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: bool) -> DataSource | TextInput:
        if answer:
            return open_tokens(config, context)
        return cls._open_text(config, context)

    @classmethod
    def open_text(cls, config: SourceConfig, context: SourceContext) -> TextInput:
        require_text(config, context)
        text = cls._open_text(config, context)
        if not config.skip_not_utf8:
            require_utf8_files([Path(file) for file in text.files], text.name, context.verify_bytes)
        return text

    @classmethod
    def _open_text(cls, config: SourceConfig, context: SourceContext) -> TextFiles:
        for path in filter(os.path.isdir, config.paths):
            require_outside(path)
        open_files = partial(
            open_text_files,
            config.paths,
            config.text_column,
            f"{context.section}.path = {config.path!r}",
            context.verify_bytes,
            split=config.split,
            skip_not_utf8=config.skip_not_utf8,
        )
        return with_retries(open_files, Path(config.paths[0]))


class StandardLibrary(SourceType):
    """The types of ``STANDARD_LIBRARY``."""

    @classmethod
    def data_option(cls, config: SourceConfig) -> str:
        return "path" if config.source_type == "standard_library" else "type"  # the data of a config that names none

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: None) -> TextInput:  # noqa: ARG003
        return STANDARD_LIBRARY[config.source_type]()


def has_tokens(config: SourceConfig, context: SourceContext) -> bool:
    """Whether the only path is a complete folder of tokens.

    Raises:
        DataError: it is not complete, or contains several such folders.
    """
    option = f"{context.section}.path"
    if len(config.paths) == 1 and is_token_folder(config.paths[0], option, context):
        return True
    for location in config.paths:
        path = Path(location)
        if (path / UNFINISHED).exists():
            raise DataError(
                f"{option} = {config.path!r}: {path} has only a part of its tokens; run torchtrain.prepare again to "
                "finish it"
            )
        if not path.is_dir():
            continue
        folders = [path, *(path / name for name in names_in(path) if (path / name).is_dir())]
        if found := [str(folder) for folder in folders if is_token_folder(folder)]:
            raise DataError(
                f"{option} = {config.path!r} has tokens in several folders ({', '.join(found)}); name each in a table "
                "[[data.sources]] with its path and its weight"
            )
    return False


def require_text(config: SourceConfig, context: SourceContext) -> None:
    """Raise DataError if a path of the source is a folder of tokens."""
    option = f"{context.section}.path"
    if any(is_token_folder(path, option, context) for path in config.paths):
        raise DataError(f"{option} = {config.path!r} is tokenized already: train on it, or give its text")


def open_tokens(config: SourceConfig, context: SourceContext) -> TokenDataset:
    """The folder of tokens that the only path of the source names."""
    option = f"{context.section}.path"
    folder = open_folder(config.paths[0], option, context)
    opened = TokenDataset(folder, context.tokenizer.content_hash, context.verify_bytes, f"{option} = {config.path!r}")
    if opened.skipped:
        logger.info("%s: %d documents were skipped when it was tokenized", opened.name, opened.skipped)
    return opened


def pinned(config: Several, saved: Callable[[], Sequence[SourceConfig]], section: str) -> Several:
    """``config`` with all that may change in the course of a run (``SourceType.pin``, which has the arguments)."""
    pin = [DATA_SOURCES[source.source_type].pin for source in config.all]
    if not config.sources:
        one: Several = pin[0](config, saved, section)
        return one
    sources = [
        pin[number](source, saved, f"{section}.sources[{number}]") for number, source in enumerate(config.sources)
    ]
    return replace(config, sources=tuple(sources))
