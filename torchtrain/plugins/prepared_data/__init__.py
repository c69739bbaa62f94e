"""Plugin: tokenize data once, before the run (docs/data.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS, FOLDER_FORMATS

REQUIRES = ("torchtrain.plugins.object_storage", "torchtrain.plugins.remote_data")

CONFIG_SECTIONS.add("prepare", "torchtrain.plugins.prepared_data.options:PrepareConfig")
FOLDER_FORMATS.add("prepared", "torchtrain.plugins.prepared_data.source:PreparedFolder")
