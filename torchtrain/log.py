"""Logging to the terminal: one line an event, from the ranks in ``LOG_RANK``; errors from all."""

import logging
import os
import sys

logger = logging.getLogger("torchtrain")


def init_logging() -> None:
    """Send the package's messages to stderr. ``LOG_RANK`` (such as 0,3; default 0) names the ranks that say all."""
    rank = os.environ.get("RANK", "0")
    shown = os.environ.get("LOG_RANK", "0").split(",")
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if shown == [rank] else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank in shown else logging.ERROR)
    logger.propagate = False
