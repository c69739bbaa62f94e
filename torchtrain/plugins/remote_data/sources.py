"""The data sources that are read over a network."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torchtrain.config.registry import FOLDER_FORMATS
from torchtrain.config.schema import SourceConfig
from torchtrain.datasets.builtin_sources import format_of_folder
from torchtrain.datasets.data_source import DataSource, One, SourceContext, SourceType
from torchtrain.datasets.file_formats import kind_of
from torchtrain.plugins.remote_data.range_cache import cache_of
from torchtrain.plugins.remote_data.remote_files import (
    RemoteFile,
    find_remote_files,
    identify_remote,
    require_text_in_head,
    streamed_file,
)
from torchtrain.plugins.remote_data.streamed_text import StreamedText


class RemoteFiles(SourceType):
    """data.path with URLs: text files, which are streamed, or a folder of one of the ``FOLDER_FORMATS``."""

    @classmethod
    def is_streamed(cls, config: SourceConfig) -> bool:
        return len(config.paths) > 1 or kind_of(config.paths[0])[0] != ""  # the URL of a folder may be of any format

    @classmethod
    def query_on_rank0(cls, config: SourceConfig, context: SourceContext) -> str | list[RemoteFile]:
        """The name of the folder's format, or the text files."""
        name = format_of_folder(config, context)
        if name is not None:
            return name
        option = f"{context.section}.path"
        files = find_remote_files(config.paths, f"{option} = {config.path!r}", option)
        require_text_in_head(files, config.text_column, skip_not_utf8=config.skip_not_utf8, cache=cache_of(context))
        return files

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: str | list[RemoteFile]) -> DataSource:
        if isinstance(answer, str):
            opened: DataSource = FOLDER_FORMATS[answer].open(config, context)
            return opened
        cache = cache_of(context)
        return StreamedText(
            [streamed_file(file, config.text_column, cache) for file in answer],
            context.readers,
            f"{context.section}.path = {config.path!r}",
            partial(identify_remote, answer, context.verify_bytes),
            skip_not_utf8=config.skip_not_utf8,
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
        return hub.list_files(config, label)

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext, answer: Any) -> DataSource:
        from torchtrain.plugins.remote_data import hub

        label = _label(config, context.section)
        if config.download:
            return hub.open_downloaded(config, label, answer, context.verify_bytes)
        return hub.open_streamed(config, context.readers, label, answer, context.verify_bytes)


def _label(source: SourceConfig, section: str) -> str:
    return f"{section}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"
