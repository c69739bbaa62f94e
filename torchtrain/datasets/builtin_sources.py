"""The types of data sources of the core, and how a source is asked and opened."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchtrain.config.registry import DATA_SOURCES, FOLDER_FORMATS
from torchtrain.config.schema import SourceConfig, SourcesConfig
from torchtrain.datasets.data_source import DataSource, SourceContext, SourceType
from torchtrain.datasets.local_files import (
    open_files,
    open_standard_library,
    open_standard_library_docs,
    open_standard_library_prose,
)
from torchtrain.files import with_retries

Several = TypeVar("Several", bound=SourcesConfig)


class Files(SourceType):
    """data.type = "files": local text files, or a folder of one of the ``FOLDER_FORMATS``."""

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> str | None:
        """The name of the folder's format, if it is not text."""
        found = with_retries(partial(format_of_folder, config, context), Path(config.paths[0]))
        if found is None and any(next(Path(path).glob("shard-*.tokens"), None) for path in config.paths):
            FOLDER_FORMATS.check("prepared", f"{context.section}.path = {config.path!r}: its format")
        return found

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: str | None) -> DataSource:
        if answer is not None:
            opened: DataSource = FOLDER_FORMATS[answer].open(config, context)
            return opened
        text = partial(
            open_files,
            config.paths,
            config.text_column,
            f"{context.section}.path = {config.path!r}",
            context.verify_bytes,
            split=config.split,
            skip_not_utf8=config.skip_not_utf8,
        )
        return with_retries(text, Path(config.paths[0]))


class StandardLibrary(SourceType):
    """data.type = "standard_library": the source code of the Python standard library."""

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: None) -> DataSource:  # noqa: ARG003
        return open_standard_library()


class StandardLibraryDocs(SourceType):
    """data.type = "standard_library_docs": the docstrings of the Python standard library."""

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: None) -> DataSource:  # noqa: ARG003
        return open_standard_library_docs()


class StandardLibraryProse(SourceType):
    """data.type = "standard_library_prose": the English sentences in its docstrings and in pydoc's pages."""

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: None) -> DataSource:  # noqa: ARG003
        return open_standard_library_prose()


def format_of_folder(config: SourceConfig, context: SourceContext) -> str | None:
    """The name in ``FOLDER_FORMATS`` of the format of ``config.path``; None for text files."""
    return next((name for name in FOLDER_FORMATS if FOLDER_FORMATS[name].recognizes(config, context)), None)


def open_source(config: SourceConfig, context: SourceContext) -> DataSource:
    """Open a source on this rank only, without communication."""
    source_type = DATA_SOURCES[config.source_type]
    opened: DataSource = source_type.open(config, context, source_type.query_on_rank0(config, context))
    return opened


def is_streamed(config: SourceConfig) -> bool:
    """Whether a source is certain to be streamed (``SourceType.is_streamed``)."""
    streamed: bool = DATA_SOURCES[config.source_type].is_streamed(config)
    return streamed


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
