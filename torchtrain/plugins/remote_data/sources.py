"""The data sources that are read over a network."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchtrain.config.schema import section_of
from torchtrain.datasets.builtin_sources import has_tokens, open_tokens, require_text
from torchtrain.datasets.data_source import DataSource, One, SourceContext, SourceType, TextInput
from torchtrain.datasets.file_formats import kind_of
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.text_input import InputFile, LocalFile, TextFiles
from torchtrain.files import local_path
from torchtrain.logging import logger
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.remote_data.range_cache import cache_of
from torchtrain.plugins.remote_data.remote_files import (
    ListedFile,
    RemoteFile,
    find_remote_files,
    identify_listing,
    require_text_in_head,
)
from torchtrain.plugins.remote_data.streamed_text import StreamedText, find_held_out

EXPANSION = 3  # of compressed text and Parquet, in which a byte stands for about so many bytes of text
BYTES_PER_TOKEN = 4  # of English text, about


class RemoteFiles(SourceType):
    """data.path with URLs: text files, which are streamed, or a folder of tokens."""

    @classmethod
    def data_option(cls, config: SourceConfig) -> str:
        return "path" if config.source_type == "remote_files" else "type"

    @classmethod
    def query_on_rank0(
        cls, config: SourceConfig, context: SourceContext
    ) -> tuple[Sequence[ListedFile], Sequence[str]] | None:
        """The text files, and the held-out documents if they are read; None for a folder of tokens."""
        if has_tokens(config, context):
            return None
        files = cls._find(config, context)
        cache = cache_of(context)
        inputs = [RemoteFile(file, cache) for file in files]
        label = cls._label(config, context)
        require_text_in_head(inputs, config.text_column, label, skip_not_utf8=config.skip_not_utf8)
        return files, held_out_documents(config, context, partial(cls._open_streamed, config, files))

    @classmethod
    def open(
        cls, config: SourceConfig, context: SourceContext, answer: tuple[Sequence[ListedFile], Sequence[str]] | None
    ) -> DataSource:
        if answer is None:
            return open_tokens(config, context)
        files, held_out = answer
        log_cost_of_tokens(cls._label(config, context), ((file.name, file.size) for file in files), context)
        return cls._open_streamed(config, files, context, held_out)

    @classmethod
    def open_text(cls, config: SourceConfig, context: SourceContext) -> TextInput:
        require_text(config, context)
        files, label = cls._find(config, context), cls._label(config, context)
        paths = [local_path(file.url) for file in files]
        # Workers read the text once, so that there is no need for a cache.
        inputs: list[InputFile] = [
            RemoteFile(file) if path is None else LocalFile(path) for file, path in zip(files, paths, strict=True)
        ]
        require_text_in_head(inputs, config.text_column, label, skip_not_utf8=config.skip_not_utf8)
        identity = identify_listing(files, context.verify_bytes)

        def identity_now() -> str:
            return identify_listing(cls._find(config, context), context.verify_bytes).text

        return TextFiles(
            inputs,
            config.text_column,
            label,
            lambda: identity,
            identity_now=None if any(paths) else identity_now,
            skip_not_utf8=config.skip_not_utf8,
        )

    @classmethod
    def _find(cls, config: SourceConfig, context: SourceContext) -> list[ListedFile]:
        return find_remote_files(config.paths, cls._label(config, context), f"{context.section}.path")

    @classmethod
    def _open_streamed(
        cls, config: SourceConfig, files: Sequence[ListedFile], context: SourceContext, held_out: Sequence[str] = ()
    ) -> StreamedText:
        cache = cache_of(context)
        return StreamedText(
            [RemoteFile(file, cache) for file in files],
            config.text_column,
            cls._label(config, context),
            context,
            partial(identify_listing, files, context.verify_bytes),
            skip_not_utf8=config.skip_not_utf8,
            held_out=held_out,
        )

    @staticmethod
    def _label(config: SourceConfig, context: SourceContext) -> str:
        return f"{context.section}.path = {config.path!r}"


class HubDataset(SourceType):
    """data.type = "hub": a dataset of the Hugging Face hub, streamed, or downloaded and tokenized."""

    @classmethod
    def data_option(cls, config: SourceConfig) -> str:
        return "name" if config.source_type == "hub" else "type"

    # The module hub is imported in methods, because it imports the libraries of the hub.

    @classmethod
    def pin(cls, config: One, saved: Callable[[], Sequence[SourceConfig]], section: str) -> One:
        """With the revision of the config, else that in ``saved``, else the newest."""
        if config.revision:
            return config
        for old in saved():
            if old.revision and (old.name, old.subset, old.split) == (config.name, config.subset, config.split):
                return replace(config, revision=old.revision)
        from torchtrain.plugins.remote_data import hub

        return replace(config, revision=hub.find_revision(config, _label(config, section)))

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> Any:
        """The files, which are downloaded if they are not streamed, and the held-out documents if they are read."""
        from torchtrain.plugins.remote_data import hub

        label = _label(config, context.section)
        files = hub.list_files(config, label)
        if config.download:
            hub.open_text(config, files, label, context.verify_bytes)
            return files, ()

        def open_streamed(context: SourceContext) -> StreamedText:
            return hub.open_streamed(config, files, label, context)

        return files, held_out_documents(config, context, open_streamed)

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: Any) -> DataSource | TextInput:
        from torchtrain.plugins.remote_data import hub

        label = _label(config, context.section)
        files, held_out = answer
        if config.download:
            return hub.open_text(config, files, label, context.verify_bytes)
        log_cost_of_tokens(label, files, context)
        return hub.open_streamed(config, files, label, context, held_out)

    @classmethod
    def open_text(cls, config: SourceConfig, context: SourceContext) -> TextInput:
        from torchtrain.plugins.remote_data import hub

        label = _label(config, context.section)
        return hub.open_text(config, hub.list_files(config, label), label, context.verify_bytes)


def held_out_documents(
    config: SourceConfig, context: SourceContext, open_streamed: Callable[[SourceContext], StreamedText]
) -> list[str]:
    """The documents that the held-out part of a streamed source has; none, if another part is read."""
    if not (context.held_out and config.held_out):
        return []
    most_bytes = section_of(context, RemoteDataConfig).held_out_gib * 2**30
    return find_held_out(open_streamed(replace(context, global_batch_size=1)), config.held_out, most_bytes)


def log_cost_of_tokens(label: str, files: Iterable[tuple[str, int]], context: SourceContext) -> None:
    """Log how large the tokens of streamed training data would be, given the names and sizes of its files."""
    if not context.section.startswith("data") or context.held_out:
        return
    text = 0
    for name, size in files:
        kind, compression = kind_of(name)
        text += size * (EXPANSION if compression or kind == "parquet" else 1)
    token_bytes = 2 if context.tokenizer.vocab_size <= 1 << 16 else 4
    logger.info(
        "%s: about %.3g GiB of text are streamed; tokenized first, they would take about %.3g GiB: "
        "python -m torchtrain.prepare --job.config_file ... --prepare.output FOLDER",
        *(label, text / 2**30, text * token_bytes / BYTES_PER_TOKEN / 2**30),
    )


def _label(source: SourceConfig, section: str) -> str:
    return f"{section}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"
