"""Plugin: the options of torchtitan, for errors that name ours, and ``python -m torchtrain.convert_config``, which
converts its configs (docs/from-torchtitan.md)."""

from torchtrain.config.registry import OPTION_HINTS

OPTION_HINTS.add("torchtitan", "torchtrain.plugins.from_torchtitan.options:HINTS")
