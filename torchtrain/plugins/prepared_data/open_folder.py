"""Open a folder of tokenized data by its path or URL."""

from typing import TYPE_CHECKING

from torchtrain.files import local_path
from torchtrain.plugins.prepared_data.data_folder import DataFolder, LocalFolder

if TYPE_CHECKING:
    from torchtrain.plugins.remote_data.range_cache import RangeCache


def open_folder(location: str, option: str = "", cache: "RangeCache | None" = None) -> DataFolder:
    """The folder at a path or URL, which need not exist.

    Args:
        location: the path or URL.
        option: its option, for messages.
        cache: keeps the ranges that are read from a URL.

    Raises:
        ConfigError: the scheme of the URL is unknown, or its package is not installed.
    """
    path = local_path(location)
    if path is not None:
        return LocalFolder(path)
    from torchtrain.plugins.prepared_data.remote_folder import RemoteFolder  # of plugins that local folders do not need

    return RemoteFolder(location, option, cache)
