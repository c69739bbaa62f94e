"""What the fork server does before it forks, so that no process forked from it has to: import, and parse options."""

import gc

import parity  # noqa: F401

from torchtrain.config.parse import parse

parse([])
gc.collect()
gc.freeze()  # this memory stays shared: forked processes do not look through it
