"""Plugin: convert configs of torchtitan, ``python -m torchtrain.convert_config`` (docs/from-torchtitan.md)."""
