"""The built-in types of data sources."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.config.schema import SourceConfig, SourcesConfig
from torchtrain.datasets.data_folder import open_folder
from torchtrain.datasets.data_source import DataSource, SourceContext
from torchtrain.datasets.file_formats import kind_of
from torchtrain.datasets.local_files import open_files, open_standard_library, open_standard_library_docs
from torchtrain.datasets.range_cache import RangeCache
from torchtrain.datasets.remote_files import (
    RemoteFile,
    find_remote_files,
    identify_remote,
    require_text_in_head,
    streamed_documents,
)
from torchtrain.datasets.text_sources import StreamedText
from torchtrain.datasets.tokenized import MANIFEST, UNFINISHED, TokenizedDataset
from torchtrain.errors import DataError
from torchtrain.files import is_url, names_in, with_retries
from torchtrain.logging import logger

One = TypeVar("One", bound=SourceConfig)
Several = TypeVar("Several", bound=SourcesConfig)


def open_tokenized(
    source: SourceConfig, key: str, tokenizer_hash: str, verify_bytes: float, cache: RangeCache | None = None
) -> TokenizedDataset | None:
    """Open the folder ``source.path`` if it contains tokenized data; None if it does not."""
    label = f"{key}.path = {source.path!r}"
    if len(source.paths) == 1:
        folder = open_folder(source.paths[0], f"{key}.path", cache)
        if MANIFEST in folder.sizes():
            opened = TokenizedDataset(folder, tokenizer_hash, verify_bytes, label)
            if opened.skipped:
                logger.info("%s: %d documents were skipped when it was prepared", opened.name, opened.skipped)
            return opened
    for path in (Path(path) for path in source.paths if not is_url(path)):
        if (path / UNFINISHED).exists():
            raise DataError(f"{label}: {path} is only partly prepared; run torchtrain.prepare again to finish it")
        inner = [path / name for name in names_in(path) if not kind_of(name)[0]] if path.is_dir() else []
        tokenized = [str(folder) for folder in (path, *inner) if (folder / MANIFEST).exists()]
        if tokenized:
            raise DataError(
                f"{label} holds prepared data in several folders ({', '.join(tokenized)}); name each in a table "
                "[[data.sources]] with its path and its weight"
            )
    return None


def with_revisions(config: Several, saved: SourcesConfig | None, key: str) -> Several:
    """``config`` with the revision of each hub dataset: that of the config, else that in ``saved``, else the newest."""

    def pin(source: One, key: str) -> One:
        if source.source_type != "hub" or source.revision:
            return source
        for old in saved.all if saved else ():
            if old.revision and (old.name, old.subset, old.split) == (source.name, source.subset, source.split):
                return replace(source, revision=old.revision)
        from torchtrain.datasets import hub  # here and below: imports the libraries of the hub

        return replace(source, revision=hub.find_revision(source, label_of(source, key)))

    sources = tuple(pin(source, f"{key}.sources[{number}]") for number, source in enumerate(config.sources))
    return replace(pin(config, key), sources=sources)


def is_streamed(source: SourceConfig) -> bool:
    """Whether ``source`` is certain to be streamed.

    Only opening it tells for other types (``TextSource.one_reader_per_row``), and for the URL of a folder, which may
    contain prepared data.
    """
    if source.source_type == "hub":
        return not source.download
    if source.source_type != "files" or not any(map(is_url, source.paths)):
        return False
    return len(source.paths) > 1 or kind_of(source.paths[0])[0] != ""


def label_of(source: SourceConfig, key: str) -> str:
    return f"{key}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"


class Files:
    """data.type = "files": text files, or a folder that torchtrain.prepare wrote; by paths or URLs."""

    @staticmethod
    def ask_once(config: SourceConfig, context: SourceContext) -> list[RemoteFile] | None:
        """List text files by URL; None for local files and tokenized data."""
        option = f"{context.section}.path"
        if not any(map(is_url, config.paths)):
            return None
        if len(config.paths) == 1 and MANIFEST in open_folder(config.paths[0], option).sizes():
            return None
        files = find_remote_files(config.paths, f"{option} = {config.path!r}", option)
        require_text_in_head(files, config.text_column, skip_not_utf8=config.skip_not_utf8, cache=context.cache)
        return files

    @staticmethod
    def open(config: SourceConfig, context: SourceContext, answer: list[RemoteFile] | None) -> DataSource:
        if answer is not None:
            return StreamedText(
                [partial(streamed_documents, file, config.text_column, context.cache) for file in answer],
                context.readers,
                f"{context.section}.path = {config.path!r}",
                partial(identify_remote, answer, context.verify_bytes),
                skip_not_utf8=config.skip_not_utf8,
            )
        first = Path(config.paths[0])
        tokenizer_hash = context.tokenizer.content_hash
        tokenized = partial(
            open_tokenized, config, context.section, tokenizer_hash, context.verify_bytes, context.cache
        )
        text = partial(
            open_files,
            config.paths,
            config.text_column,
            f"{context.section}.path = {config.path!r}",
            context.verify_bytes,
            split=config.split,
            skip_not_utf8=config.skip_not_utf8,
        )
        opened = with_retries(tokenized, first)
        return with_retries(text, first) if opened is None else opened  # a source without tokens is falsy


class HubDataset:
    """data.type = "hub": a dataset of the Hugging Face hub, downloaded or streamed."""

    @staticmethod
    def ask_once(config: SourceConfig, context: SourceContext) -> Any:
        from torchtrain.datasets import hub

        label = label_of(config, context.section)
        if config.download:
            return hub.download(config, label, context.verify_bytes)
        return hub.list_files(config, label)

    @staticmethod
    def open(config: SourceConfig, context: SourceContext, answer: Any) -> DataSource:
        from torchtrain.datasets import hub

        label = label_of(config, context.section)
        if config.download:
            return hub.open_downloaded(config, label, answer, context.verify_bytes)
        return hub.open_streamed(config, context.readers, label, answer, context.verify_bytes)


class StandardLibrary:
    """data.type = "standard_library": the source code of the Python standard library."""

    @staticmethod
    def ask_once(config: SourceConfig, context: SourceContext) -> None:  # noqa: ARG004
        return None

    @staticmethod
    def open(config: SourceConfig, context: SourceContext, answer: None) -> DataSource:  # noqa: ARG004
        return open_standard_library()


class StandardLibraryDocs(StandardLibrary):
    """data.type = "standard_library_docs": the docstrings of the Python standard library."""

    @staticmethod
    def open(config: SourceConfig, context: SourceContext, answer: None) -> DataSource:  # noqa: ARG004
        return open_standard_library_docs()


def open_source(config: SourceConfig, context: SourceContext) -> DataSource:
    """Open a source on this rank only, without communication."""
    source_type = DATA_SOURCES[config.source_type]
    opened: DataSource = source_type.open(config, context, source_type.ask_once(config, context))
    return opened
