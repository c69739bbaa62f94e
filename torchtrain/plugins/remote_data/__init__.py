"""Plugin: text by URLs and datasets of the Hugging Face hub, streamed or downloaded (docs/data.md)."""

from torchtrain.config.registry import CONFIG_SECTIONS, DATA_SOURCES

REQUIRES = ("torchtrain.plugins.object_storage",)

CONFIG_SECTIONS.add("remote_data", "torchtrain.plugins.remote_data.options:RemoteDataConfig")
DATA_SOURCES.add("remote_files", "torchtrain.plugins.remote_data.sources:RemoteFiles")
DATA_SOURCES.add("hub", "torchtrain.plugins.remote_data.sources:HubDataset")
