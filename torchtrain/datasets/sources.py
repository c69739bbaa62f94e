"""From a source of the config to its documents or tokens."""

from pathlib import Path

from torchtrain.config.schema import Source
from torchtrain.datasets.files import open_files, open_standard_library
from torchtrain.datasets.hub import open_downloaded, open_streamed
from torchtrain.datasets.prepared import MANIFEST, PreparedTokens
from torchtrain.datasets.text import TextSource
from torchtrain.log import logger


def open_prepared(source: Source, key: str, tokenizer_hash: str, verify_bytes: float) -> PreparedTokens | None:
    """The folder that ``source`` names, if it holds prepared data."""
    if not source.path or not Path(source.path, MANIFEST).exists():
        return None
    opened = PreparedTokens(Path(source.path), tokenizer_hash, verify_bytes, f"{key}.path = {source.path!r}")
    if opened.skipped:
        logger.info("%s: %d documents were skipped when it was prepared", opened.name, opened.skipped)
    return opened


def open_text(source: Source, key: str, lanes: int) -> TextSource:
    """The documents of ``source``, if need be streamed by ``lanes`` readers side by side; ``key`` is its config key."""
    if source.path:
        return open_files(source.path, source.text_column, f"{key}.path = {source.path!r}")
    if not source.name:
        return open_standard_library()
    label = f"{key}.name = {source.name!r} (subset {source.subset!r}, split {source.split!r})"
    if source.download:
        return open_downloaded(source, label)
    return open_streamed(source, lanes, label)
