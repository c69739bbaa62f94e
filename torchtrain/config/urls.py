"""Files and folders that an option names by a path or a URL. A plugin fetches those behind a URL (``URL_READERS``)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from torchtrain.config.registry import URL_READERS
from torchtrain.errors import TorchtrainError
from torchtrain.files import local_path, scheme_of


class URLReader(ABC):
    """Reads what URLs of a scheme name.

    Raises:
        ConfigError: the URL cannot be used: nothing is there, access is denied, or a package is not installed.
        StorageError: the store does not respond; the same command may succeed later.
    """

    @abstractmethod
    def names(self, url: str, option: str) -> list[str]:
        """Names of the files in a folder; empty if it does not exist. ``option``: that of the URL, for messages."""

    @abstractmethod
    def fetch(self, url: str, option: str, names: Sequence[str] = ()) -> Path:
        """The path of a local copy, which the processes of a machine share; see ``local_copy``."""


def local_copy(location: str, option: str, names: Sequence[str] = ()) -> Path:
    """``location`` as a path: if it is a URL, that of a local copy, which is fetched once per machine.

    A process that asks for it again gets the same copy, whatever has changed behind the URL.

    Args:
        location: a path, or the URL of a file or folder.
        option: the option whose value it is, for messages.
        names: the files that are fetched of a folder, or besides the file in its folder, as far as they exist.

    Raises:
        ConfigError, StorageError: see ``URLReader``.
    """
    path = local_path(location)
    if path is not None:
        return path
    reader = _reader(location, option)
    try:
        return reader.fetch(location, option, names)
    except TorchtrainError as error:
        error.of_machine = True  # which may have other credentials
        raise


def names_at(url: str, option: str) -> list[str]:
    """Names of the files in the folder ``url``; empty if it does not exist. Raises as ``local_copy`` does."""
    return _reader(url, option).names(url, option)


def _reader(url: str, option: str) -> URLReader:
    scheme = scheme_of(url)
    URL_READERS.check(scheme, f"{option} = {url!r}: its scheme")
    reader: URLReader = URL_READERS[scheme]
    return reader
