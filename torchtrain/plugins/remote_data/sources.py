"""The data sources that are read over a network."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchtrain.config.registry import FOLDER_FORMATS
from torchtrain.config.schema import SourceConfig, section_of
from torchtrain.datasets.builtin_sources import format_of_folder
from torchtrain.datasets.data_source import DataSource, One, SourceContext, SourceType
from torchtrain.datasets.file_formats import kind_of
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.remote_data.range_cache import cache_of
from torchtrain.plugins.remote_data.remote_files import (
    RemoteFile,
    find_remote_files,
    identify_remote,
    require_text_in_head,
    streamed_file,
)
from torchtrain.plugins.remote_data.streamed_text import StreamedText, find_held_out


class RemoteFiles(SourceType):
    """data.path with URLs: text files, which are streamed, or a folder of one of the ``FOLDER_FORMATS``."""

    @classmethod
    def is_streamed(cls, config: SourceConfig) -> bool:
        return len(config.paths) > 1 or kind_of(config.paths[0])[0] != ""  # the URL of a folder may be of any format

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> str | tuple[list[RemoteFile], list[str]]:
        """The name of the folder's format, or the text files and the held-out documents, if they are read."""
        name = format_of_folder(config, context)
        if name is not None:
            return name
        option = f"{context.section}.path"
        files = find_remote_files(config.paths, f"{option} = {config.path!r}", option)
        require_text_in_head(files, config.text_column, skip_not_utf8=config.skip_not_utf8, cache=cache_of(context))
        open_one = partial(cls._open_text, config, replace(context, readers=1), files, ())
        return files, held_out_documents(config, context, open_one)

    @classmethod
    def open(
        cls, config: SourceConfig, context: SourceContext, answer: str | tuple[list[RemoteFile], list[str]]
    ) -> DataSource:
        if isinstance(answer, str):
            opened: DataSource = FOLDER_FORMATS[answer].open(config, context)
            return opened
        return cls._open_text(config, context, *answer)

    @classmethod
    def _open_text(
        cls, config: SourceConfig, context: SourceContext, files: Sequence[RemoteFile], held_out: Sequence[str]
    ) -> StreamedText:
        cache = cache_of(context)
        return StreamedText(
            [streamed_file(file, config.text_column, cache) for file in files],
            context.readers,
            f"{context.section}.path = {config.path!r}",
            partial(identify_remote, files, context.verify_bytes),
            skip_not_utf8=config.skip_not_utf8,
            held_out=held_out,
        )


class HubDataset(SourceType):
    """data.type = "hub": a dataset of the Hugging Face hub, downloaded or streamed."""

    # The module hub is imported in methods, because it imports the libraries of the hub.

    @classmethod
    def is_streamed(cls, config: SourceConfig) -> bool:
        return not config.download

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
        from torchtrain.plugins.remote_data import hub

        label = _label(config, context.section)
        if config.download:
            return hub.download(config, label, context.verify_bytes)
        files = hub.list_files(config, label)
        open_one = partial(hub.open_streamed, config, 1, label, files, context.verify_bytes)
        return files, held_out_documents(config, context, open_one)

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: Any) -> DataSource:
        from torchtrain.plugins.remote_data import hub

        label = _label(config, context.section)
        if config.download:
            return hub.open_downloaded(config, label, answer, context.verify_bytes)
        files, held_out = answer
        return hub.open_streamed(config, context.readers, label, files, context.verify_bytes, held_out)


def held_out_documents(
    config: SourceConfig, context: SourceContext, open_for_one_reader: Callable[[], StreamedText]
) -> list[str]:
    """The documents that the held-out part of a streamed source has; none, if another part is read."""
    if not (context.held_out and config.held_out):
        return []
    most_bytes = section_of(context, RemoteDataConfig).held_out_gib * 2**30
    return find_held_out(open_for_one_reader(), config.held_out, most_bytes)


def _label(source: SourceConfig, section: str) -> str:
    return f"{section}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"
