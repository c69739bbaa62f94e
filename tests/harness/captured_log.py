"""The package's log in a list."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torchtrain.logging import logger


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Context manager that yields a list, to which each message of level INFO and above is appended."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
