"""Folders that ``torchtrain.prepare`` wrote, as data of a run."""

from pathlib import Path

from torchtrain.config.schema import SourceConfig
from torchtrain.datasets.data_source import DataSource, FolderFormat, SourceContext
from torchtrain.datasets.file_formats import kind_of
from torchtrain.errors import DataError
from torchtrain.files import is_url, names_in
from torchtrain.logging import logger
from torchtrain.plugins.prepared_data.open_folder import open_folder
from torchtrain.plugins.prepared_data.tokenized import MANIFEST, UNFINISHED, TokenizedDataset


class PreparedFolder(FolderFormat):
    """``data.path`` names a folder of prepared data, by a path or a URL."""

    markers = (MANIFEST, UNFINISHED)

    @classmethod
    def recognizes(cls, config: SourceConfig, context: SourceContext) -> bool:
        """Whether the only path is a folder of prepared data.

        Raises:
            DataError: it is only partly prepared, or contains several such folders.
        """
        option = f"{context.section}.path"
        if len(config.paths) == 1 and MANIFEST in open_folder(config.paths[0], option).sizes():
            return True
        for path in (Path(path) for path in config.paths if not is_url(path)):
            if (path / UNFINISHED).exists():
                raise DataError(
                    f"{option} = {config.path!r}: {path} is only partly prepared; run torchtrain.prepare again to "
                    "finish it"
                )
            inner = [path / name for name in names_in(path) if not kind_of(name)[0]] if path.is_dir() else []
            prepared = [str(folder) for folder in (path, *inner) if (folder / MANIFEST).exists()]
            if prepared:
                raise DataError(
                    f"{option} = {config.path!r} holds prepared data in several folders ({', '.join(prepared)}); name "
                    "each in a table [[data.sources]] with its path and its weight"
                )
        return False

    @classmethod
    def open(cls, config: SourceConfig, context: SourceContext) -> DataSource:
        option, cache = f"{context.section}.path", None
        if is_url(config.paths[0]):
            from torchtrain.plugins.remote_data.range_cache import cache_of

            cache = cache_of(context)
        opened = TokenizedDataset(
            open_folder(config.paths[0], option, cache),
            context.tokenizer.content_hash,
            context.verify_bytes,
            f"{option} = {config.path!r}",
        )
        if opened.skipped:
            logger.info("%s: %d documents were skipped when it was prepared", opened.name, opened.skipped)
        if opened.held_out and not config.held_out:
            logger.info(
                "%s was prepared with data.held_out = %g, and is trained on without these documents; with %s.held_out "
                "= %g they are validated on",
                *(opened.name, opened.held_out, context.section, opened.held_out),
            )
        return opened
